"""One run of `triforce generate`: from a checked request to text, live display, statistics and JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar, cast

import torch
from rich.console import Console

from ...offload import Engine, Generation, Round
from ...offload.contexts.manifest import Frame
from ...offload.contexts.model import ContextRequest
from ...offload.speculation.vocabulary import check_pair
from ...tp.errors import CapacityError, TriforceError
from ...tp.weights.tokenizer import TextStream, Tokenizer
from ..options import EngineOptions
from ..terminal.live import LiveDisplay
from ..terminal.output import JsonFile, TextOutput
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import Unfailing
from .prompt import Source, build_prompt
from .report import report_choices, report_context, report_ranks, report_statistics, start_progress
from .request import GenerateRequest

T = TypeVar("T")


def run(
    request: GenerateRequest,
    ask: str | None,
    source: Source,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    signals: Signals,
) -> None:
    """Writes one answer as it grows, and everything else where it belongs. `directories` are target and draft.

    Raises:
        TriforceError: the request cannot be met; nothing was written.
        Stop: the run was interrupted, after its text, its statistics and its JSON are out.
    """
    console = Console(file=cast(IO[str], Unfailing(sys.stderr)), highlight=False)
    target, draft = directories
    config = check_pair(target, draft)
    tokenizer = Tokenizer.load(target).with_arguments(request.template_args or ())
    with signals.allowed():
        new_tokens, apart = request.max_new_tokens, request.save_context is not None
        prompt = build_prompt(source, ask, tokenizer, config, new_tokens, request.truncate, apart=apart)
        engine = load_engine(request, len(prompt.token_ids) + new_tokens)
        report_choices(console, engine, request.model, source.name, prompt, new_tokens)
    contexts = ContextRequest(
        name=request.context,
        find=not request.no_context,
        save=request.save_context,
        save_tokens=prompt.text_tokens,
        frame=Frame(chat=ask is not None and tokenizer.chat is not None),
    )

    live = request.live and LiveDisplay.possible(console)
    output = None if json_file.on_stdout else TextOutput(deferred=live and same_terminal(sys.stdout, sys.stderr))
    text = TextStream(tokenizer.decode)
    generation: Generation | None = None
    ended: BaseException | None = None
    try:
        with start_progress(console, len(prompt.token_ids)) as progress:
            generation = engine.stream(
                prompt.token_ids,
                request.sampling,
                request.max_new_tokens,
                ignore_eos=request.ignore_eos,
                on_memory=progress.memory,
                on_prefill=progress.prefill,
                interrupted=signals.came,
                contexts=contexts,
            )
            report_context(generation)
            step(generation, signals)  # the first token is taken from the statistics, like all others
        name = Path(request.model).name
        with LiveDisplay(console, generation, name, request.max_new_tokens) if live else nullcontext() as display:
            _decode(generation, signals, text, output, display)
    except (Stop, Exception) as error:
        if generation is None or not (generation.statistics.token_ids or isinstance(error, Stop)):
            raise
        ended = error
    generation.close()
    ended = _finish(console, generation, text, output, json_file, ended)
    if ended is not None:
        raise ended
    engine.finish()
    engine.close()


ROOM = 4_096
"""Tokens that a cache has room for beyond a run that others will go on from."""


def load_engine(request: EngineOptions, capacity: int | None, room: int = 0) -> Engine:
    """The engine that `request` asks for, checked to hold `capacity` tokens, if those are known; see `Engine.load`."""
    engine = Engine.load(
        request.model,
        draft=request.draft,
        device=request.device,
        dtype=request.dtype,
        gpus=request.gpus,
        capacity=capacity,
        room=room,
        **request.settings.given,
    )
    report_ranks(engine)
    return engine


def follow(request: EngineOptions, *, goes_on: bool = False) -> None:
    """What a rank above 0 does in `run`: it computes the same steps, and reads, prints and writes nothing.

    Args: `goes_on` is whether rank 0 starts runs that go on from one another, also after one that did not fit.

    Raises:
        TriforceError: as `run`, or another rank has ended.
    """
    engine = load_engine(request, None, ROOM if goes_on else 0)
    while True:
        try:
            generation = engine.follow()
        except CapacityError:
            if not goes_on:
                raise
            continue
        if generation is None:
            break
        for _ in generation:
            pass
        del generation  # it holds the cache, whose memory the next run may need
    engine.close()


def _decode(
    generation: Generation, signals: Signals, text: TextStream, output: TextOutput | None, display: LiveDisplay | None
) -> None:
    event: Round | None = None
    while True:
        piece = text.push(generation.statistics.token_ids[text.num_tokens :])
        if output:
            output.write(piece)
        if display:
            display.note(piece, event)
        event = step(generation, signals)
        if event is None:
            return


def step(rounds: Iterator[T], signals: Signals) -> T | None:
    """One step of a run that ends where `signals.came`; `None` at its end.

    Raises:
        Stop: it has ended, and a signal came.
    """
    event = next(rounds, None)
    if event is None:
        with signals.allowed():
            pass
    return event


def _finish(
    console: Console,
    generation: Generation,
    text: TextStream,
    output: TextOutput | None,
    json_file: JsonFile,
    ended: BaseException | None,
) -> BaseException | None:
    """Writes text, JSON and statistics even if one of them fails; returns the first error or interrupt of the run."""
    piece = text.push(generation.statistics.token_ids[text.num_tokens :]) + text.flush()
    try:
        if output:
            output.write(piece)
            output.close()
    except Stop as stop:
        ended = ended or stop
    stats = generation.stats()
    try:
        json_file.write(with_text(stats, text.text))
    except (TriforceError, Stop) as error:
        ended = ended or error
    report_statistics(console, stats)
    return ended


def with_text(stats: dict[str, Any], text: str) -> dict[str, Any]:
    """The JSON, with what the engine does not know: the text behind its token ids, the threads of this process."""
    document: dict[str, Any] = {}
    for key, value in stats.items():
        document[key] = value
        if key == "world_size":
            document["threads"] = torch.get_num_threads()
        if key == "token_ids":
            document["text"] = text
    return document


def same_terminal(one: TextIO, other: TextIO) -> bool:
    """Whether both streams are the same terminal, by its device: in a container it may have no name."""
    if not (one.isatty() and other.isatty()):
        return False
    return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
