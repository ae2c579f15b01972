"""`triforce chat`: the checks that are possible before PyTorch is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...tp.errors import UsageError
from ...tp.weights.registry import find_pair
from ..call import Call
from .options import ChatOptions

EPILOG = """[bold]Examples[/]

  A conversation; then one about a text:
  [cyan]triforce chat --model llama-3.1-8b-instruct[/]
  [cyan]triforce chat --prompt-file book.txt[/]

  About a book that was prefilled before ([cyan]/save NAME[/] saves a conversation in the same way):
  [cyan]triforce read book.txt[/]
  [cyan]triforce chat --context book[/]

  In a script, one question per line:
  [cyan]printf 'Who is Levin?\\nAnd Kitty?\\n' | triforce chat --context book --seed 1 > answers.txt[/]
"""


def chat(options: ChatOptions, call: Call) -> None:
    """Runs a conversation, about a text or about anything else. Each question needs a prefill of the new tokens only.

    Answers go to stdout as their tokens are accepted. Without a terminal, each line of stdin is a question.
    [bold]Ctrl-C[/] ends an answer and keeps it, [bold]Ctrl-D[/] leaves, [bold]/help[/] lists the commands.
    """
    from ..ranks import starts_or_follows
    from ..session.source import read_file, read_option
    from ..terminal.output import JsonFile
    from ..terminal.streams import print_note

    if options.system is not None:
        options = replace(options, system=read_option("--system", options.system, print_note).strip() or None)
    _check_options(options)
    if starts_or_follows(options, call, goes_on=True):
        return
    with JsonFile.prepare(options.json) as json_file:
        text = read_file(options.prompt_file, "--prompt-file", print_note) if options.prompt_file else None
        directories = find_pair(options.model, options.wanted_draft, print_note)
        with call.with_pytorch():
            from .run import run

            run(options, text, directories, json_file, call.signals)


def _check_options(options: ChatOptions) -> None:
    """Checks the options.

    Raises:
        UsageError: options exclude each other, or a name is not allowed.
    """
    if options.context is not None:
        from ...offload.contexts.home import user_store

        user_store().directory(options.context)
        if options.prompt_file is not None:
            raise UsageError(
                "--context and --prompt-file are both given, but a conversation starts with only one text; give one"
            )
        if options.system is not None:
            raise UsageError(
                "--context and --system are both given, but the system message is part of a saved context; give it to "
                "triforce read"
            )
    if options.prompt_file == Path("-"):
        raise UsageError("--prompt-file is -, but standard input has the questions; give a file")
