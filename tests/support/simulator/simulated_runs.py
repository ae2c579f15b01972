"""Random histories of a streamed cache in a simulator of CUDA's ordering.

    python tests/support/simulator/simulated_runs.py --histories 10000

plays so many random histories and prints how many gave the tokens they should.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch
from cuda_simulator import Simulator
from simulated_gpu import as_on_a_gpu
from simulated_operations import simulator_off
from simulated_troubles import Breaking, Broken, fill, sometimes_packed
from staged_runs import SeenDisk, SeenFile, staged
from triforce.offload.batch import reading
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.limits import Limits
from triforce.offload.transfer.cuda_link import CudaLink
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.offload.transfer.host import Host
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.staged.block_file import aligned_size
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder
from triforce.tp.errors import CapacityError

sys.path.append(str(Path(__file__).parents[1]))  # where the next one is, if this is run as a script
from tiny import random_tokens, save_llama

T = TypeVar("T")

CPU = torch.device("cpu")
CHUNK, SLACK = 4, 24


@dataclass(frozen=True)
class Kind:
    """How large blocks and caches are, and in which format; tolerances of what is computed."""

    size: int
    capacity: int
    dtype: torch.dtype
    packed: bool
    tolerance: float


RAW = Kind(16, 260, torch.float32, False, 1e-4)
PACKED = Kind(64, 420, torch.bfloat16, True, 3e-2)


def make_decoders(directory: Path, dtype: torch.dtype = torch.float32) -> list[Decoder]:
    """Tiny ones: three with more layers than the ring has buffers, which is what lets buffers be used again too early,
    and one with a single layer, where what follows a pass is closest to it."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 2}
    made = []
    for num_layers in (4, 1):
        save_llama(directory / str(num_layers), num_hidden_layers=num_layers, num_key_value_heads=1, **shape)
        made.append(Decoder.load(directory / str(num_layers), dtype=dtype, device=CPU))
    return [made[0]] * 3 + [made[1]]


def play(
    decoders: list[Decoder],
    seed: int,
    *,
    deferred: bool = False,
    kinds: Sequence[str | None] = (None,) * 8,
    away: bool = False,
    simulator: Simulator | None = None,
) -> Simulator:
    """One random history of a streamed cache: prefills, verifications, rollbacks, refreshes with drafts, interrupts,
    saving and restoring, and moves to a larger cache, over a ring of 1 to 3 buffers. The kind `beside`, a prefill of
    another sequence beside it, comes only where it is asked for. Blocks of decoders in bfloat16 are packed.

    Args:
        deferred: run copies at random times instead of at once; memory freed too early is then not found.
        kinds: of its steps; `None` is a random one.
        away: whether blocks are on a disk, or in memory that is not page-locked, or both.
        simulator: which judges it, in place of a new one.

    Raises:
        Race: two accesses are not ordered.
        AssertionError: logits are not those of a cache that is all on the device.
    """
    chance = random.Random(seed)
    simulator = simulator or Simulator(seed if deferred else None)
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        # On a disk few, too, or blocks of a pass as short as these would hardly use one twice.
        limits = Limits(ring_buffers=chance.randint(1, 3), disk_buffers=6, open_slack=SLACK, step_rows=SLACK)
        host = Host(pack=sometimes_packed(random.Random(seed)))
        stack.enter_context(torch.inference_mode())
        decoder = decoders[seed % len(decoders)]
        kind = PACKED if decoder.dtype == PACKED.dtype else RAW
        history = _History(decoder, simulator, chance, kind, limits, host)
        if away:
            history.send_away(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        simulator.__enter__()
        try:
            for kind in kinds:
                history.step(kind)
            history.end()
        except BaseException as error:
            simulator.__exit__(type(error), error, None)
            raise
        simulator.__exit__(None, None, None)
    return simulator


class _History:
    def __init__(
        self, decoder: Decoder, simulator: Simulator, chance: random.Random, kind: Kind, limits: Limits, host: Host
    ) -> None:
        self.decoder, self.simulator, self.chance, self.kind = decoder, simulator, chance, kind
        self.limits, self.host = limits, host
        self.link = CudaLink(CPU, runtime=simulator.runtime())
        self.tokens = torch.tensor(random_tokens(kind.capacity, seed=chance.randint(0, 9)))
        self.capacity, self.resident = kind.capacity // 2, chance.choice([0, 0, 1, 3])
        self.together = random.Random(chance.random()).choice([1, 2, 4]) if kind.packed else 1
        self.cache: Any = None
        self.disk: SeenDisk | None = None
        self.num_disk = 0
        sizes = {"capacity": kind.capacity, "block_size": kind.size}
        blocks = DeviceBlocks(decoder.part, dtype=kind.dtype, device=CPU, **sizes)
        self.plain = FullCache(decoder.part, decoder.rope, blocks, chunk_size=CHUNK)
        self.retrieval: RetrievalCache | None = None
        self.attended = False
        """Whether the last tokens' attention is known, by which chunks are chosen."""

    def send_away(self, folder: Path) -> None:
        """Has blocks on a disk, or in memory that is not page-locked: of that there is enough for the staging of three
        caches, and perhaps for some layers."""
        config, kind = self.decoder.config, self.kind
        block = 2 * config.num_kv_heads * kind.size * config.head_dim * kind.dtype.itemsize
        staging = 3 * self.limits.staging_buffers * aligned_size(block)
        self.host = staged(self.simulator, self.chance, self.host)
        where = self.chance.choice(["disk", "ordinary", "both"])
        if where != "disk":
            self.simulator.most_locked = staging + self.chance.choice([0, 4, 20, 60]) * block
        if where != "ordinary":
            self.disk = SeenDisk(folder, self.host, self.simulator)
            self.num_disk = self.chance.choice([1, 2, 5, 99])

    def blocks_of(self, capacity: int, resident: int) -> StreamedBlocks:
        kind = self.kind
        place = Placement.streaming(
            capacity, kind.size, resident, CHUNK, packed=kind.packed, together=self.together, limits=self.limits
        )
        place = replace(place, num_disk=min(self.num_disk, place.num_host))
        given = {"dtype": kind.dtype, "device": CPU, "disk": self.disk, "host": self.host}
        blocks = StreamedBlocks(self.decoder.part, self.link, place, **given)
        assert isinstance(blocks._homes.file, SeenFile if place.num_disk else NoneType), "it would see no disk"
        return blocks

    def new_cache(self) -> FullCache:
        return self.full_cache(self.blocks_of(self.capacity, self.resident))

    def full_cache(self, blocks: StreamedBlocks, prefix: FullCache | None = None, start: int = 0) -> FullCache:
        shares = {"prefix": prefix, "start": start}
        step_rows = self.limits.step_rows
        return FullCache(self.decoder.part, self.decoder.rope, blocks, chunk_size=CHUNK, step_rows=step_rows, **shares)

    def step(self, kind: str | None = None) -> None:
        if self.cache is None:
            self.cache = self.new_cache()
        if not self.cache.length:
            self.forward(self.chance.randint(1, 90))
            return
        kind = kind or self.chance.choice(
            ["verify", "verify", "verify", "long", "rollback", "refresh", "refresh", "grow", "break", "save"]
        )
        if kind == "verify":
            self.forward(self.chance.randint(1, 9), draws=self.chance.random() < 0.5)
        elif kind == "long":  # a follow-up question: its run has a retrieval cache of its own
            self.retrieval = None
            self.forward(self.chance.randint(SLACK + 1, 60))
            if self.chance.random() < 0.5:
                self.refresh()
        elif kind == "rollback":
            self.rollback(max(1, self.cache.length - self.chance.choice([1, 3, 9, 30, 70])))
        elif kind == "refresh":
            self.refresh()
        elif kind == "grow" and self.capacity < self.kind.capacity:
            self.grow()
        elif kind == "break":
            self.break_off()
        elif kind == "save":
            self.save_and_restore()
        elif kind == "beside":
            self.beside()

    def forward(self, n: int, draws: bool = False) -> None:
        start = self.cache.length
        n = min(n, self.capacity - start)
        if n < 1:
            self.rollback(start // 2)
            return
        rows = self.tokens[start : start + n]
        got = self.decoder.forward(rows, self.cache, num_logits=min(n, 4))
        self.attended = True
        with self.outside():
            want = self.decoder.forward(rows, self.plain, num_logits=min(n, 4))
            self.compare(got, want)
        if self.retrieval:
            self.retrieval.update_tail()
            if draws:
                self.draft()

    def refresh(self) -> None:
        if self.retrieval is None:
            if not self.attended:
                self.forward(self.chance.randint(1, 4))
            if not self.attended or self.cache.length < CHUNK:
                return
            self.retrieval = RetrievalCache(self.cache, self.decoder.rope, budget=24, chunk_size=CHUNK)
        self.retrieval.refresh()
        self.draft()

    def draft(self) -> None:
        assert self.retrieval is not None
        length = self.retrieval.length
        logits = self.decoder.forward(self.tokens[:2], self.retrieval)
        with self.outside():
            assert logits.isfinite().all()
        self.retrieval.rollback(length)

    def rollback(self, length: int) -> None:
        self.retrieval, self.attended = None, False
        self.cache.rollback(length)
        self.plain.rollback(length)

    def grow(self) -> None:
        """What a follow-up question does that needs more room."""
        self.retrieval, self.attended = None, False
        before, self.capacity = self.capacity, self.kind.capacity
        larger = self.another(self.new_cache)
        if larger is None:
            self.capacity = before
            return
        self.cache, old = larger, self.cache
        try:
            larger.move_from(old, self.plain.length)
        except CapacityError:  # of blocks that do not pack, for which nothing more is locked: all is computed anew
            assert self.cache.blocks.placement.packed and not self.cache.blocks._staging
            larger.rollback(0)
            self.plain.rollback(0)

    def another(self, make: Callable[[], T]) -> T | None:
        """What `make` makes beside the cache; `None` where the system does not lock memory for it. All that it locks is
        then the cache's, which did not notice that there is a limit."""
        try:
            return make()
        except CapacityError:
            if self.cache.blocks._staging:
                raise
            return None

    def break_off(self) -> None:
        """An interrupt within a pass; then what the engine does with the cache: go on from before, or drop it."""
        length = self.cache.length
        n = min(self.chance.choice([3, 3, 40]), self.capacity - length)
        if n < 1:
            return
        prefills = n > SLACK
        self.retrieval, self.attended = None, False
        with suppress(Broken):
            self.decoder.forward(self.tokens[length : length + n], Breaking(self.cache, self.chance.randint(0, 12)))
        if prefills or self.chance.random() < 0.5:
            self.cache.blocks.drain()  # as `KeptCache` does before it drops one
            self.simulator.synchronize()
            self.cache = None
            self.plain.rollback(0)
        else:
            self.cache.rollback(length)

    def save_and_restore(self) -> None:
        """What saved contexts do: all keys and values leave the cache, and a new one, or the same, takes them."""
        self.retrieval, self.attended = None, False
        length, layers = self.cache.length, range(self.decoder.config.num_layers)
        self.cache.blocks.drain()
        saved = [torch.cat(self.cache.blocks.export(layer, 0, length)(), dim=2) for layer in layers]
        with self.outside():
            for layer, found in enumerate(saved):
                want = torch.cat(self.plain.blocks.export(layer, 0, length)(), dim=2)
                self.compare(found, want)
        if self.chance.random() < 0.5:
            self.simulator.synchronize()  # as `KeptCache` does before it drops one
            another = self.another(self.new_cache)
            self.cache = None  # its memory is given back first, where there is no other
            self.cache = another or self.new_cache()
        kept = self.chance.randint(1, length)
        self.cache.blocks.drain()  # as `ContextUse` does before it restores
        self.simulator.synchronize()
        for layer in layers:
            self.cache.blocks.restore(layer, kept, lambda pieces, of=saved[layer]: fill(pieces, of))
        self.cache.restored(kept)
        self.plain.rollback(kept)

    def beside(self) -> None:
        """Another sequence, which begins with some of the tokens, is read in slices; this one goes on between them."""
        start, n = self.chance.randint(0, self.cache.length // CHUNK) * CHUNK, self.chance.randint(SLACK + 1, 60)
        rows = torch.tensor(random_tokens(n, seed=self.chance.randint(10, 19)))
        kind = self.kind
        resident = self.chance.choice([0, 1])
        blocks = self.another(lambda: self.blocks_of(4 * kind.size, resident))
        if blocks is None:
            return
        other = self.full_cache(blocks, self.cache if start else None, start)
        slices = reading._pausing(partial(reading._next, self.decoder.slices(rows, other, num_logits=4)), other, n)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                got = end.value
                break
            if self.capacity - self.cache.length >= 9 and self.chance.random() < 0.4:
                self.forward(self.chance.randint(1, 9), draws=self.chance.random() < 0.5)
        with self.outside():
            sizes = {"capacity": kind.capacity, "block_size": kind.size}
            plain = DeviceBlocks(self.decoder.part, dtype=kind.dtype, device=CPU, **sizes)
            whole = FullCache(self.decoder.part, self.decoder.rope, plain, chunk_size=CHUNK)
            want = self.decoder.forward(torch.cat([self.tokens[:start], rows]), whole, num_logits=4)
            self.compare(got, want)
        blocks.drain()  # as is done before a sequence's memory is freed
        self.simulator.synchronize()

    def end(self) -> None:
        """Ends a run wherever it is: its memory is freed then."""
        self.link.traffic()
        self.link.close()
        self.retrieval = self.cache = None

    def compare(self, found: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(found, want, atol=self.kind.tolerance, rtol=self.kind.tolerance)

    @contextmanager
    def outside(self) -> Iterator[None]:
        with simulator_off(), torch.inference_mode():
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, checked = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as directory:
        decoders = [make_decoders(Path(directory) / str(kind.size), kind.dtype) for kind in (RAW, RAW, PACKED)]
        for seed in range(options.first, options.first + options.histories):
            kinds = (None, None, "beside") * 3 if seed % 10 > 7 else (None,) * 8
            of_seed = decoders[seed // 8 % len(decoders)]
            checked += play(of_seed, seed, deferred=bool(seed // 4 % 2), kinds=kinds, away=seed % 3 == 0).operations
            if seed % 500 == 499:
                print(
                    f"{seed + 1 - options.first} histories, {checked:,} accesses, {time.perf_counter() - began:.0f} s"
                )
    print(f"{options.histories} histories gave the logits they should; {checked:,} accesses, none of them a race")


if __name__ == "__main__":
    main()
