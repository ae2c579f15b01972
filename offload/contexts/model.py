"""The saved contexts of one model: which of them a run starts from, and what it is to save."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ...kernels.packing import packs_fast
from ...tp.devices import synchronize
from ...tp.model.decoder import Decoder
from ...tp.parallel.ranks import Ranks
from ...tp.parallel.split import Split
from .fingerprint import fingerprint
from .manifest import NO_FRAME, ContextError, Frame, Manifest
from .saver import HeldHeads, SaveOrder
from .segments.contents import PACKABLE, Shape
from .store import ContextStore, SavedPrefix
from .use import ContextUse

LEAST_FOUND = 64
"""Tokens that a context must share with a prompt to be found by itself: a few are read faster than looked up."""


@dataclass(frozen=True)
class ContextRequest:
    """What a run is to do with saved contexts."""

    name: str | None = None
    """The context to start from."""
    find: bool = False
    """Whether to look for one that the prompt begins with, where none is named."""
    save: str | None = None
    """The name under which to save the prompt."""
    save_tokens: int | None = None
    """How many leading tokens of it to save; `None` is all."""
    frame: Frame = NO_FRAME
    """Of what is saved."""
    required: bool = False
    """Whether the run is to fail where it cannot be saved, and not just to say so."""


@dataclass(frozen=True)
class ContextPlan:
    """What rank 0 has decided for all."""

    prefix: SavedPrefix | None = None
    save: SaveOrder | None = None


class ModelContexts:
    """The contexts in a store, as one model in one number format may use them."""

    def __init__(self, store: ContextStore, directory: Path, name: str, target: Decoder, pack: str = "auto") -> None:
        """Args:
        directory: of the model.
        name: what manifests call it.
        pack: see `Settings`.
        """
        self.store, self._directory, self._name = store, directory, name
        config = target.config
        dtype = str(target.dtype).removeprefix("torch.")
        self.shape = Shape(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        self._config, self._dtype, self._ranks = config, target.dtype, target.ranks
        self.packs = pack == "on" or (pack == "auto" and dtype == PACKABLE and packs_fast(torch.device("cpu")))
        """Whether what is saved is packed. What is saved already stays as it is."""

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._directory, self._config, self._dtype, self.store.root, self.store.disk)

    def missing(self, name: str, token_ids: Sequence[int]) -> int:
        """How many of the tokens are not saved under this name yet, or damaged. Where all are there, every checksum is
        looked at, and what a run that was killed has left is removed.

        Raises:
            ContextError: another text or another model's KV is, or the context's manifest is damaged.
        """
        saved = self.store.saved_of(name, self.fingerprint, token_ids)[1]
        if saved == len(token_ids):
            saved = min([saved, *(one.first for one, wrong in self.store.verify(name) if wrong)])
        if saved == len(token_ids) and self._ranks.rank == 0:
            with suppress(ContextError), self.store.locked(name):
                self.store.tidy(name, self.store.load(name).segments)
        return len(token_ids) - saved

    def saved_tokens(self, name: str) -> int:
        """Tokens that are saved under this name; 0 where nothing is."""
        try:
            return self.store.load(name).saved
        except ContextError:
            return 0

    def bytes_to_write(self, token_ids: Sequence[int], missing: int) -> int:
        """What saving a text writes, of which so many last tokens are missing."""
        manifest = Manifest("", "", self.shape, len(token_ids), 0.0, NO_FRAME, self.store.segment_tokens)
        return manifest.bytes_to_write(len(token_ids), len(token_ids) - missing, self.packs)

    def plan(self, prompt: list[int], request: ContextRequest, reusable: int) -> ContextPlan:
        """What a run does, on rank 0.

        Args: `reusable` tokens of the prompt at most may be restored.

        Raises:
            UsageError: an impossible name.
            ContextError: the named context cannot be used, or not be saved to.
        """
        wanted = request.name or request.save
        if wanted:
            self.store.directory(wanted)
        if not self._rope_is_fixed(len(prompt)):
            if wanted:
                raise ContextError(
                    f"{self._config.name} scales RoPE dynamically: beyond {self._config.rope.original_positions:,} "
                    "tokens keys depend on the prompt's length, so they can neither be saved nor shared"
                )
            return ContextPlan()
        prefix = None
        if request.name:
            prefix = self.store.prefix_of(request.name, self.fingerprint, prompt)
        elif request.find:
            with suppress(ContextError, OSError):  # nobody has asked for one
                if self.store.any_of_shape(self.shape):
                    prefix = self.store.find(self.fingerprint, prompt, LEAST_FOUND)
        save = None
        if request.save:
            token_ids = prompt[: request.save_tokens]
            own, saved = self.store.saved_of(request.save, self.fingerprint, token_ids)
            if saved < len(token_ids) or request.required:  # what is there may be damaged
                save = self._order(request, token_ids)
                shares = request.find or request.required
                prefix = own or prefix or (self.store.find(self.fingerprint, token_ids, 1) if shares else None)
        if prefix and prefix.tokens > reusable:
            prefix = SavedPrefix(prefix.directory, prefix.manifest, reusable) if reusable else None
        return ContextPlan(prefix, save)

    def use(self, plan: ContextPlan, synchronize: Callable[[torch.device], None] = synchronize) -> ContextUse | None:
        """The contexts of a run, on any rank.

        Args: `synchronize` waits for a device.
        """
        if not plan.prefix and not plan.save:
            return None
        held = self._heads_of(self._ranks.rank)
        writes = self._ranks.rank == 0 or self._heads_of(self._ranks.rank - 1) != held
        heads = HeldHeads(held.start, held.stop, writes)
        return ContextUse(self.store, self._ranks, heads, plan.prefix, plan.save, synchronize)

    def _order(self, request: ContextRequest, token_ids: list[int]) -> SaveOrder:
        assert request.save
        named = self._name, self.fingerprint, self.shape, len(token_ids), time.time(), request.frame
        manifest = Manifest(*named, self.store.segment_tokens)
        parts = dict.fromkeys((held.start, held.stop) for held in map(self._heads_of, range(self._ranks.size)))
        where = self.store.directory(request.save)
        return SaveOrder(where, manifest, token_ids, secrets.token_hex(4), tuple(parts), request.required, self.packs)

    def _heads_of(self, rank: int) -> slice:
        return Split.of(self._config, Ranks(rank, self._ranks.size, self._ranks.size)).kv_heads

    def _rope_is_fixed(self, prompt_tokens: int) -> bool:
        rope = self._config.rope
        return rope.type != "dynamic" or prompt_tokens <= rope.original_positions
