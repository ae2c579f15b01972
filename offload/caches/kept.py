"""The full cache that an engine keeps between runs, so that a follow-up question finds its book there already."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ...kernels.packages import usable_packages
from ...tp.devices import synchronize
from ...tp.errors import CapacityError
from ...tp.model.decoder import Decoder
from ..planning.memory import MemoryPlan, available_bytes, check_memory, plan_memory, shortage_explained
from ..planning.placement import Placement, make_blocks, plan_placement, resident_bytes
from ..settings import Settings
from ..transfer.link import Link, LinkError, ThreadLink
from .full import FullCache


class KeptCache:
    """At most one full cache and the tokens whose keys and values are in it."""

    def __init__(self, decoder: Decoder, settings: Settings) -> None:
        self._decoder, self._settings = decoder, settings
        self._cache: FullCache | None = None
        self._link: Link | None = None
        self.context: list[int] = []
        """The tokens of the last run, prompt and answer; as many of them as the cache holds are in it."""

    def prepare(self, prompt: list[int], capacity: int, reuse: int | None = None) -> FullCache:
        """A full cache with room for `capacity` tokens that holds what it shares with `prompt` already, of that at most
        `reuse` tokens; if that is 0, the memory of the old one is given back first.

        Raises:
            CapacityError: there is not so much memory.
        """
        if reuse == 0:
            self._drop()
        old, shared = self._cache, self._shared_tokens(prompt)
        shared = shared if reuse is None else min(shared, reuse)
        fresh = self._placement(capacity, old.blocks.device_bytes if old else 0)
        if old and old.capacity >= capacity and (shared or old.blocks.block_size == fresh.block_size):
            old.rollback(shared)
            return old
        if old and not self._can_move(old, capacity, shared):
            self._drop()
            old = None
        self._check(capacity)
        placement = self._placement(capacity)
        decoder, chunk_size = self._decoder, self._settings.planned_chunk_size
        with shortage_explained(decoder.device):
            blocks = make_blocks(
                decoder.part,
                placement,
                self._link_for(placement),
                dtype=decoder.dtype,
                device=decoder.device,
                capacity=capacity,
                chunk_size=chunk_size,
            )
        self._cache = FullCache(decoder.part, decoder.rope, blocks, chunk_size=chunk_size)
        if old:
            self._cache.move_from(old, shared)
        return self._cache

    def distrust(self) -> None:
        """Takes into account that a pass was broken off: the newest tokens of a streamed cache may be half done."""
        if self._cache and not self._cache.blocks.all_on_device:
            self.context = []

    def _can_move(self, old: FullCache, capacity: int, shared: int) -> bool:
        """Whether `shared` tokens of `old` can move to a larger cache while both are there, on every rank: the same
        tokens must be left to read everywhere."""
        if not shared:
            return False
        fits = self._placement(capacity).streams != old.blocks.all_on_device
        try:
            self._check(capacity)
        except CapacityError:
            fits = False
        cannot = torch.tensor([0.0 if fits else 1.0])
        return self._decoder.ranks.sum(cannot, "all_reduce_move").item() == 0

    def _check(self, capacity: int) -> None:
        """Raises:
        CapacityError: there is not so much memory.
        """
        decoder, resident = self._decoder, self._settings.resident
        check_memory(self._plan(capacity), capacity, decoder.device, decoder.ranks, resident=resident)

    def _drop(self) -> None:
        """Gives the cache's memory back."""
        if self._cache:
            if self._link:
                with suppress(LinkError):  # of what is not wanted any more
                    self._link.wait_for_stores()
            synchronize(self._decoder.device)  # a pass that was broken off may have copies under way
        self._cache, self.context = None, []

    def _shared_tokens(self, prompt: list[int]) -> int:
        """Leading tokens of `prompt` that the cache holds, without the last: its logits give the first new token."""
        known = self.context[: self._cache.length] if self._cache else []
        pairs = zip(known, prompt[:-1], strict=False)
        return next((i for i, (have, want) in enumerate(pairs) if have != want), min(len(known), len(prompt) - 1))

    def _placement(self, capacity: int, given_back: int = 0) -> Placement:
        """Args: `given_back` is what will be free on the device besides what is."""
        decoder, settings = self._decoder, self._settings

        def place(resident: float | None) -> Placement:
            return plan_placement(
                decoder.part,
                dtype=decoder.dtype,
                capacity=capacity,
                chunk_size=settings.planned_chunk_size,
                resident_bytes=resident,
                on_gpu="triton" in usable_packages(decoder.device),
            )

        if settings.resident is not None:
            return place(settings.resident * 2**30)
        if decoder.device.type == "cpu":
            return place(None)
        free = available_bytes(decoder.device) + given_back
        total = torch.cuda.mem_get_info(decoder.device)[1]
        part = decoder.part
        token_bytes = part.kv_bytes_per_token(decoder.dtype)
        return place(resident_bytes(free, total, self._plan(capacity), place(0.0), token_bytes, part.num_layers))

    def _plan(self, capacity: int) -> MemoryPlan:
        """What a run over `capacity` tokens takes beside the weights, which are loaded."""
        settings = self._settings
        plan = plan_memory(
            self._decoder.config,
            None,
            dtype=self._decoder.dtype,
            context=capacity,
            budget=settings.budget_for(capacity),
            chunk_size=settings.planned_chunk_size,
            ranks=self._decoder.ranks,
        )
        return replace(plan, weights=0, runtime=0)

    def _link_for(self, placement: Placement) -> Link | None:
        if placement.streams and self._link is None:
            if self._decoder.device.type == "cuda":
                from ..transfer.cuda_link import CudaLink

                self._link = CudaLink(self._decoder.device)
            else:
                speed = self._settings.link_gbps
                self._link = ThreadLink(speed * 1e9 if speed else None)
        return self._link
