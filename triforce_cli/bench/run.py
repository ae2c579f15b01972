"""One run of `triforce bench`: from checked options to measurements, table, JSON and picture."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from rich.console import Console

from ...offload import Engine, Sampling
from ...offload.planning.cost_model import weights_read
from ...offload.speculation.vocabulary import check_draft
from ...offload.transfer.bandwidth import link_bandwidth, memory_bandwidth
from ...offload.transfer.make import make_link
from ...tp.devices import device_name
from ...tp.errors import CapacityError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.model.decoder import Decoder
from ..generate.prompt import Source, long_prompt
from ..generate.run import load_engine, step
from ..generate.tokenizer import Tokenizer, check_same_vocabulary
from ..options import Request
from ..terminal.output import JsonFile, ResultFile, result_console
from ..terminal.stopping import Stop
from ..terminal.streams import Unfailing, tell
from .command import AUTO_CONTEXTS, Asked
from .measure import AtContext, measure, steps
from .progress import Display
from .report import Bandwidth, Subject, as_document, report

if TYPE_CHECKING:
    from ..app import Call


def run(
    request: Request,
    asked: Asked,
    source: Source,
    directories: tuple[Path, Path | None],
    files: tuple[JsonFile, ResultFile],
    call: Call,
) -> None:
    """Measures and reports. `directories` are the target's and the draft's, `files` those of JSON and picture.

    Raises:
        TriforceError: the request cannot be met.
        Stop: it was interrupted; what was measured by then is out.
    """
    target, draft = directories
    config = ModelConfig.load(target)
    sampling = Sampling(request.temperature, request.top_p, request.top_k, request.seed)
    contexts = fitting_contexts(asked, config, request.max_new_tokens)
    if draft:
        check_draft(config, ModelConfig.load(draft))
        check_same_vocabulary(target, draft)
    tokenizer = Tokenizer.load(target)
    prompt = long_prompt(source, tokenizer, contexts[-1] - request.max_new_tokens)
    call.signals.allow()
    engine = load_engine(request, contexts[-1])
    tiers = _tiers(asked, engine)
    device = engine.target.device
    bandwidth = measure_bandwidth(
        device, engine.target.ranks.local_size, streams=device.type == "cuda" or request.resident is not None
    )
    subject = replace(
        describe(request, engine.target, engine.draft is not None, call),
        sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed")},
        new_tokens=request.max_new_tokens,
        repeats=asked.repeats,
        prompt={
            "name": prompt.name,
            "text_tokens": prompt.text_tokens,
            "repeated": prompt.text_tokens < len(prompt.token_ids),
        },
    )

    console = Console(file=cast(IO[str], Unfailing(sys.stderr)), highlight=False)
    order = steps(contexts, tiers, asked.repeats)
    found: list[AtContext] = []

    def document(interrupted: bool) -> dict[str, Any]:
        return as_document(subject, bandwidth, [at for at in found if at.runs], interrupted)

    call.signals.hold()
    with published(document, files, call), Display(console, order, request.max_new_tokens) as display:
        measure(
            engine,
            prompt.token_ids,
            order,
            sampling,
            request.max_new_tokens,
            found=found,
            watch=display,
            advance=lambda generation: step(generation, call.signals),
        )
    engine.finish()
    engine.close()


@contextmanager
def published(
    document: Callable[[bool], dict[str, Any]], files: tuple[JsonFile, ResultFile], call: Call
) -> Iterator[None]:
    """Publishes `document(interrupted)` after the block; if that was stopped or failed, what it measured by then."""
    try:
        yield
    except (Stop, Exception):
        call.signals.hold()
        partial = document(True)
        if partial["contexts"]:
            _publish(partial, *files)
        raise
    _publish(document(False), *files)


def _publish(document: dict[str, Any], json_file: JsonFile, plot_file: ResultFile) -> None:
    """The files where they were asked for, and the table to stdout, or to stderr if that is the JSON's.

    Each is written even if another cannot be, and the table last: a pipe that nobody reads further ends it.
    """
    with ExitStack() as last_first:
        last_first.callback(report, result_console(json_file), document)
        if plot_file.wanted:
            last_first.callback(_draw, document, plot_file)
        last_first.callback(json_file.write, document)


def _draw(document: dict[str, Any], plot_file: ResultFile) -> None:
    from .plot import draw

    plot_file.write_bytes(draw(document, plot_file.kind))


def fitting_contexts(asked: Asked, config: ModelConfig, new_tokens: int) -> tuple[int, ...]:
    """The lengths to measure.

    Raises:
        CapacityError: one is beyond the model's last position.
        UsageError: so are all that are measured by default.
    """
    if asked.contexts is None:
        fitting = tuple(n for n in AUTO_CONTEXTS if new_tokens < n <= config.max_position_embeddings)
        if not fitting:
            raise UsageError(
                f"{config.name} has {config.max_position_embeddings:,} positions and --new-tokens is {new_tokens:,}; "
                "say with --contexts what to measure"
            )
        return fitting
    if asked.contexts[-1] > config.max_position_embeddings:
        raise CapacityError(
            f"--contexts asks for {asked.contexts[-1]:,} tokens, but {config.name} has "
            f"{config.max_position_embeddings:,} positions; leave the longer ones out"
        )
    return asked.contexts


def _tiers(asked: Asked, engine: Engine) -> tuple[int, ...]:
    """The numbers of tiers to measure: without a draft two are all there are."""
    if engine.draft is not None or asked.tiers[-1] < 3:
        return asked.tiers
    tell("there is no draft: two tiers take the place of three (--draft D gives one)")
    return tuple(sorted({min(count, 2) for count in asked.tiers}))


def measure_bandwidth(device: torch.device, local_ranks: int, *, streams: bool) -> Bandwidth:
    """Of memory, and of the link if keys and values may cross it. The ranks of a CPU share its memory, so rank 0 reads
    with the threads of all."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(threads * local_ranks)
    memory = memory_bandwidth(device)
    torch.set_num_threads(threads)
    if not streams:
        return Bandwidth(memory)
    link = make_link(device)
    carried = link_bandwidth(link, device)
    link.close()
    return Bandwidth(memory, carried["in"])


def describe(request: Request, target: Decoder, drafts: bool, call: Call) -> Subject:
    """What is measured and where, but for what it writes."""
    size = target.ranks.size
    return Subject(
        command=shlex.join(["triforce", *call.arguments]),
        model=request.model,
        draft=(request.draft or request.model) if drafts else None,
        device=target.device.type,
        device_name=device_name(target.device),
        world_size=size,
        dtype=str(target.dtype).removeprefix("torch."),
        parameters=target.config.num_parameters,
        weight_bytes=size * weights_read(target.part, size) * target.dtype.itemsize,
    )
