"""Random histories of requests to one run after another: they join in every round, are ended in every phase, start from
saved contexts, save them, are refused, and go on from what was answered; runs are interrupted, or broken off in a pass.
Each text is the one it has alone. Of the models one has sliding windows in all layers, one in some, two linear
attention, one of them with experts, one has experts in four bits, and one rotates keys by a prompt's length.

    python tests/support/simulator/texts.py --histories 2000
    python tests/support/simulator/texts.py --histories 200 --real
    python tests/support/simulator/texts.py --requests 20000

The first plays on a simulated GPU, the second on this machine's CPU; every tenth history is one of two ranks. The third
is one run of so many requests, and says what its process holds meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from cuda_simulator import Simulator
from ledger import LIMITS, request_of
from ledger import save_models as save_pair
from simulated_gpu import as_on_a_gpu, simulated_system
from torch import Tensor
from triforce.offload import ContextRequest, ContextStore, Ended, Engine, Request, Run, Sampling, Tokens
from triforce.offload.caches.full import FullCache
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.system import THIS_MACHINE
from triforce.offload.transfer.host import HOST
from triforce.tp.weights.registry import MTP

sys.path.append(str(Path(__file__).parents[1]))  # where the next one is, if this is run as a script
from mtp import Head
from quantised import FORMATS, save_quantised
from spmd import run_forks
from tiny import random_tokens, save_family, save_llama

BOOK = random_tokens(600, seed=5)
LONGEST = 1600
"""Tokens of the longest prompt and its answer, and some."""

UNKNOWN = 10_000
"""No token of the vocabulary."""

ORIGINAL = 400
"""Tokens of the longest prompt whose keys do not depend on its length, where RoPE is dynamic."""


def save_models(root: Path) -> Path:
    """Tiny targets, and a tiny draft for them."""
    save_pair(root)
    save_family(root / "window", "mistral-window", seed=1)
    save_quantised(root / "experts", FORMATS["gptq"], "qwen3-moe", seed=1)
    Head(save_family(root / "states-experts", "qwen3-next", seed=1), seed=2).save(root / "states-experts")
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    kind = {"num_key_value_heads": 2, "max_position_embeddings": ORIGINAL, "rope_parameters": dynamic}
    save_llama(root / "dynamic", seed=1, **kind)
    return root


class BrokenOff(BaseException):
    """As Ctrl-C raises it, wherever it comes."""


@contextmanager
def broken_off(after: int | None) -> Iterator[None]:
    """Within, a pass is broken off once keys and values were added to layers so many times; what comes of it is over
    with that."""
    times, append = itertools.count(1), FullCache.append

    def breaks(*given: Any) -> None:
        if after is not None and next(times) > after:
            raise BrokenOff
        append(*given)

    with suppress(BrokenOff), patch.object(FullCache, "append", breaks):
        yield


@dataclass(eq=False)
class Asked:
    """A request, and what has come of it; its sequence's tag."""

    request: Request
    refused: bool
    """Whether it cannot be answered."""
    text: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None
    cancelled: bool = False


class History:
    """Requests to an engine; on rank 0."""

    def __init__(self, engine: Engine, chance: random.Random) -> None:
        self.engine, self.chance = engine, chance
        self.asked: list[Asked] = []
        self.saved: list[tuple[str, Sequence[int] | Tensor]] = []
        self.names = (f"text-{number}" for number in itertools.count())

    def play(self, requests: int = 5) -> None:
        """Runs, of which some are interrupted.

        Raises:
            AssertionError: a text is not the one it has alone, or another one was refused than cannot be answered.
        """
        for _ in range(self.chance.choice([1, 1, 2])):
            self.run(requests)
        for one in self.asked:
            self.check(one)

    def run(self, requests: int, *, whole: bool = False) -> None:
        """One run; `whole` is whether it is not interrupted."""
        chance, left = self.chance, iter(range(requests))
        times = chance.choice([None, None, chance.randint(1, 60)])  # that it is asked until it is interrupted
        lasts = None if whole else times
        calls = itertools.count(1)

        def source(waits: bool) -> Request | None:
            if not waits and chance.random() < 0.6:
                return None
            return self.request() if next(left, None) is not None else None

        run = self.engine.run(
            source,
            max_sequences=chance.choice([1, 2, 4]),
            in_slices=chance.random() < 0.7,
            interrupted=lambda: lasts is not None and next(calls) >= lasts,
        )
        cancels = chance.choice([0.0, 0.05])
        alone = self.engine.target.ranks.size == 1  # else the others would wait in vain
        with broken_off(chance.choice([None, None, chance.randint(1, 3000)]) if alone and not whole else None):
            for event in run:
                self.note(run, event, cancels)
        for one in self.asked:
            one.cancelled |= not one.ended  # interrupted
            one.ended = True

    def note(self, run: Run, event: Any, cancels: float) -> None:
        one: Asked = event.sequence.tag
        assert not one.ended, "nothing follows the end"
        if isinstance(event, Tokens):
            one.text += event.round.tokens
        elif isinstance(event, Ended):
            one.ended, one.error = True, event.sequence.error
            saves = one.request.contexts and one.request.contexts.save
            if saves and one.error is None and one.text:
                self.saved.append((saves, one.request.prompt_ids))
        if self.chance.random() < cancels and not one.ended:
            run.end(event.sequence)
            one.cancelled = True

    def request(self) -> Request:
        """The next one."""
        chance, contexts = self.chance, None
        prompt = [*BOOK[: chance.choice([0, 200, 450, 600])], *self.new(90)]
        kind = chance.choice(["new", "new", "new", "turn", "turn", "save", "saved", "refused"])
        finished = [one for one in self.asked if one.text and one.ended]
        if kind == "turn" and finished:
            before = chance.choice(finished[-6:])
            prompt = [*before.request.prompt_ids, *before.text, *self.new(40)][-1500:]
        elif kind == "save":
            contexts = ContextRequest(name=None, save=next(self.names), required=True)
        elif kind == "saved" and self.saved:
            name, text = chance.choice(self.saved)
            prompt, contexts = [*text, *self.new(40)], ContextRequest(name=name)
        elif kind == "refused":
            choice = chance.choice(["token", "length", "context"])
            prompt = {"token": [UNKNOWN], "length": BOOK * 8, "context": prompt}[choice]
            contexts = ContextRequest(name="none") if choice == "context" else None
        sampling = chance.choice([Sampling(0.0), Sampling(0.8, seed=chance.randint(0, 99))])
        contexts = contexts or chance.choice([None, ContextRequest(name=None, find=False)])
        one = Asked(
            Request(prompt, sampling, chance.randint(1, 14), ignore_eos=True, contexts=contexts),
            kind == "refused" or self._is_not_saved(prompt, contexts),
        )
        one.request = replace(one.request, tag=one)
        self.asked.append(one)
        return one.request

    def _is_not_saved(self, prompt: Sequence[int], contexts: ContextRequest | None) -> bool:
        """Whether it wants a context of a text that cannot be saved."""
        named = contexts is not None and bool(contexts.name or contexts.save)
        return named and self.engine.target.config.rope.type == "dynamic" and len(prompt) > ORIGINAL

    def new(self, most: int) -> list[int]:
        return random_tokens(self.chance.randint(1, most), seed=self.chance.randint(100, 10_000))

    def check(self, one: Asked) -> None:
        request = one.request
        if one.refused:
            assert one.error or one.cancelled, "it was answered"
            return
        assert one.error is None, one.error
        assert one.cancelled or len(one.text) == request.max_new_tokens
        alone = ContextRequest(name=None, find=False)
        options = {"ignore_eos": True, "reuse": 0, "contexts": alone}
        if one.text:
            want = self.engine.generate(request.prompt_ids, request.sampling, len(one.text), **options).token_ids
            assert one.text == want, f"{one.text} is not {want}, the text alone"


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    requests: int
    """That have ended by then."""
    bytes: int
    descriptors: int
    objects: int

    def __str__(self) -> str:
        held = f"{self.bytes >> 20:,} MiB, {self.descriptors} descriptors, {self.objects:,} objects"
        return f"{self.requests:,}: {held}"


class LongRun(History):
    """A run of many requests, of which only the last are kept, and the last texts that were saved."""

    def __init__(self, engine: Engine, chance: random.Random, every: int, note: Callable[[Holdings], None]) -> None:
        """Args: `every` so many requests `note` is given what the process holds."""
        super().__init__(engine, chance)
        self._every, self._note, self._ended = every, note, 0

    def note(self, run: Run, event: Any, cancels: float) -> None:
        super().note(run, event, cancels)
        if not isinstance(event, Ended):
            return
        self.asked = [one for one in self.asked[:-5] if not one.ended] + self.asked[-5:]
        contexts = self.engine.contexts
        while contexts and len(self.saved) > 3:
            contexts.store.remove(self.saved.pop(0)[0])
        self._ended += 1
        if self._ended % self._every == 0:
            gc.collect()
            process = psutil.Process()
            held = process.memory_info().rss, process.num_fds(), len(gc.get_objects())
            self._note(Holdings(self._ended, *held))


def play_long(models: Path, requests: int, every: int, note: Callable[[Holdings], None]) -> None:
    """One run on this machine, with keys and values that stream and three tiers. `every` so many requests `note` is
    given what the process holds.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {"device": "cpu", "dtype": "float32", "resident": 0, "budget": 64, "store": ContextStore(Path(folder))}
        asked = request_of(models / "target", given | {"draft": models / "draft"}, 4 * LONGEST, 1)
        given["host_memory"] = make_plan(asked).host_total / 2**30  # in which a few of what has ended can stay
        system = replace(THIS_MACHINE, limits=LIMITS)
        engine = Engine.load(models / "target", models / "draft", system=system, **given)
        LongRun(engine, random.Random(1), every, note).run(requests, whole=True)
        engine.close()


def play(models: Path, seed: int, *, ranks: int = 1, real: bool = False) -> int:
    """A history with settings of all kinds; how many requests it had.

    Raises:
        AssertionError: see `History.play`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            return _play(models, seed, Path(folder), 1, real)
        call = lambda: print(_play(models, seed, Path(folder), ranks, real), flush=True)  # noqa: E731
        return sum(map(int, run_forks(call, ranks).split()))


def _play(models: Path, seed: int, folder: Path, ranks: int, real: bool) -> int:
    chance = random.Random(seed)
    names = ["target", "states", "window", "dynamic", "windows", "states-experts", "experts"]
    target = models / chance.choice(names)
    settings: dict[str, Any] = {
        "tiers": chance.choice([1, 2, 3, 3]),
        "resident": chance.choice([None, 0, 1e-4]),
        "budget": chance.choice([16, 64, 128]),
        "refresh": chance.choice(["auto", "round", "never"]),
        "draft": chance.choice([models / "draft", f"{models / 'draft'},lookup"]),
        "exact": "on",
        "room": chance.choice([0, 300]),
    }
    if target.name.startswith("states"):
        settings["draft"] = chance.choice([settings["draft"], MTP, f"{MTP},lookup"])
    if chance.random() < 0.3:  # not all that has ended can stay
        asked = replace(request_of(target, settings | {"dtype": "float32"}, LONGEST, ranks), gpu_bytes=None)
        whole = make_plan(replace(asked, kernels=False))
        settings["host_memory"] = ranks * (whole.host_total + chance.uniform(0.1, 2.0) * whole.kv) / 2**30
    steps = (chance.choice([1e-4, 0.05, 0.6]) for _ in itertools.count())
    now = itertools.accumulate(steps)  # seconds, so that prompts are read in slices of all lengths
    with ExitStack() as within:
        system = replace(THIS_MACHINE, limits=LIMITS)
        if not real:
            simulator = Simulator()
            within.enter_context(as_on_a_gpu())
            within.enter_context(simulator)
            system = simulated_system(simulator, LIMITS, HOST, None)
        system = replace(system, clock=lambda: next(now))
        given = {"device": "cpu", "dtype": "float32", "gpus": ranks, "system": system, "store": ContextStore(folder)}
        engine = Engine.load(target, **given, **settings)
        try:
            if engine.target.ranks.rank:
                for run in _followed(engine):
                    for _ in run:
                        pass
                return 0
            history = History(engine, chance)
            history.play()
            engine.finish()
            return len(history.asked)
        finally:
            engine.close()


def _followed(engine: Engine) -> Iterator[Run]:
    while (run := engine.follow()) is not None:
        yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--real", action="store_true", help="on this machine's CPU instead of a simulated GPU")
    parser.add_argument("--requests", type=int, help="one run of so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, requests = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as directory:
        models = save_models(Path(directory))
        if options.requests:
            play_long(models, options.requests, max(1, options.requests // 20), lambda held: print(held, flush=True))
            return
        for seed in range(options.first, options.first + options.histories):
            try:
                requests += play(models, seed, ranks=2 if seed % 10 == 7 else 1, real=options.real)
            except BaseException:
                print(f"seed {seed}")
                raise
            if seed % 100 == 99:
                passed = time.perf_counter() - began
                print(f"{seed + 1 - options.first} histories, {requests:,} requests, {passed:.0f} s", flush=True)
    print(f"{options.histories} histories: each text of {requests:,} requests is the one it has alone")


if __name__ == "__main__":
    main()
