"""`triforce serve`: the checks that are possible before PyTorch is imported."""

from __future__ import annotations

from importlib.util import find_spec

from ...tp.errors import TriforceError
from ...tp.weights.registry import find_pair
from ..call import Call
from .options import ServeOptions

EPILOG = """[bold]Examples[/]

  For this machine, with questions about a text that was prefilled before:
  [cyan]triforce read book.txt[/]
  [cyan]triforce serve --context book[/]

  curl http://127.0.0.1:8000/v1/chat/completions -d
  [cyan]'{"messages": [{"role": "user", "content": "Who is Levin?"}], "stream": true}'[/]

  For other users, who need a key:
  [cyan]triforce serve --model llama-3.1-8b-instruct --host 0.0.0.0 --api-key @key.txt[/]

  For your own programs, through a Unix socket that nobody else can open:
  [cyan]triforce serve --context book --uds ~/triforce.sock[/]
  [cyan]curl --unix-socket ~/triforce.sock http://localhost/v1/models[/]
"""

_PACKAGES = ("starlette", "uvicorn", "prometheus_client", "python_multipart")


def serve(options: ServeOptions, call: Call) -> None:
    """Answers requests over HTTP in OpenAI's or Anthropic's format, several at a time, streamed or not.

    [bold]Ctrl-C[/] or SIGTERM stops the server: running answers may go on for --grace seconds.
    A second signal ends them at once.

    If --host-memory gives a number, a server on a CPU takes that much memory when it starts.
    """
    _check_options(options)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise TriforceError(
            f"serve needs {', '.join(missing)}, which is not installed: pip install 'triforce-cli[serve]'"
        )
    from ..ranks import starts_or_follows
    from ..terminal.streams import print_note
    from .access import Access
    from .listening import listener
    from .memory import limit_free_memory

    if options.api_key is None:
        Access.of(options)  # refused before anything is downloaded or started
    if starts_or_follows(options, call, goes_on=True, reserves=True):
        return
    limit_free_memory()
    access = Access.of(options)
    with listener(options) as listening:
        directories = find_pair(options.model, options.wanted_draft, print_note)
        with call.with_pytorch():
            from .run import run

            run(options, access, listening, directories, call.signals)


def _check_options(options: ServeOptions) -> None:
    """Checks the options.

    Raises:
        UsageError: a name is not allowed.
    """
    if options.context is not None:
        from ...offload.contexts.home import user_store

        user_store().directory(options.context)
