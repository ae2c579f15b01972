"""One run of `triforce bench`: from checked options to measurements, table, JSON and picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import torch
from rich.console import Console

from ...offload import Engine, Generation
from ...offload.contexts.home import contexts_root
from ...offload.planning.cost_model import weights_read
from ...offload.planning.measured import BENCH
from ...offload.speculation.vocabulary import check_pair
from ...offload.transfer.bandwidth import disk_bandwidth, link_bandwidth, memory_bandwidth
from ...offload.transfer.link import make_link
from ...offload.transfer.staged.block_file import DiskError, DiskSpace
from ...tp.devices import device_name
from ...tp.errors import CapacityError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.model.decoder import Decoder
from ...tp.weights.tokenizer import Tokenizer
from ..call import Call
from ..measurement import machine, provenance, publish
from ..options import Request
from ..session.open import load_engine
from ..session.prompt import long_prompt
from ..session.source import Source
from ..terminal.output import JsonFile, ResultFile
from ..terminal.stopping import Stop, step
from ..terminal.streams import BestEffortStream, tell
from .measure import AtContext, measure, steps
from .progress import Display
from .report import as_document, report
from .request import AUTO_CONTEXTS, QUESTION_TOKENS, Asked


def run(
    request: Asked,
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
    config = check_pair(target, draft)
    sampling = request.sampling
    contexts = fitting_contexts(request, config, request.max_new_tokens + (QUESTION_TOKENS if request.batch else 0))
    tokenizer = Tokenizer.load(target)
    prompt = long_prompt(source, tokenizer, config, contexts[-1] - request.max_new_tokens)
    with call.signals.allowed():
        engine = load_engine(request, contexts[-1])
        tiers = _tiers(request, engine)
        streams = request.settings.resident is not None
        head = describe(request, engine.target, engine.draft is not None, call, streams=streams)
    head |= {
        "sampling": asdict(sampling),
        "new_tokens": request.max_new_tokens,
        "repeats": request.repeat,
        "batches": list(request.batch) if request.batch else None,
        "prompt": {
            "name": prompt.name,
            "text_tokens": prompt.text_tokens,
            "repeated": prompt.text_tokens < len(prompt.token_ids),
        },
    }

    console = Console(file=cast(IO[str], BestEffortStream(sys.stderr)), highlight=False)
    order = steps(contexts, tiers, request.repeat, request.batch or (None,))
    found: list[AtContext] = []

    def document(interrupted: bool) -> dict[str, Any]:
        return as_document(head, [at for at in found if at.runs], interrupted)

    with published(document, files), Display(console, order, request.max_new_tokens) as display:
        measure(
            engine,
            prompt.token_ids,
            order,
            sampling,
            request.max_new_tokens,
            found=found,
            watch=display,
            advance=lambda run: step(cast(Generation, run), call.signals),
            saved=request.context,
        )
    engine.finish()
    engine.close()


@contextmanager
def published(document: Callable[[bool], dict[str, Any]], files: tuple[JsonFile, ResultFile]) -> Iterator[None]:
    """Publishes `document(interrupted)` after the block; if that was stopped or failed, what it measured by then."""
    try:
        yield
    except (Stop, Exception):
        partial = document(True)
        if partial["contexts"]:
            _publish(partial, *files)
        raise
    _publish(document(False), *files)


def _publish(document: dict[str, Any], json_file: JsonFile, plot_file: ResultFile) -> None:
    pictures = [lambda: _draw(document, plot_file)] if plot_file.wanted else []
    publish(document, json_file, report, *pictures)


def _draw(document: dict[str, Any], plot_file: ResultFile) -> None:
    from .plot import draw

    plot_file.write_bytes(draw(document, plot_file.kind))


def fitting_contexts(request: Asked, config: ModelConfig, new_tokens: int) -> tuple[int, ...]:
    """The lengths to measure.

    Raises:
        CapacityError: one is beyond the model's last position.
        UsageError: so are all that are measured by default.
    """
    if request.contexts is None:
        fitting = tuple(n for n in AUTO_CONTEXTS if new_tokens < n <= config.max_position_embeddings)
        if not fitting:
            raise UsageError(
                f"{config.name} has {config.max_position_embeddings:,} positions{config.positions_note} and "
                f"--max-new-tokens is {new_tokens:,}; say with --contexts what to measure"
            )
        return fitting
    if request.contexts[-1] > config.max_position_embeddings:
        raise CapacityError(
            f"--contexts asks for {request.contexts[-1]:,} tokens, but {config.name} has "
            f"{config.max_position_embeddings:,} positions{config.positions_note}; leave the longer ones out"
        )
    return request.contexts


def _tiers(request: Asked, engine: Engine) -> tuple[int, ...]:
    """The numbers of tiers to measure: without a draft two are all there are."""
    if engine.draft is not None or engine.settings.lookup or request.tiers[-1] < 3:
        return request.tiers
    tell("there is no draft: two tiers take the place of three (--draft D gives one)")
    return tuple(sorted({min(count, 2) for count in request.tiers}))


def describe(request: Request, target: Decoder, drafts: bool, call: Call, *, streams: bool) -> dict[str, Any]:
    """The head of the document: what is measured, where, and the bandwidths, which are measured here.

    Args:
        drafts: whether there is a draft.
        streams: whether the KV cache may stream on a CPU too.
    """
    size, device = target.ranks.size, target.device
    return {
        **provenance(BENCH, call.command),
        "machine": machine(device.type, device_name(device), size, torch.get_num_threads()),
        "model": request.model,
        "draft": (request.draft or request.model) if drafts else None,
        "parameters": target.config.num_parameters,
        "weight_bytes": size * weights_read(target.part, size) * target.dtype.itemsize,
        "dtype": str(target.dtype).removeprefix("torch."),
        "sampling": None,
        "new_tokens": 0,
        "repeats": 0,
        "prompt": None,
        "measured_bandwidth": _bandwidth(
            target, streams=streams or device.type == "cuda", on_disk=request.settings.host_memory is not None
        ),
    }


def _bandwidth(target: Decoder, *, streams: bool, on_disk: bool) -> dict[str, float | None]:
    """GB/s of memory and, where keys and values may cross them, of link and disk. The ranks of a CPU share its memory,
    so rank 0 reads with the threads of all."""
    device, threads = target.device, torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(threads * target.ranks.local_size)
    memory, carried = memory_bandwidth(device), None
    torch.set_num_threads(threads)
    if streams:
        link = make_link(device)
        carried = link_bandwidth(link, device)["in"] / 1e9
        link.close()
    disk = None
    if on_disk:
        with suppress(CapacityError, DiskError):  # of a disk that is too full for the test
            disk = disk_bandwidth(DiskSpace(contexts_root())) / 1e9
    return {"memory_gb_per_s": memory / 1e9, "link_gb_per_s": carried, "disk_gb_per_s": disk}
