"""The saved contexts of one model: which of them a run starts from, and what it is to save."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ...kernels.packing import packs_fast
from ...tp.decoder import Decoder
from ...tp.devices import synchronize
from ...tp.model.config import ModelConfig
from ...tp.parallel.ranks import Ranks
from ...tp.parallel.split import Split
from ..caches.full import RECENT_ROWS
from .fingerprint import fingerprint
from .manifest import NO_FRAME, ContextError, Frame, Manifest, Origin, Segment
from .saver import HeldHeads, SaveOrder
from .segments.contents import PACKABLE, Shape, StatesShape
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
    origin: Origin = "operator"
    """Who wants it saved. What a client wants leaves a reserve of the disk free and removes no context of the
    operator's. A name that cannot be had is an error for the operator, and for a client only where it is required."""


@dataclass(frozen=True)
class ContextPlan:
    """What rank 0 has decided for all."""

    prefix: SavedPrefix | None = None
    save: SaveOrder | None = None
    warnings: tuple[str, ...] = ()
    """What cannot be saved, although the run is to go on."""


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
        kv = config.kv_layers, config.num_kv_heads, config.head_dim, dtype
        self.shape = Shape(*kv, _last_tokens(config), _states(config))
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
        saved, _ = self.saved(name, token_ids)
        if saved == len(token_ids):
            saved = min([saved, *(one.first for one, wrong in self.store.verify(name) if wrong)])
        if saved == len(token_ids):
            self.tidy(name, "operator")
        return len(token_ids) - saved

    def saved(self, name: str, token_ids: Sequence[int]) -> tuple[int, tuple[Segment, ...]]:
        """How many leading tokens of a text are saved under this name, and in which segments. Whether their keys and
        values are damaged is not looked at, which takes little time.

        Raises:
            ContextError: another text or another model's KV is, or the context's manifest is damaged.
        """
        prefix, saved = self.store.saved_of(name, self.fingerprint, self.shape, token_ids)
        return saved, prefix.segments if prefix else ()

    def tidy(self, name: str, origin: Origin) -> None:
        """Removes what a run that was killed has left of a context; what the operator wants is the operator's from then
        on. Nothing, where another process changes it or it cannot be written."""
        if self._ranks.rank == 0:
            with suppress(ContextError), self.store.locked(name):
                self.store.tidy(name, self.store.load(name).segments)
                if origin == "operator":
                    self.store.claim(name)

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
            error = (
                f"{self._config.name} scales RoPE dynamically: beyond {self._config.rope.original_positions:,} "
                "tokens keys depend on the prompt's length, so they can neither be saved nor shared"
            )
            if request.name or (request.save and _must_save(request)):
                raise ContextError(error)
            return ContextPlan(warnings=(_unsaved(error),) if request.save else ())
        prefix = None
        if request.name:
            prefix = self.store.prefix_of(request.name, self.fingerprint, self.shape, prompt)
        elif request.find:
            with suppress(ContextError, OSError):  # nobody has asked for one
                if self.store.any_of_shape(self.shape):
                    prefix = self.store.find(self.fingerprint, self.shape, prompt, LEAST_FOUND)
        save, warnings = None, ()
        if request.save:
            try:
                prefix, save = self._plan_saving(request.save, request, prompt[: request.save_tokens], prefix)
            except (ContextError, OSError) as error:
                if _must_save(request):
                    raise
                warnings = (_unsaved(str(error)),)
        if prefix:
            restorable = self._restorable(prefix, min(prefix.tokens, reusable), save)
            # Nothing may be restored of what is saved anew, which is known all the same.
            known = restorable or (save and save.directory == prefix.directory)
            prefix = replace(prefix, tokens=restorable) if known else None
        return ContextPlan(prefix, save, warnings)

    def _plan_saving(
        self, name: str, request: ContextRequest, token_ids: list[int], prefix: SavedPrefix | None
    ) -> tuple[SavedPrefix | None, SaveOrder | None]:
        """What the run starts from, in place of `prefix` perhaps, and what it saves, if anything is missing.

        Raises:
            ContextError, OSError: it cannot be saved under the name.
        """
        own, saved = self.store.saved_of(name, self.fingerprint, self.shape, token_ids)
        if saved == len(token_ids) and not request.required:
            if request.origin == "operator":
                self.tidy(name, "operator")
            return prefix, None
        save = self._order(name, request, token_ids)  # where all is there, it may be damaged
        if own or prefix or not (request.find or request.required):
            return own or prefix, save
        return self.store.find(self.fingerprint, self.shape, token_ids, 1), save

    def use(self, plan: ContextPlan, synchronize: Callable[[torch.device], None] = synchronize) -> ContextUse | None:
        """The contexts of a run, on any rank.

        Args: `synchronize` waits for a device.
        """
        if not plan.prefix and not plan.save and not plan.warnings:
            return None
        held = self._split_of(self._ranks.rank)
        writes = self._ranks.rank == 0 or self._split_of(self._ranks.rank - 1).kv_heads != held.kv_heads
        heads = HeldHeads(*_bounds(held.kv_heads), writes, _bounds(held.key_heads))
        use = ContextUse(self.store, self._ranks, heads, plan.prefix, plan.save, synchronize)
        use.warnings += plan.warnings
        return use

    def _restorable(self, prefix: SavedPrefix, tokens: int, save: SaveOrder | None) -> int:
        """How many of so many leading tokens a run can start from. Of layers that keep the last tokens only, those at
        the end of each segment are saved, and states are saved behind these ends alone."""
        if not self._config.kept_windows and not self._config.linear:
            return tokens
        ends = [0, *(segment.stop for segment in prefix.manifest.segments)]
        if save:
            size = save.manifest.segment_tokens
            if prefix.manifest.segment_tokens != size:
                return 0  # what is saved goes on from whole segments
            tokens = min(tokens, len(save.token_ids))  # what is saved ends there
            # What is written again is to hold what its windows see before its last few tokens, too.
            first = tokens // size * size
            tokens = max(first, min(tokens, min(first + size, len(save.token_ids)) - RECENT_ROWS))
        if self._config.linear:
            return max(end for end in ends if end <= tokens)
        reached = next((end for end in ends if end >= tokens), tokens)
        return tokens if reached - tokens <= RECENT_ROWS else max(end for end in ends if end <= tokens)

    def _order(self, name: str, request: ContextRequest, token_ids: list[int]) -> SaveOrder:
        named = self._name, self.fingerprint, self.shape, len(token_ids), time.time(), request.frame
        origin = "operator" if self.store.origin_of(name) == "operator" else request.origin
        manifest = Manifest(*named, self.store.segment_tokens, origin=origin)
        held = [self._split_of(rank) for rank in range(self._ranks.size)]
        parts = dict.fromkeys(_bounds(one.kv_heads) for one in held)
        states = tuple(_bounds(one.key_heads) for one in held) if self.shape.states else ()
        return SaveOrder(
            self.store.directory(name),
            manifest,
            token_ids,
            secrets.token_hex(4),
            tuple(parts),
            states,
            required=request.required,
            packed=self.packs,
            origin=request.origin,
        )

    def _split_of(self, rank: int) -> Split:
        return Split.of(self._config, Ranks(rank, self._ranks.size, self._ranks.size))

    def _rope_is_fixed(self, prompt_tokens: int) -> bool:
        rope = self._config.rope
        return rope.type != "dynamic" or prompt_tokens <= rope.original_positions


def _last_tokens(config: ModelConfig) -> tuple[int, ...]:
    """See `Shape`: of layers that keep the last tokens only what they see before the end of a segment, or before a few
    tokens less."""
    windows = config.kept_windows
    lasts = (windows[layer] + RECENT_ROWS if layer in windows else 0 for layer in range(config.kv_layers))
    return tuple(lasts) if windows else ()


def _bounds(heads: slice) -> tuple[int, int]:
    """The first, and the one behind the last."""
    return heads.start, heads.stop


def _states(config: ModelConfig) -> StatesShape | None:
    linear = config.linear
    return StatesShape(len(linear.layers), linear.key_heads, linear.key_head_numbers) if linear else None


def _must_save(request: ContextRequest) -> bool:
    """Whether a prompt that cannot be saved under its name is an error."""
    return request.required or request.origin == "operator"


def _unsaved(reason: str) -> str:
    return f"the prompt is not saved: {reason}"
