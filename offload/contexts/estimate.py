"""Estimates the time of a prefill from a short trial on this machine."""

from __future__ import annotations

import time
from math import inf

import torch

from ...tp.decoder import Decoder, forward_work
from ...tp.devices import synchronize
from ..caches.full import FullCache

_TRIAL = 512
"""Tokens of the trial prefill. It is repeated a few times; the first time also warms up."""


@torch.inference_mode()
def reading_seconds(target: Decoder, start: int, tokens: int) -> float | None:
    """About how many seconds the prefill of `tokens` tokens after the first `start` tokens takes.

    `None` if several ranks share the model, because all of them would have to run the trial. The figure is modelled:
    the trial's seconds per multiplication, times the multiplications of the prefill.
    """
    if target.ranks.size > 1:
        return None
    ids = torch.arange(_TRIAL, device=target.device) % target.config.vocab_size
    seconds = inf
    for _ in range(3):
        kind = {"dtype": target.dtype, "device": target.device}
        cache = FullCache.on_device(target.part, target.rope, **kind, capacity=_TRIAL)
        cache.keep_mass(rows=0)
        synchronize(target.device)
        began = time.perf_counter()
        target.forward(ids, cache)
        synchronize(target.device)
        seconds = min(seconds, time.perf_counter() - began)
    return seconds * forward_work(target.config, start, tokens) / forward_work(target.config, 0, _TRIAL)
