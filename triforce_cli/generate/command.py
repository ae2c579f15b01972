"""`triforce generate`: the checks that are possible before PyTorch is imported."""

from __future__ import annotations

from ...tp.errors import UsageError
from ...tp.weights.registry import find_pair
from ..call import Call
from .options import GenerateOptions

EPILOG = """[bold]Examples[/]

  The embedded model answers three questions about the log book of a harbour (another log for each seed), and
  continues it:
  [cyan]triforce generate[/]

  Continue a book:
  [cyan]triforce generate --prompt-file book.txt --truncate head > more.txt[/]

  A question about a book, for a larger model, which is downloaded once:
  [cyan]triforce generate --model llama-3.1-8b-instruct --prompt-file book.txt --ask "Who is Levin?"[/]

  Several questions about a book, answered together; then four answers to one question:
  [cyan]triforce generate --prompt-file book.txt --ask "Who is Levin?" --ask "Where does he live?"[/]
  [cyan]triforce generate --prompt-file book.txt --ask "Who is Levin?" -n 4[/]

  A book that is prefilled once, for many questions:
  [cyan]triforce read book.txt[/]
  [cyan]triforce generate --context book --ask "Who is Levin?"[/]

  An answer as JSON that satisfies a schema:
  [cyan]triforce generate --prompt-file book.txt --ask "Who is Levin?" --json-schema person.json[/]

  From a pipe:
  [cyan]man bash | triforce generate --prompt-file - --max-new-tokens 64[/]

  For a script: one JSON document, with the same tokens every time:
  [cyan]triforce generate --prompt-file book.txt --seed 1 --json - | jq .token_ids[/]

  With fixed draft lengths; then plain decoding, for comparison:
  [cyan]triforce generate --prompt-file book.txt --draft-length 4 --block-length 12 --budget 1024[/]
  [cyan]triforce generate --prompt-file book.txt --tiers 1[/]
"""


def generate(options: GenerateOptions, call: Call) -> None:
    """Continues a text, or answers a question about it.

    The text goes to stdout as its tokens are accepted. Everything else goes to stderr.
    If there are several answers, each is written when it is complete, in the order of the questions.
    [bold]Ctrl-C[/] stops the run; the text written so far is kept.
    """
    from ..ranks import starts_or_follows
    from ..session.form import grammar_of_options
    from ..session.source import read_ask, read_source
    from ..terminal.output import JsonFile
    from ..terminal.streams import print_note
    from .question_list import WantedAnswer, wanted_answers

    asks = [read_ask(ask, print_note) for ask in options.ask or []]
    _check_options(options)
    if starts_or_follows(options, call):
        return
    with JsonFile.prepare(options.json) as json_file:
        grammar = grammar_of_options(options.json_schema, options.regex, options.grammar, print_note)
        answers = wanted_answers(asks, options.asks, options.answers)
        source = read_source(options.prompt_file, options.prompt, print_note, options.context, options.sampling.seed)
        # What may be a download of gigabytes comes after all that can be checked without it.
        directories = find_pair(options.model, options.wanted_draft, print_note)
        with call.with_pytorch():
            from .run import run

            about_log = source.log_seed is not None and answers == [WantedAnswer(None, 0, 1)]
            run(options, None if about_log else answers, source, directories, json_file, call.signals, grammar)


def _check_options(options: GenerateOptions) -> None:
    """Checks the options.

    Raises:
        UsageError: options exclude each other.
    """
    files = {"--prompt-file": options.prompt_file, "--asks": options.asks}
    files |= {"--json-schema": options.json_schema, "--grammar": options.grammar}
    from_stdin = [name for name, path in files.items() if str(path) == "-"]
    if len(from_stdin) > 1:
        names = " and ".join(from_stdin[:2])
        raise UsageError(f"{names} are both -, but there is only one standard input; give a file for one of them")
    if options.ignore_eos and any((options.json_schema, options.regex, options.grammar)):
        raise UsageError(
            "--ignore-eos is given, but an answer with --json-schema, --regex or --grammar ends when it is complete; "
            "leave --ignore-eos out"
        )
    for name in (options.context, options.save_context):
        if name is not None:
            from ...offload.contexts.home import user_store

            user_store().directory(name)
    if options.context is None:
        return
    for other, given in (("--save-context", options.save_context), ("--no-context", options.no_context)):
        if given:
            raise UsageError(f"--context and {other} are both given, but the saved context is the text; give one")
