"""`triforce contexts`: lists, shows, verifies and removes saved contexts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..tp.errors import TriforceError
from ..tp.units import gib
from .call import Call
from .options import OUTPUT, ReportOptions, argument, command, option
from .parameters import SIZE
from .terminal.output import JsonFile
from .terminal.streams import print_note
from .terminal.tables import Column, print_lines, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from ..offload.contexts.store import ContextStore


@dataclass(frozen=True, kw_only=True)
class NameOptions(ReportOptions):
    """The options of the commands for one saved context."""

    name: Annotated[str, argument("NAME", "The name of a saved context.")]


@dataclass(frozen=True, kw_only=True)
class PruneOptions(ReportOptions):
    """The options of `triforce contexts prune`."""

    keep: Annotated[int, option(OUTPUT, SIZE, "Maximum disk space of all contexts together.")]
    """Bytes."""


def list_contexts(options: ReportOptions, call: Call) -> None:
    """Lists the saved contexts."""
    with JsonFile.prepare(options.json) as json_file:
        store = _user_store()
        described = describe_all(store)
        json_file.write(described)
        if not json_file.on_stdout:
            show_list(described, store)


def show(options: NameOptions, call: Call) -> None:
    """Shows one saved context: model, tokens, bytes and files."""
    with JsonFile.prepare(options.json) as json_file:
        store = _user_store()
        described = describe(store, options.name)
        json_file.write(described)
        if not json_file.on_stdout:
            _show_one(described, store)


def verify(options: NameOptions, call: Call) -> None:
    """Checks every checksum of a saved context; exits 1 if one is wrong."""
    with JsonFile.prepare(options.json) as json_file:
        damaged = []
        with call.signals.interruptible():
            for segment, reason in _user_store().verify(options.name):
                print_note(f"positions {segment.first:,} to {segment.stop:,}: {reason or 'as they were written'}")
                if reason:
                    damaged.append({"first": segment.first, "tokens": segment.tokens, "reason": reason})
        json_file.write({"name": options.name, "damaged": damaged})
    if damaged:
        raise TriforceError(
            f"the context {options.name!r} is damaged from position {damaged[0]['first']:,} on; read its text again "
            "under this name to mend it"
        )


def remove(options: NameOptions, call: Call) -> None:
    """Removes a saved context. Files that it shares with other contexts are kept."""
    with JsonFile.prepare(options.json) as json_file:
        _user_store().remove(options.name)
        json_file.write({"removed": [options.name]})
        print_note(f"removed the context {options.name}")


def prune(options: PruneOptions, call: Call) -> None:
    """Removes contexts, the least recently used first, until the others take no more than --keep."""
    with JsonFile.prepare(options.json) as json_file:
        store = _user_store()
        removed = store.prune(options.keep)
        json_file.write({"removed": removed})
        for name in removed:
            print_note(f"removed the context {name}")
        print_note(f"{len(store.names())} contexts take {gib(store.disk_bytes())}")


def _user_store() -> ContextStore:
    from ..offload.contexts.home import user_store

    return user_store()


def describe_all(store: ContextStore) -> list[dict[str, Any]]:
    """The JSON of every context (see `describe`); of one that cannot be read, its name and the reason (`damaged`)."""
    from ..offload.contexts.manifest import ContextError

    found = []
    for name in store.names():
        try:
            found.append(describe(store, name))
        except ContextError as error:
            found.append({"name": name, "damaged": str(error)})
    return found


def describe(store: ContextStore, name: str) -> dict[str, Any]:
    """The JSON of one context: bytes, tokens, and seconds since the epoch.

    Raises:
        ContextError: see `ContextStore.load`.
    """
    manifest = store.load(name)
    return {
        "name": name,
        "model": manifest.model,
        "dtype": manifest.shape.dtype,
        "arithmetic": manifest.arithmetic,
        "tokens": manifest.saved,
        "planned_tokens": manifest.tokens,
        "kv_bytes": manifest.kv_bytes,
        "disk_bytes": store.disk_bytes([name]),
        "segments": len(manifest.segments),
        "packed_segments": manifest.packed_segments,
        "complete": manifest.complete,
        "chat": manifest.frame.chat,
        "conversation": manifest.frame.answered,
        "created": manifest.created,
        "used": store.used(name),
    }


def show_list(described: list[dict[str, Any]], store: ContextStore, console: Console | None = None) -> None:
    """Prints the contexts of `describe_all` as a table, and their size on the disk.

    Args:
        console: the console to print to; default: stdout.
    """
    from rich.console import Console

    console = console or Console(file=sys.stdout, highlight=False)
    if not described:
        print_lines(console, [f"no contexts in {store.root}; triforce read FILE saves one"])
        return
    print_table(console, _COLUMNS, described)
    quota = f" of {gib(store.most_bytes)} (TRIFORCE_CONTEXTS_MAX)" if store.most_bytes is not None else ""
    total = f"{gib(store.disk_bytes())}{quota} in {store.root}, {gib(store.free_bytes())} free"
    print_lines(console, ["", f"{total}; files that several contexts share count once"])


def _column(title: str, cell: Callable[[dict[str, Any]], str], left: bool = False, damaged: str = "-") -> Column:
    """A column of the list. `damaged` is its text for a context that cannot be read."""
    return Column(title, lambda one: damaged if "damaged" in one else cell(one), left)


def _tokens(one: dict[str, Any]) -> str:
    return f"{one['tokens']:,}" + ("" if one["complete"] else f" of {one['planned_tokens']:,}")


_COLUMNS = (
    Column("name", lambda one: one["name"], left=True),
    _column("model", lambda one: f"{one['model']}, {one['dtype']}", left=True, damaged="damaged"),
    _column("tokens", _tokens),
    _column("on disk", lambda one: gib(one["disk_bytes"])),
    _column("used", lambda one: _local_time(one["used"]), left=True),
)


def _show_one(one: dict[str, Any], store: ContextStore) -> None:
    from rich.console import Console

    unfinished = "" if one["complete"] else f" of {one['planned_tokens']:,}; triforce read goes on from there"
    place = "the beginning of a user's message, which a question completes" if one["chat"] else "the text alone"
    place = "a conversation, which a question continues" if one["conversation"] else place
    packed = f"{one['packed_segments']} of them packed" if one["packed_segments"] else "none packed"
    lines = [
        f"context   {one['name']} in {store.directory(one['name'])}",
        f"model     {one['model']}, {one['dtype']}",
        f"tokens    {one['tokens']:,}{unfinished}",
        f"text      {place}",
        f"on disk   {gib(one['disk_bytes'])} in {one['segments']} segments, {packed}; KV cache {gib(one['kv_bytes'])}",
        f"saved     {_local_time(one['created'])}, used {_local_time(one['used'])}",
    ]
    print_lines(Console(file=sys.stdout, highlight=False), lines)


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class _ListByDefault(TyperGroup):
    """A group of commands that runs `list` if no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ("-h", "--help") or not args[0].startswith("-"))
        return super().parse_args(ctx, args if named else ["list", *args])


app = typer.Typer(
    cls=_ListByDefault,
    rich_markup_mode="rich",
    no_args_is_help=False,
    help="Lists, shows, checks and removes saved contexts (KV caches on disk; [bold]triforce read[/] saves one).",
)
app.command("list")(command(ReportOptions, list_contexts))
app.command("show")(command(NameOptions, show))
app.command("verify")(command(NameOptions, verify))
app.command("rm")(command(NameOptions, remove))
app.command("prune")(command(PruneOptions, prune))
