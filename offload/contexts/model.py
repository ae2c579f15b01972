"""The saved contexts of one model: decides which context a run starts from, and what the run saves."""

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
"""Minimum number of common first tokens for a context that is found without its name. The prefill of fewer tokens takes
less time than the search."""


@dataclass(frozen=True)
class ContextRequest:
    """What a run does with saved contexts: which one it starts from, and what it saves."""

    name: str | None = None
    """The name of the context to start from; `None`: no named context."""
    find: bool = False
    """Whether to search for a context that has its first tokens in common with the prompt, if `name` is `None`."""
    save: str | None = None
    """The name under which the prompt is saved; `None`: the prompt is not saved."""
    save_tokens: int | None = None
    """How many first tokens of the prompt are saved; `None`: all."""
    frame: Frame = NO_FRAME
    """The frame of the text that is saved."""
    required: bool = False
    """Whether the run fails if the prompt cannot be saved. If not, it goes on with a warning (but see `origin`)."""
    origin: Origin = "operator"
    """Who wants the prompt saved. Saving for a client leaves a reserve of the disk free
    (`ContextStore.reserve_bytes`), and removes no contexts of the operator. If the name cannot be used, for example
    because it belongs to another text, this is an error for the operator. For a client it is an error only if
    `required` is set."""


@dataclass(frozen=True)
class ContextPlan:
    """What a run restores and saves. Rank 0 decides this for all ranks."""

    prefix: SavedPrefix | None = None
    """The first tokens of the prompt to restore."""
    save: SaveOrder | None = None
    """What to save."""
    warnings: tuple[str, ...] = ()
    """What cannot be saved, and why. The run goes on without saving it."""


class ModelContexts:
    """The contexts in a store, for use by one model in one number format."""

    def __init__(self, store: ContextStore, directory: Path, name: str, target: Decoder, pack: str = "auto") -> None:
        """Args:
        directory: the directory of the model.
        name: the model's name in manifests.
        pack: see `Settings`.
        """
        self.store, self._directory, self._name = store, directory, name
        config = target.config
        dtype = str(target.dtype).removeprefix("torch.")
        kv = config.kv_layers, config.num_kv_heads, config.head_dim, dtype
        self.shape = Shape(*kv, _last_tokens(config), _states(config))
        self._config, self._dtype, self._ranks = config, target.dtype, target.ranks
        self.packs = pack == "on" or (pack == "auto" and dtype == PACKABLE and packs_fast(torch.device("cpu")))
        """Whether new segments are packed. Saved segments keep their format."""

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the model. The first access computes it, see the function `fingerprint`."""
        return fingerprint(self._directory, self._config, self._dtype, self.store.root, self.store.disk)

    def missing(self, name: str, token_ids: Sequence[int]) -> int:
        """How many last tokens of a text must still be saved under this name: those from the first one that is missing
        or in a damaged segment.

        Checksums are verified only if all tokens are saved. If all are saved and undamaged, the files that a killed
        run left are removed, and the context becomes the operator's.

        Raises:
            UsageError: no context can have this name.
            ContextError: the name belongs to another text or another model, or the context's manifest is damaged.
        """
        saved, _ = self.saved(name, token_ids)
        if saved == len(token_ids):
            saved = min([saved, *(one.first for one, wrong in self.store.verify(name) if wrong)])
        if saved == len(token_ids):
            self.tidy(name, "operator")
        return len(token_ids) - saved

    def saved(self, name: str, token_ids: Sequence[int]) -> tuple[int, tuple[Segment, ...]]:
        """How many first tokens of a text are saved under this name, and in which segments. This takes little time: the
        keys and values are not checked for damage.

        Raises:
            UsageError: no context can have this name.
            ContextError: the name belongs to another text or another model, or the context's manifest is damaged.
        """
        prefix, saved = self.store.saved_of(name, self.fingerprint, self.shape, token_ids)
        return saved, prefix.segments if prefix else ()

    def tidy(self, name: str, origin: Origin) -> None:
        """Removes files that a killed run left in a context. If `origin` is `operator`, the context becomes the
        operator's. Does nothing if another process is changing the context, or if it cannot be written."""
        if self._ranks.rank == 0:
            with suppress(ContextError), self.store.locked(name):
                self.store.tidy(name, self.store.load(name).segments)
                if origin == "operator":
                    self.store.claim(name)

    def saved_tokens(self, name: str) -> int:
        """Number of tokens that are saved under this name; 0 if there is no readable context."""
        try:
            return self.store.load(name).saved
        except ContextError:
            return 0

    def bytes_to_write(self, token_ids: Sequence[int], missing: int) -> int:
        """About how many bytes are written to save a text of which the last `missing` tokens are not saved yet."""
        manifest = Manifest("", "", self.shape, len(token_ids), 0.0, NO_FRAME, self.store.segment_tokens)
        return manifest.bytes_to_write(len(token_ids), len(token_ids) - missing, self.packs)

    def plan(self, prompt: Sequence[int], request: ContextRequest, reusable: int) -> ContextPlan:
        """Decides what a run restores and saves. Only rank 0 calls it.

        Args:
            prompt: token ids. Those of an `array.array` are hashed in less time than those of a list.
            reusable: the maximum number of the prompt's tokens that may be restored.

        Raises:
            UsageError: no context can have this name.
            ContextError: the named context cannot be used; or the prompt cannot be saved under the name, which is an
                error if `request.required` is set or `request.origin` is `operator`, else a warning.
            OSError: the prompt cannot be saved, in the same cases.
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
            with suppress(ContextError, OSError):  # no context was named, so a failed search is no error
                computed = "fingerprint" in vars(self)  # else it reads the weights, which must be needed
                if computed or self.store.any_of_shape(self.shape):
                    prefix = self.store.find(self.fingerprint, self.shape, prompt, LEAST_FOUND)
        save, warnings = None, ()
        if request.save:
            try:
                saved = prompt if request.save_tokens is None else prompt[: request.save_tokens]
                prefix, save = self._plan_saving(request.save, request, saved, prefix)
            except (ContextError, OSError) as error:
                if _must_save(request):
                    raise
                warnings = (_unsaved(str(error)),)
        if prefix:
            restorable = self._restorable(prefix, min(prefix.tokens, reusable), save)
            # A context that is to be saved again stays in the plan even if none of its tokens can be restored.
            known = restorable or (save and save.directory == prefix.directory)
            prefix = replace(prefix, tokens=restorable) if known else None
        return ContextPlan(prefix, save, warnings)

    def _plan_saving(
        self, name: str, request: ContextRequest, token_ids: Sequence[int], prefix: SavedPrefix | None
    ) -> tuple[SavedPrefix | None, SaveOrder | None]:
        """The context that the run starts from, which may replace `prefix`; and what the run saves, `None` if nothing
        is missing.

        Raises:
            ContextError, OSError: the prompt cannot be saved under the name.
        """
        own, saved = self.store.saved_of(name, self.fingerprint, self.shape, token_ids)
        if saved == len(token_ids) and not request.required:
            if request.origin == "operator":
                self.tidy(name, "operator")
            return prefix, None
        # Even if all tokens are saved, because segments may be damaged.
        save = self._order(name, request, token_ids)
        if own or prefix or not (request.find or request.required):
            return own or prefix, save
        return self.store.find(self.fingerprint, self.shape, token_ids, 1), save

    def use(self, plan: ContextPlan, synchronize: Callable[[torch.device], None] = synchronize) -> ContextUse | None:
        """The object with which a run restores and saves contexts; `None` if the plan is empty. All ranks call it.

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
        """How many of the first `tokens` tokens a run can restore.

        Layers that keep only the last tokens have these saved at the end of each segment. States, too, are saved only
        at the ends of segments.
        """
        if not self._config.kept_windows and not self._config.linear:
            return tokens
        ends = [0, *(segment.stop for segment in prefix.manifest.segments)]
        if save:
            size = save.manifest.segment_tokens
            if prefix.manifest.segment_tokens != size:
                return 0  # saving continues after whole segments, and these have another size
            tokens = min(tokens, len(save.token_ids))  # no later tokens are saved
            # A last segment that is written again must also hold the tokens that its windows cover before its last
            # few tokens.
            first = tokens // size * size
            tokens = max(first, min(tokens, min(first + size, len(save.token_ids)) - RECENT_ROWS))
        if self._config.linear:
            return max(end for end in ends if end <= tokens)
        reached = next((end for end in ends if end >= tokens), tokens)
        return tokens if reached - tokens <= RECENT_ROWS else max(end for end in ends if end <= tokens)

    def _order(self, name: str, request: ContextRequest, token_ids: Sequence[int]) -> SaveOrder:
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
    """See `Shape.last_tokens`. A layer that keeps only the last tokens has those in its window at the end of a segment,
    and `RECENT_ROWS` more, so that a run can also start a few tokens before the end."""
    windows = config.kept_windows
    lasts = (windows[layer] + RECENT_ROWS if layer in windows else 0 for layer in range(config.kv_layers))
    return tuple(lasts) if windows else ()


def _bounds(heads: slice) -> tuple[int, int]:
    """The first head, and the last plus 1."""
    return heads.start, heads.stop


def _states(config: ModelConfig) -> StatesShape | None:
    linear = config.linear
    return StatesShape(len(linear.layers), linear.key_heads, linear.key_head_numbers) if linear else None


def _must_save(request: ContextRequest) -> bool:
    """Whether a prompt that cannot be saved under its name is an error."""
    return request.required or request.origin == "operator"


def _unsaved(reason: str) -> str:
    return f"the prompt is not saved: {reason}"
