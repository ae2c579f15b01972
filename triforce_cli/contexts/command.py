"""`triforce read` and `triforce contexts`: texts that are read once, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer
from typer.core import TyperGroup

from ...tp.errors import TriforceError
from ...tp.weights.registry import find_pair
from ..call import Call
from ..options import ReportRequest, command
from ..terminal.output import JsonFile
from .request import NameRequest, PruneRequest, ReadRequest

READ_EPILOG = """[bold]Examples[/]

  A book, and then questions about it, at any time:
  [cyan]triforce read anna_karenina.txt --as anna[/]
  [cyan]triforce generate --context anna --ask "Who is Levin?"[/]

  Several files as one context, for another model:
  [cyan]triforce read notes/*.txt --as notes --model llama-3.1-8b-instruct[/]
"""


def read(request: ReadRequest, call: Call) -> None:
    """Reads a text once and saves its keys and values as a context, from which answers start at once.

    Interrupted, killed or out of disk space, the same command goes on where it was.
    A context holds the text in readable form; only its owner can read its files.
    """
    from ...offload.contexts.home import user_store
    from ..ranks import starts_or_follows
    from ..session.source import read_file, read_option
    from ..terminal.streams import tell

    request = replace(request, name=request.name or _name_of(request))
    user_store().directory(request.name or "")
    if request.system is not None:
        request = replace(request, system=read_option("--system", request.system, tell))
    if starts_or_follows(request, call):
        return
    with JsonFile.prepare(request.json) as json_file:
        text = "".join(read_file(path, "FILE", tell).text for path in request.files)
        target, _ = find_pair(request.model, "none", tell)
        with call.signals.held(release=False):  # importing PyTorch may swallow what a signal raises
            from .run import run

            run(request, text, target, json_file, call.signals)


def _name_of(request: ReadRequest) -> str:
    """The context's name where none is given: that of the first file, with what cannot be in a name left out."""
    stem = request.files[0].stem if str(request.files[0]) != "-" else "stdin"
    kept = "".join(letter if letter.isalnum() or letter in " .+@=-_" else "-" for letter in stem).lstrip(" .+@=-")
    return kept[:100].rstrip() or "text"


def list_contexts(request: ReportRequest, call: Call) -> None:
    """Lists the saved contexts."""
    from ...offload.contexts.home import user_store
    from .report import describe_all, show_list

    with JsonFile.prepare(request.json) as json_file:
        store = user_store()
        described = describe_all(store)
        json_file.write(described)
        if not json_file.on_stdout:
            show_list(described, store)


def show(request: NameRequest, call: Call) -> None:
    """Shows one saved context: model, tokens, bytes and files."""
    from ...offload.contexts.home import user_store
    from .report import describe, show_one

    with JsonFile.prepare(request.json) as json_file:
        store = user_store()
        store.load(request.name)
        described = describe(store, request.name)
        json_file.write(described)
        if not json_file.on_stdout:
            show_one(described, store)


def verify(request: NameRequest, call: Call) -> None:
    """Checks every checksum of a saved context; exits 1 where one is wrong."""
    from ...offload.contexts.home import user_store
    from ..terminal.streams import tell

    with JsonFile.prepare(request.json) as json_file:
        store = user_store()
        wrong = []
        with call.signals.allowed():
            for segment, reason in store.verify(request.name):
                tell(f"positions {segment.first:,} to {segment.stop:,}: {reason or 'as they were written'}")
                if reason:
                    wrong.append({"first": segment.first, "tokens": segment.tokens, "reason": reason})
        json_file.write({"name": request.name, "damaged": wrong})
    if wrong:
        raise TriforceError(
            f"the context {request.name!r} is damaged from position {wrong[0]['first']:,} on; read its text again "
            "under this name to mend it"
        )


def remove(request: NameRequest, call: Call) -> None:
    """Removes a saved context. What it shares with others stays theirs."""
    from ...offload.contexts.home import user_store
    from ..terminal.streams import tell

    with JsonFile.prepare(request.json) as json_file:
        store = user_store()
        store.remove(request.name)
        json_file.write({"removed": [request.name]})
        tell(f"removed the context {request.name}")


def prune(request: PruneRequest, call: Call) -> None:
    """Removes contexts, the one used longest ago first, until all others take no more than --keep."""
    from ...offload.contexts.home import user_store
    from ...tp.units import gib
    from ..terminal.streams import tell

    with JsonFile.prepare(request.json) as json_file:
        store = user_store()
        removed = store.prune(request.keep)
        json_file.write({"removed": removed})
        for name in removed:
            tell(f"removed the context {name}")
        tell(f"{len(store.names())} contexts take {gib(store.disk_bytes())}")


class _ListByDefault(TyperGroup):
    """Commands of which `list` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ("-h", "--help") or not args[0].startswith("-"))
        return super().parse_args(ctx, args if named else ["list", *args])


app = typer.Typer(
    cls=_ListByDefault,
    rich_markup_mode="rich",
    no_args_is_help=False,
    help="Lists, shows, checks and removes saved contexts (texts that [bold]triforce read[/] has read).",
)
app.command("list")(command(ReportRequest, list_contexts))
app.command("show")(command(NameRequest, show))
app.command("verify")(command(NameRequest, verify))
app.command("rm")(command(NameRequest, remove))
app.command("prune")(command(PruneRequest, prune))
