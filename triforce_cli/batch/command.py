"""`triforce batch`: the checks that are possible before PyTorch is imported."""

from __future__ import annotations

from pathlib import Path

from ...tp.errors import UsageError
from ...tp.parallel.place import Place
from ...tp.weights.registry import find_pair
from ..call import Call
from .options import BatchOptions

EPILOG = """[bold]Examples[/]

  A file of requests in the format of OpenAI's batch interface. If the run is stopped, the same command goes on:
  [cyan]triforce batch requests.jsonl -o answers.jsonl --model llama-3.1-8b-instruct[/]

  A line of this file:
  [cyan]{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",[/]
  [cyan] "body": {"messages": [{"role": "user", "content": "Who is Levin?"}], "context": "book", "max_tokens": 64}}[/]

  Questions about a text that was prefilled before:
  [cyan]triforce read book.txt[/]
  [cyan]triforce batch questions.jsonl -o answers.jsonl --context book --seed 1[/]
"""


def batch(options: BatchOptions, call: Call) -> None:
    """Answers a file of requests, several at a time. Each answer is written as a line when it is complete.

    Lines have the format of OpenAI's batch interface.
    [bold]Ctrl-C[/] stops the run. To go on, give the same command again: requests that have an answer are skipped,
    failed and interrupted ones are tried again.
    """
    from ..ranks import starts_or_follows
    from ..terminal.output import JsonFile
    from ..terminal.streams import print_note
    from .requests_file import RequestsFile

    place = Place.from_environment()
    launches = place is None and options.gpus > 1
    requests = None
    if (place is None or place.rank == 0) and not (launches and options.requests == Path("-")):
        _check_options(options)
        requests = RequestsFile.read(options.requests, options.output)
    if not (launches and requests and not requests.wanted) and starts_or_follows(options, call):
        return
    assert requests  # rank 0 has read it
    with JsonFile.prepare(options.json) as json_file:
        directories = find_pair(options.model, options.wanted_draft, print_note) if requests.wanted else None
        with call.with_pytorch():
            from .run import run

            run(options, requests, directories, json_file, call.signals)


def _check_options(options: BatchOptions) -> None:
    """Checks the options.

    Raises:
        UsageError: a name is not allowed, or one file has two purposes.
    """
    if options.context is not None:
        from ...offload.contexts.home import user_store

        user_store().directory(options.context)
    if options.output == Path("-"):
        raise UsageError("--output is -, but the next run reads finished answers from this file; give a file")
    if options.output.exists() and options.requests.exists() and options.output.samefile(options.requests):
        raise UsageError(f"--output {options.output} is the file of requests; give another one")
