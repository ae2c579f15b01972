"""The prefill of a sequence: what is saved of its prompt is restored, the rest computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...tp.devices import to_device
from ...tp.model.decoder import Decoder, forward_work
from .sequence import BatchSequence


def read_prompt(target: Decoder, sequence: BatchSequence, report: Callable[[float], None] | None) -> Tensor:
    """Restores what is saved of the prompt and computes the rest, in parts where it is to be saved; the logits
    `[1, vocab_size]` after its last token.

    Args: `report` is called with the share of it that is done, 0 to 1.
    """
    caches = sequence.opened
    full, saved = caches.full, caches.saved
    if saved:
        saved.begin(full)
    start, stop = full.length, len(sequence.context)
    sequence.statistics = replace(sequence.statistics, reused_tokens=start)
    logits = torch.empty(0)
    for end in saved.stops(start, stop) if saved else [stop]:
        pending = to_device(sequence.context[full.length : end], target.device)
        progress = None
        if report is not None:
            progress = _progress(target, report, (start, full.length, end, stop))
        logits = target.forward(pending, full, on_progress=progress)
        if saved:
            saved.save(full)
    return logits


def _progress(
    target: Decoder, report: Callable[[float], None], positions: tuple[int, int, int, int]
) -> Callable[[float], None]:
    """What to call with the share done of the tokens `first` to `end`, where `start` to `stop` are to be read.

    Args: `positions` are `start`, `first`, `end` and `stop`.
    """
    start, first, end, stop = positions
    done, part = (forward_work(target.config, a, b - a) for a, b in ((start, first), (first, end)))
    whole = forward_work(target.config, start, stop - start)
    return lambda share: report((done + share * part) / whole)
