"""Random histories of whole runs on a simulated GPU whose memory is counted: between rounds what lives there is what
its owners say they hold (`Engine.held`), by part no more than is planned (`planned`), and in a round no more is taken.

    python tests/support/simulator/ledger.py --histories 2000

plays so many, every tenth on two ranks. In `--dtype float32` alone, what passes take is compared in each of them.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import isgenerator
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from cuda_simulator import Memory, Simulator
from planned import Planned
from simulated_gpu import as_on_a_gpu, simulated_system
from staged_runs import staged
from torch import Tensor
from triforce.offload import ContextRequest, ContextStore, Engine, Request, Sampling
from triforce.offload.held import bytes_by_part
from triforce.offload.limits import Limits, ProcessMemory
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import FRAGMENTED, RunPlan, make_plan
from triforce.offload.settings import Settings
from triforce.offload.transfer.host import HOST
from triforce.tp import CapacityError
from triforce.tp.decoder import Tiling
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.registry import MTP

sys.path.append(str(Path(__file__).parents[1]))  # where the next one is, if this is run as a script
from mtp import Head
from recorder import Recorder
from spmd import run_forks
from tiny import random_tokens, save_family, save_llama

LIMITS = Limits(largest_block=1024, window_slack=16, tiling=Tiling(64, 16, 256))
"""So small that tokens of a few hundred are several blocks, several parts of a prefill, and shared."""

FEW_BUFFERS = replace(
    LIMITS, ring_buffers=1, staging_buffers=3, disk_buffers=3, open_slack=160, process=ProcessMemory(0, 0, 0)
)
"""Where host memory is limited: more buffers would take more of it than a disk gives back of a few hundred tokens."""


class Uncounted(AssertionError):
    """Memory lives on the device that nobody says he holds, or that was not planned."""


@dataclass
class Ledger:
    """The memory of an engine's device, compared with what its owners say."""

    engine: Engine
    simulator: Simulator
    checks: int = 0
    fullest: float = 0.0
    """Of what is planned beside what lasts, the largest share that was taken."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes of each part, the most there were at a check."""
    met: set[str] = field(default_factory=set)
    """What there was at some check."""

    def __post_init__(self) -> None:
        self.planned = Planned(self.engine)
        self.simulator.peak = self.simulator.live  # what loading took on the way, a run has for its cache

    def check(self, where: str) -> None:
        """Between rounds.

        Raises:
            Uncounted: what lives on the device is not what is held, or not what is planned.
        """
        held = [*self.engine.held(), *self._of_a_prefill()]
        if isinstance(self.engine._capture, Recorder):
            held += self.engine._capture.held({tensor.untyped_storage()._cdata for _, tensor in held})
        known = {tensor.untyped_storage()._cdata for _, tensor in held}
        lost = self._beside(known)
        until = time.monotonic() + (10 if self.engine.target.ranks.size > 1 else 0)
        while lost and time.monotonic() < until:
            time.sleep(1e-3)  # Gloo's threads let go of what ranks have sent one another a moment later
            lost = self._beside(known)
        if lost:
            uses = (memory.accesses[-1].what if memory.accesses else "nothing" for memory in lost)
            found = ", ".join(
                f"{memory.size} bytes, last used by {use}" for memory, use in zip(lost, uses, strict=True)
            )
            raise Uncounted(f"{where}: nobody holds {found}")
        self._check_plan(where, held)
        on_disk = sum(cache.blocks.footprint.disk for cache in self.engine._kept.caches)
        sizes = bytes_by_part(held) | {"disk_kv": on_disk}
        for part, size in sizes.items():
            self.peaks[part] = max(size, self.peaks.get(part, 0))
        self.met.update(self._there())
        self.checks += 1

    def _there(self) -> Iterator[str]:
        """What there is between two rounds that not every history has."""
        engine, settings = self.engine, self.engine.settings
        live = engine._running.live if engine._running else []
        opened = [one for one in live if one.active_or_none]
        yield f"{str(engine.target.dtype).removeprefix('torch.')}"
        yield f"{settings.tiers} tiers"
        yield f"refresh {settings.refresh}"
        yield f"block length {settings.block_length}"
        there = {
            "sequences together": len(opened) > 1,
            "a prompt read beside others": {"reading", "running"} <= {one.state for one in opened},
            "a prompt read before the rest of another": bool(engine._running and engine._running._set_aside),
            "a shared prefix": any(one.active.full.prefix for one in opened),
            "a restored context": any(one.order.contexts.prefix for one in opened),
            "blocks that stream": any(not one.active.full.all_on_device for one in opened),
            "blocks on a disk": any(one.active.full.blocks.footprint.disk for one in opened),
            "packed blocks": any(one.active.full.blocks.placement.packed for one in opened),
            "blocks that have left the GPU": engine._kept.moved > 0,
            "looked-up drafts": settings.lookup,
            "captured passes": isinstance(engine._capture, Recorder) and engine._capture.replays > 0,
            "an answer of a thousand tokens": any(len(one.statistics.token_ids) >= 1000 for one in opened),
        }
        yield from (name for name, is_there in there.items() if is_there)

    def _check_plan(self, where: str, held: list[tuple[str, Tensor]]) -> None:
        """Raises:
        Uncounted: more is held or was taken than is planned.
        """
        sizes, live, peak = bytes_by_part(held), self.simulator.live, self.simulator.peak
        before = self.planned.live
        if sum(sizes.values()) != live:
            raise Uncounted(f"{where}: {sum(sizes.values())} bytes are held and {live} live")
        if fault := next(self.planned.faults(), None):
            raise Uncounted(f"{where}: {fault}")
        most, lasting = self.planned.most(sizes.get("captured", 0), live)
        self.simulator.peak = live
        if self.engine.target.dtype != torch.float32:  # in PyTorch's operations 16 bits take more than on a GPU
            return
        if peak > self.planned.and_slack(most):
            raise Uncounted(f"{where}: {peak} bytes were taken where {most} are planned, {lasting} of them last")
        if isinstance(self.engine._capture, Measuring):
            captured, left = self.planned.captured(self.engine._capture.taken)
            if captured > left:
                raise Uncounted(f"{where}: captured passes have {captured} bytes where {left} are left free for them")
        if most > lasting and peak > before:
            self.fullest = max(self.fullest, (peak - lasting) / (most - lasting))

    def _beside(self, known: set[int]) -> list[Memory]:
        """What lives on the device besides the storages that are known."""
        return [memory for key, memory in self.simulator.device_memories() if key not in known and memory.size]

    def _of_a_prefill(self) -> Iterator[tuple[str, Tensor]]:
        """What a prompt that is read in slices has between two of them: local variables of its generators."""
        running = self.engine._running
        readings = [one for one in (running._reading, running._set_aside) if one] if running else []
        generators: list[Any] = [one._slices for one in readings]
        while generators:
            generator = generators.pop()
            values = [*generator.gi_frame.f_locals.values()] if generator.gi_frame else []
            yield from (("prefill", one) for value in values for one in _tensors(value))
            generators += [one for one in (*values, generator.gi_yieldfrom) if isgenerator(one)]


class Measuring(Recorder):
    """Notes what passes take while they run, which as captured ones they take from their pool. There a GPU uses memory
    again that a tape keeps for good: of that only a pass's result is held against the simulator's limit. The rest, and
    what replaying takes, is `Ledger`'s to compare, by what was noted."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator
        self.taken: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Bytes that a pass that is to be captured took at most, beside its result and what lasts."""

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        simulator = self._simulator
        peak, simulator.peak = simulator.peak, simulator.live
        result = super().warm_up(run)
        self.taken[getattr(run, "__self__")] = simulator.peak - simulator.live  # noqa: B009 (of a method)
        simulator.peak = max(peak, simulator.peak)
        return result

    def capture(self, run: Callable[[Callable], Tensor], pool: None) -> tuple[list[Callable[[], None]], Tensor]:
        with self._simulator.in_pool():
            replays, result = super().capture(run, pool)
        self._simulator.out_of_pool(result)
        return [partial(self._replay, replay) for replay in replays], result

    def _replay(self, replay: Callable[[], None]) -> None:
        with self._simulator.in_pool():
            replay()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "workspace"):
        yield from _tensors(value.workspace)


def save_models(root: Path, **sizes: int) -> Path:
    """Tiny targets, of which one has layers with sliding windows beside others and one linear attention and a
    multi-token-prediction head, and a tiny draft."""
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32, **sizes)
    save_llama(root / "target", seed=1, num_key_value_heads=2, max_position_embeddings=4096, **sizes)
    save_family(root / "windows", "gemma3", seed=1, **sizes)
    Head(save_family(root / "states", "qwen3.5", seed=1, **sizes), seed=2).save(root / "states")
    return root


def play(models: Path, seed: int, steps: int = 4, *, dtype: str | None = None) -> Ledger:
    """Answers, conversations, batches that sequences join and leave, texts that are saved and restored, and runs that
    are broken off, with settings of all kinds; checks after each round. With every fourth seed, host memory is so
    limited that keys and values are on a disk, and some runs are refused; with every third, passes are captured; with
    every fifth, the target has layers with sliding windows, and with the ones after those linear attention. `dtype` is
    the models', chosen by the seed where it is `None`.

    Raises:
        Uncounted: see `Ledger.check`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _play(models, seed, steps, Path(folder), dtype=dtype)


def play_on_ranks(models: Path, seed: int, steps: int = 4, ranks: int = 2, *, dtype: str | None = None) -> list[int]:
    """A history on several ranks, each with a simulated GPU of its own; how many checks each has made. Nothing is
    captured: what stands for CUDA's graphs does not repeat what ranks send one another.

    Raises:
        AssertionError: a rank's memory is not what is held there, or the rank failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = lambda: print(_play(models, seed, steps, Path(folder), ranks, dtype).checks, flush=True)  # noqa: E731
        return [int(line) for line in run_forks(call, ranks, 1800).split()]


def _play(models: Path, seed: int, steps: int, folder: Path, ranks: int = 1, dtype: str | None = None) -> Ledger:
    """Args: `folder` is for saved contexts, and for blocks on a disk."""
    chance, target = random.Random(seed), models / {4: "windows", 0: "states"}.get(seed % 5, "target")
    settings: dict[str, Any] = {
        "dtype": chance.choice(["float32", "bfloat16", "float16"]),
        "tiers": chance.choice([1, 2, 3, 3]),
        "resident": chance.choice([None, 0, 0, 1e-4]),
        "budget": chance.choice([16, 64, 128, 2048]),
        "refresh": chance.choice(["auto", "round", "never", 3]),
        "block_length": chance.choice([None, 1, 6, 24, 60, 128]),
        "draft_length": chance.choice([None, 1, 4]),
        "exact": chance.choice(["auto", "on"]),
        "draft": chance.choice([models / "draft", f"{models / 'draft'},lookup"]),
    }
    settings["dtype"] = dtype or settings["dtype"]
    if target.name == "states":
        settings["draft"] = chance.choice([settings["draft"], MTP, f"{MTP},lookup"])
    if settings["dtype"] == "bfloat16" and settings["resident"] is not None:
        settings["pack"] = chance.choice(["on", "off"])
    simulator, limits, host, length, device_bytes = Simulator(), LIMITS, HOST, chance.randint(40, 300), None
    captures = seed % 3 == 0 and ranks == 1
    if seed % 4 == 1:
        limits, host, length = FEW_BUFFERS, staged(simulator, random.Random(seed), HOST), chance.randint(500, 900)
        settings |= {"resident": 0, "block_length": chance.choice([1, 6, 24])}
        settings["host_memory"] = chance.uniform(1.0, 1.2) * least_memory(target, settings, length + 100, ranks) / 2**30
    if seed % 4 == 3:
        settings |= {"resident": None, "dtype": "float32"}  # in PyTorch's operations 16 bits take more than on a GPU
        settings.pop("pack", None)
        limits = replace(LIMITS, free_varies=0.0)  # of a GPU that is mostly reserve
        device_bytes, simulator.limit = device_memory(target, settings, length + 100, chance, ranks, captures=captures)
    system = simulated_system(simulator, limits, host, device_bytes)
    with without_collection(), as_on_a_gpu(), simulator:
        given = {"device": "cpu", "gpus": ranks, "system": system, "store": ContextStore(folder)} | settings
        engine = Engine.load(target, **given)
        if captures:
            engine._capture = Measuring(simulator)
        ledger = Ledger(engine, simulator)
        history = _History(engine, ledger, chance, length)
        try:
            for _ in range(steps):
                history.step()
        finally:
            engine.close()
    if simulator.refused:
        raise Uncounted(f"more than planned: {simulator.refused[0]}")
    return ledger


@contextmanager
def without_collection() -> Iterator[None]:
    """Within, what refers to itself is not freed: nothing on the device may last until Python looks for such things."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def least_memory(target: Path, settings: dict[str, Any], length: int, ranks: int = 1) -> int:
    """Bytes of host memory that a run over so many tokens takes at least, all of its cache on a disk."""
    request = replace(request_of(target, settings, length, ranks), limits=FEW_BUFFERS)
    return ranks * make_plan(replace(request, host_bytes=0, disk_bytes=2**40)).host_total


def device_memory(
    target: Path, settings: dict[str, Any], length: int, chance: random.Random, ranks: int, *, captures: bool
) -> tuple[int, int]:
    """The memory of a GPU in bytes that holds none, some or all of the keys and values of so many tokens, and the
    memory beyond which it refuses: what is left of it without the plan's reserve, and one in a hundred more. Where
    passes are captured, the part of the reserve that is for them, too: what they are given and bring is held against
    the limit."""
    request = request_of(target, settings, length, ranks)
    plan = make_plan(replace(request, gpu_bytes=2**40, kernels=False))
    least = make_plan(replace(plan.request, context=1))  # what is checked before weights are loaded
    needed = plan.weights + plan.working + int(chance.uniform(0.0, 1.1) * plan.kv)
    needed = max(needed, least.weights + least.working + least.resident_kv)
    return with_reserve(plan, needed), int(1.01 * needed) + (plan.reserve_parts["graphs"] if captures else 0)


def with_reserve(plan: RunPlan, needed: int) -> int:
    """The memory in bytes of a GPU that has so much left without the plan's reserve."""
    fixed = sum(size for part, size in plan.reserve_parts.items() if part != "fragmentation")
    return int((needed + fixed) / (1 - FRAGMENTED)) + 1


def request_of(target: Path, settings: dict[str, Any], length: int, ranks: int) -> RunRequest:
    """A run over so many tokens. The draft is beside the target."""
    whole, small = (ModelConfig.load(one) for one in (target, target.parent / "draft"))
    configs = [whole, whole.mtp_head if str(settings["draft"]).startswith(MTP) else small]
    names = {field.name for field in fields(Settings)}
    planned = Settings(**{name: value for name, value in settings.items() if name in names})
    planned = replace(planned, lookup=str(settings["draft"]).endswith(",lookup"))
    dtype = getattr(torch, settings["dtype"])
    return RunRequest(configs[0], configs[1], dtype, length, planned, ranks, limits=LIMITS)


REQUEST = 8192
"""Bytes of a request's token ids, and of what ranks tell one another of it: the host's, which the simulator cannot tell
from the device's before both meet."""


class _History:
    def __init__(self, engine: Engine, ledger: Ledger, chance: random.Random, length: int) -> None:
        """Args: `length` is that of the text it begins with, in tokens."""
        self.engine, self.ledger, self.chance, self.length = engine, ledger, chance, length
        self.context = random_tokens(length, seed=chance.randint(0, 9))
        self.saved = 0

    def step(self) -> None:
        kind = self.chance.choice(["answer", "answer", "long", "talk", "break", "batch", "run", "save", "logits"])
        try:
            self.do(kind)
        except CapacityError:
            if self.engine.settings.host_memory is None and self.ledger.simulator.limit == math.inf:
                raise
            self.ledger.planned.live += REQUEST  # nothing else was taken, and nothing is planned
        self.ledger.check(f"after {kind}")

    def do(self, kind: str) -> None:
        if kind == "answer":
            self.answer(self.chance.randint(1, 20))
        elif kind == "long":
            settings, most = self.engine.settings, self.engine.settings.block_length or 24
            accepts_all = settings.block_length in (24, 60, 128) and settings.tiers == 2 and settings.budget == 2048
            self.answer(1100 if accepts_all and self.chance.random() < 0.2 else max(20, min(60, 1200 // most)))
        elif kind == "talk":
            for _ in range(50 if self.chance.random() < 0.1 else 4):
                self.ask(self.context + self.new(6), self.chance.randint(1, 6))
        elif kind == "break":
            run = self.engine.stream(self.context, self.sampling(), 30, ignore_eos=True)
            self.ledger.check("before an answer")
            for _ in islice(run, self.chance.randint(0, 3)):
                self.ledger.check("in an answer")
            run.close()
        elif kind == "batch":
            self.batch()
        elif kind == "run":
            self.run()
        elif kind == "save":
            self.saved += 1
            for _ in self.engine.reading(self.context, f"text-{self.saved}"):
                self.ledger.check("in a reading")
        else:
            answer = self.new(5)
            self.engine.logits(self.context, answer)
            self.ledger.planned.note_reading(len(self.context) + len(answer))

    def sampling(self) -> Sampling:
        return self.chance.choice([Sampling(0.0), Sampling(0.8, top_p=0.9), Sampling(1.0, seed=4, min_p=0.1)])

    def new(self, most: int) -> list[int]:
        return random_tokens(self.chance.randint(1, most), seed=self.chance.randint(10, 99))

    def answer(self, new_tokens: int) -> None:
        if self.chance.random() < 0.3:
            self.context = self.new(self.length)  # another text
        self.ask(self.context + self.new(40), new_tokens, self.chance.choice([None, None, 0]))

    def ask(self, prompt: list[int], new_tokens: int, reuse: int | None = None) -> None:
        run = self.engine.stream(prompt, self.sampling(), new_tokens, ignore_eos=True, reuse=reuse)
        for _ in run:
            self.ledger.check("in an answer")
        self.context = prompt + run.statistics.token_ids

    def batch(self) -> None:
        requests = [self.request() for _ in range(self.chance.randint(1, 4))]
        batch = self.engine.batch(requests, in_slices=self.chance.random() < 0.5, expected=self.chance.randint(1, 4))
        added, ends = self.chance.randint(0, 3), self.chance.choice([10, 1000])
        for count, (index, _) in enumerate(batch):
            self.ledger.check("in a batch")
            if added and self.chance.random() < 0.2:
                batch.add(self.request())
                added -= 1
            if self.chance.random() < 0.02:
                batch.end(index)
            if count == ends:
                batch.close()

    def run(self) -> None:
        """Requests that come and go; when they do, rank 0 alone decides."""
        requests = [self.request() for _ in range(self.chance.randint(1, 6))]
        chance, most = random.Random(self.chance.random()), self.chance.randint(1, 4)

        def source(waits: bool) -> Request | None:
            return requests.pop() if requests and (waits or chance.random() < 0.3) else None

        run = self.engine.run(source, max_sequences=most, in_slices=self.chance.random() < 0.5)
        for event in run:
            self.ledger.check("in a run")
            if chance.random() < 0.03:
                run.end(event.sequence)

    def request(self) -> Request:
        shared = self.context[: self.chance.choice([0, 40, len(self.context)])]
        contexts = self.chance.choice([None, None, ContextRequest(name=None)])
        return Request(
            shared + self.new(80), self.sampling(), self.chance.randint(1, 20), ignore_eos=True, contexts=contexts
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of all; by default each its own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, checks, fullest, met = time.perf_counter(), 0, 0.0, Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        models = save_models(Path(directory))
        for seed in range(options.first, options.first + options.histories):
            try:
                if seed % 10 == 7:
                    checks += sum(play_on_ranks(models, seed, dtype=options.dtype))
                    met["two ranks"] += 1
                else:
                    found = play(models, seed, dtype=options.dtype)
                    checks, fullest = checks + found.checks, max(fullest, found.fullest)
                    met.update(found.met)
            except BaseException:
                print(f"seed {seed}")
                raise
            if seed % 100 == 99:
                print(f"{seed + 1 - options.first} histories, {checks:,} checks, {time.perf_counter() - began:.0f} s")
    print(f"{options.histories} histories: in {checks:,} checks what is on the device was held by somebody and planned")
    print(f"of what is planned beside what lasts, {fullest:.1%} was taken at most")
    print("histories with " + ", ".join(f"{name}: {count}" for name, count in sorted(met.items())))


if __name__ == "__main__":
    main()
