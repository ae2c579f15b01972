"""How long a text takes to read, from a short trial on this machine."""

from __future__ import annotations

import time
from math import inf

import torch

from ...tp.decoder import Decoder, forward_work
from ...tp.devices import synchronize
from ..caches.full import FullCache

_TRIAL = 512
"""Tokens that are read for the trial, a few times: the first time also warms up."""


@torch.inference_mode()
def reading_seconds(target: Decoder, start: int, tokens: int) -> float | None:
    """About how long `tokens` tokens after `start` others take; `None` where several ranks share the model, which
    would all have to try. A modelled figure: the trial's seconds for each multiplication."""
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
