"""One run of `triforce chat`: what is needed for a conversation, the conversation itself, and its JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, cast

import typer
from rich.console import Console

from ...offload import Engine
from ...offload.contexts.home import user_store
from ...offload.speculation.vocabulary import check_pair
from ...tp.devices import device_name
from ...tp.errors import TriforceError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..generate.prompt import Source, read_text, saved_text
from ..generate.run import ROOM, load_engine
from ..terminal.output import JsonFile
from ..terminal.stopping import Signals
from ..terminal.streams import Unfailing, tell
from .conversation import Conversation
from .forms import Opening, PlainForm, form_of
from .lines import Lines
from .request import ChatRequest
from .session import Session


def run(
    request: ChatRequest,
    text: Source | None,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    signals: Signals,
) -> None:
    """Talks until there are no more questions. `directories` are the target's and the draft's.

    Raises:
        TriforceError: the conversation cannot begin, or ranks were lost.
        Stop: it was interrupted outside an answer on a terminal; its JSON is written.
        typer.Exit: without a terminal: not every question was answered.
    """
    console = Console(file=cast(IO[str], Unfailing(sys.stderr)), highlight=False)
    target, draft = directories
    config = check_pair(target, draft)
    tokenizer = Tokenizer.load(target).with_arguments(request.template_args or ())
    if sys.stdin is None or sys.stdin.closed:
        raise TriforceError("there is no standard input to read questions from")
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not json_file.on_stdout
    with signals.allowed():
        opening = _opening(request, text, tokenizer, config)
        form = form_of(tokenizer, opening, request.system)
        conversation = Conversation(
            form,
            tokenizer,
            positions=config.max_position_embeddings,
            max_new_tokens=request.max_new_tokens,
            opening=opening,
            seed=request.sampling.seed,
            trim=request.trim,
        )
        conversation.ask("?")  # the text alone may be too long, which is known before weights load
        engine = load_engine(request, len(conversation.token_ids) + request.max_new_tokens, ROOM)
    _introduce(engine, request, opening, isinstance(form, PlainForm), tokenizer.render is not None)
    if on_terminal:
        from .screen import Screen

        questions = Screen(signals, user_store().names)
    else:
        questions = Lines(signals)
        if sys.stdin.isatty():
            tell("type questions, a line each; Ctrl-D ends")
    session = Session(engine, conversation, request, signals, console, questions, silent=json_file.on_stdout)
    try:
        session.talk()
    finally:
        json_file.write([{"question": turn.question, **turn.stats} for turn in conversation.history])
    engine.finish()
    engine.close()
    if session.failed and not on_terminal:
        raise typer.Exit(1)


def _opening(request: ChatRequest, text: Source | None, tokenizer: Tokenizer, config: ModelConfig) -> Opening | None:
    """What the conversation begins with.

    Raises:
        ContextError: the saved context cannot be used.
        UsageError: no token, or a system message that has no place.
    """
    if request.context is not None:
        return Opening.of(*saved_text(request.context, config), tokenizer, f"the context {request.context}")
    if text is None:
        return None
    token_ids, frame = read_text(text.text, request.system, False, tokenizer)
    return Opening.of(token_ids, frame, tokenizer, text.name)


def _introduce(engine: Engine, request: ChatRequest, opening: Opening | None, plain: bool, has_template: bool) -> None:
    """What talks here, on stderr."""
    target = engine.target
    million = target.config.num_parameters / 1e6
    about = f"; about {opening.name}, {len(opening.token_ids):,} tokens" if opening else ""
    dtype = str(target.dtype).removeprefix("torch.")
    tell(f"{request.model}, {million:,.1f} M parameters, {dtype} on {device_name(target.device)}{about}")
    if plain:
        reason = "the context stands outside the chat template" if has_template else "this model has no chat template"
        tell(f"{reason}: it gets questions and answers as plain text (Question: … Answer: …)")
