"""What befalls the caches of simulated histories: passes that are broken off, blocks that do not pack."""

from __future__ import annotations

import random
from typing import Any

import torch
from triforce.kernels import packing
from triforce.offload.caches.full import FullCache


class Broken(Exception):
    """Stands for an interrupt."""


class Breaking:
    """A full cache whose pass is broken off after so many blocks."""

    def __init__(self, full: FullCache, blocks: int) -> None:
        self._full, self._left = full, blocks
        full.hand_blocks_to(self._collector)
        self.prepare, self.rollback, self.advance_states = full.prepare, full.rollback, full.advance_states
        self.keep_hidden, self.hidden_before = full.keep_hidden, full.hidden_before

    @property
    def length(self) -> int:
        return self._full.length

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._full.attend(layer, q, k, v)

    def _collector(self) -> Any:
        return self._count

    def _count(self, *_: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise Broken


def sometimes_packed(chance: random.Random) -> Any:
    """`pack`, after which some blocks are said not to be in their slots."""

    def pack(blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots, fits = packing.pack(blocks, slots)
        return slots, fits if chance.random() < 0.7 else fits & False

    return pack


def fill(pieces: list[torch.Tensor], tokens: torch.Tensor) -> None:
    """Writes `tokens` `[2, num_kv_heads, n, head_dim]` to pieces that lie one after another."""
    at = 0
    for piece in pieces:
        piece.copy_(tokens[:, :, at : at + piece.shape[2]])
        at += piece.shape[2]
