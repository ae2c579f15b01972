"""`triforce chat`: everything that can be checked before PyTorch is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...tp.errors import UsageError
from ...tp.weights.registry import find_pair
from ..call import Call
from .request import ChatRequest

EPILOG = """[bold]Examples[/]

  A conversation, or one about a text:
  [cyan]triforce chat --model llama-3.1-8b-instruct[/]
  [cyan]triforce chat --prompt-file book.txt[/]

  About a book that was read before; [cyan]/save NAME[/] keeps the conversation in the same way:
  [cyan]triforce read book.txt[/]
  [cyan]triforce chat --context book[/]

  In a script, a question a line:
  [cyan]printf 'Who is Levin?\\\\nAnd Kitty?\\\\n' | triforce chat --context book --seed 1 > answers.txt[/]
"""


def chat(request: ChatRequest, call: Call) -> None:
    """A conversation, about a text or about anything: only what is new is read for each question.

    Answers go to stdout as they are accepted. [bold]Ctrl-C[/] ends an answer and keeps it, [bold]Ctrl-D[/] leaves;
    [bold]/help[/] lists commands. Without a terminal each line of stdin is a question.
    """
    from ..ranks import starts_or_follows
    from ..session.source import read_file, read_option
    from ..terminal.output import JsonFile
    from ..terminal.streams import tell

    if request.system is not None:
        request = replace(request, system=read_option("--system", request.system, tell).strip() or None)
    _check_options(request)
    if starts_or_follows(request, call, goes_on=True):
        return
    with JsonFile.prepare(request.json) as json_file:
        text = read_file(request.prompt_file, "--prompt-file", tell) if request.prompt_file else None
        directories = find_pair(request.model, request.wanted_draft, tell)
        with call.signals.held(release=False):  # importing PyTorch may swallow what a signal raises
            from .run import run

            run(request, text, directories, json_file, call.signals)


def _check_options(request: ChatRequest) -> None:
    """Raises:
    UsageError: options that exclude each other, or an impossible name.
    """
    if request.context is not None:
        from ...offload.contexts.home import user_store

        user_store().directory(request.context)
        if request.prompt_file is not None:
            raise UsageError("--context and --prompt-file are both given, but one text starts a conversation; give one")
        if request.system is not None:
            raise UsageError(
                "--context and --system are both given, but the system message is part of a saved context; give it to "
                "triforce read"
            )
    if request.prompt_file == Path("-"):
        raise UsageError("--prompt-file is -, but standard input has the questions; give a file")
