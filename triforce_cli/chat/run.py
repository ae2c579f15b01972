"""One run of `triforce chat`: prepares a conversation, runs it, and writes its JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from ...offload import Engine
from ...offload.contexts.home import user_store
from ...tp.errors import TriforceError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..session.open import ROOM, engine_in_words, load_engine, open_pair, stderr_console
from ..session.prompt import Context, QuestionForm
from ..session.report import AS_PLAIN_TEXT, NO_TEMPLATE
from ..session.source import Source
from ..terminal.output import JsonFile
from ..terminal.stopping import Signals
from ..terminal.streams import print_note
from .conversation import Conversation
from .options import ChatOptions
from .talk import Lines, Talk


def run(
    options: ChatOptions,
    text: Source | None,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    signals: Signals,
) -> None:
    """Runs a conversation until there are no more questions.

    Args:
        directories: those of the target and the draft.

    Raises:
        TriforceError: the conversation cannot begin, or ranks were lost; see `Talk.until_the_end`.
        Stop: the conversation was interrupted, but not in an answer on a terminal; its JSON is written.
        typer.Exit: there is no terminal, and not every question was answered.
    """
    console = stderr_console()
    config, tokenizer = open_pair(directories, options.template_args, options.settings.rope_scaling)
    if sys.stdin is None or sys.stdin.closed:
        raise TriforceError("there is no standard input to read questions from")
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not json_file.on_stdout
    with signals.interruptible():
        context = _context(options, text, tokenizer, config)
        form = QuestionForm.of(tokenizer, context, None if context else options.system)
        conversation = Conversation(
            form,
            tokenizer,
            positions=config.max_position_embeddings,
            max_new_tokens=options.max_new_tokens,
            context=context,
            seed=options.sampling.seed,
            trim=options.trim,
        )
        conversation.ask("?")  # the text alone may be too long, which is known before weights load
        engine = load_engine(options, len(conversation.token_ids) + options.max_new_tokens, ROOM)
    _introduce(engine, options, context, form.template is None, tokenizer.render is not None)
    if on_terminal:
        from .screen import Screen

        questions = Screen(signals, user_store().names)
    else:
        questions = Lines(signals)
        if sys.stdin.isatty():
            print_note("type questions, one per line; Ctrl-D ends")
    talk = Talk(engine, conversation, options, signals, console, questions, silent=json_file.on_stdout)
    try:
        talk.until_the_end()
    finally:
        json_file.write([{"question": turn.question, **turn.stats} for turn in conversation.history])
    engine.finish()
    engine.close()
    if talk.failed and not on_terminal:
        raise typer.Exit(1)


def _context(options: ChatOptions, text: Source | None, tokenizer: Tokenizer, config: ModelConfig) -> Context | None:
    """The text that the conversation is about; `None` if there is none.

    Raises:
        ContextError: the saved context cannot be used.
        UsageError: the text has no token, or there is no place for the system message.
    """
    if options.context is not None:
        return Context.saved(options.context, tokenizer, config)
    if text is None:
        return None
    return Context.read(text.text, text.name, tokenizer, system=options.system)


def _introduce(engine: Engine, options: ChatOptions, context: Context | None, plain: bool, has_template: bool) -> None:
    """Prints the model and its settings on stderr."""
    about = f"; about {context.name}, {len(context.token_ids):,} tokens" if context else ""
    print_note(engine_in_words(engine, options.model) + about)
    if plain:
        reason = (
            "the context was saved without the chat template" if has_template else "this model has no chat template"
        )
        print_note(f"{reason}: {AS_PLAIN_TEXT}")
        if options.template_args:
            print_note(NO_TEMPLATE)
