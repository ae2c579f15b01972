"""Counts what the host does for a pass, without a GPU: `python tests/support/simulator/count_operations.py`.

PyTorch's operations are counted on a CPU, with what a GPU would launch in place of the attention and chunk kernels:
one for each kernel of Triton's or of a flash package, and nothing computed. Keys and values are in as many blocks as
the 131,072 tokens of Llama-2-7B would be, but heads and weights are tiny, as the counts do not depend on them, and two
layers are counted, which its 32 repeat.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triforce.kernels.selection import use_kernels
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache
from triforce.offload.graphs.passes import Graphs, Passes
from triforce.offload.shape_steps import RandomWeights
from triforce.offload.speculation.noise import CommonNoise
from triforce.offload.speculation.sampler import Sampler, distributions, draw
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.offload.transfer.link import Traffic
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder
from triforce.tp.model.config import ModelConfig

sys.path.append(str(Path(__file__).parents[1]))  # where the next ones are, if this is run as a script
from recorder import Recorder
from tiny import random_tokens, save_llama

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
LAYERS, CONTEXT, BLOCK, CHUNK, BUDGET, ROWS = 32, 131072, 1024, 8, 4096, 9
SPARE = 2
"""Of a layer's resident blocks, those that can leave a GPU of 24 GiB."""
ROOM = 2048
"""Tokens behind the context that there is room for."""

_NO_KERNEL = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "lift_fresh",
    "detach",
    "promote_types",
}
"""Operations that start no kernel, besides those that give views."""


class Counting(TorchDispatchMode):
    """Counts, within, `operations` of PyTorch and `launches`; others are counted by `count`."""

    current: Counting | None = None

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self):
        Counting.current = self
        return super().__enter__()

    def __exit__(self, *error):
        Counting.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["operations"] += 1
        name = func.overloadpacket.__name__
        if name == "_scaled_dot_product_flash_attention":  # one kernel, which a CPU has not
            self.counts["launches"] += 1
            return torch.empty_like(args[0]), torch.empty(args[0].shape[:-1])
        result = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in _NO_KERNEL:
            self.counts["launches"] += 1
        return result


def count(name: str, number: int = 1) -> None:
    if Counting.current is not None:
        Counting.current.counts[name] += number


class CountingLink:
    """A link across which nothing goes."""

    def host_memory(self, shape, dtype):
        return torch.zeros(1, dtype=dtype).expand(shape)  # what nobody reads takes no memory

    def fetch(self, source, buffer):
        count("copies across the link")
        return self

    def store(self, source, target):
        return self.fetch(source, target)

    def wait(self) -> None:
        pass

    def wait_for_stores(self) -> None:
        pass

    def traffic(self) -> Traffic:
        return Traffic()


class CountedGraphs(Recorder):
    """Captures each piece of which counts as one launch."""

    def capture(self, run, pool):
        self.captures += 1
        cuts: list[None] = []
        result = run(lambda: cuts.append(None))

        def replay() -> None:
            self.replays += 1
            count("launches")

        return [replay] * (len(cuts) + 1), result


def launched(*_: Any, **__: Any) -> None:
    """A launch of one of Triton's kernels, of which nothing is computed."""
    count("launches")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within, the choices of a GPU with Triton."""
    from triton.runtime.interpreter import GridExecutor

    with use_kernels(as_gpu={"triton"}), patch.object(GridExecutor, "__call__", launched):
        yield


def decoder_of(num_layers: int, vocab_size: int = 64) -> Decoder:
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 16}
    raw |= {"num_hidden_layers": num_layers, "num_attention_heads": 2, "max_position_embeddings": 2 * CONTEXT}
    config = ModelConfig.from_json(raw | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}, Path("counted"))
    return Decoder(config, RandomWeights(DTYPE, CPU), CPU)  # pyright: ignore[reportArgumentType]


def cache_of(decoder: Decoder, resident: float, context: int) -> FullCache:
    """Args: `resident` is the share of the blocks that are, of which the last ones can leave; with 1 none streams."""
    capacity = context + ROOM
    if resident < 1:
        num_resident = round(resident * context / BLOCK)
        place = replace(Placement.streaming(capacity, BLOCK, num_resident, CHUNK), num_spare=min(SPARE, num_resident))
        blocks: Any = StreamedBlocks(decoder.part, CountingLink(), place, dtype=DTYPE, device=CPU)  # pyright: ignore
    else:
        blocks = DeviceBlocks(decoder.part, dtype=DTYPE, device=CPU, capacity=capacity, block_size=capacity)
    return FullCache(decoder.part, decoder.rope, blocks, chunk_size=CHUNK)


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Counting() as mode:
        run()
    return mode.counts


def passes_of(resident: float, context: int = CONTEXT) -> Iterator[tuple[str, Counter[str]]]:
    """A prefill of `context` tokens, a verification and, where all is resident, a retrieval cache's pass of the target.
    See `cache_of`."""
    where = f"{resident:.0%} resident"
    tokens = torch.zeros(context, dtype=torch.int64)
    of_layers: list[list[Counter[str]]] = []
    for num_layers in (1, 2):
        decoder = decoder_of(num_layers)
        cache = cache_of(decoder, resident, context)
        found = [counted(lambda: decoder.forward(tokens, cache))]  # noqa: B023
        found.append(counted_replay(decoder, cache, ROWS))
        if resident == 1:
            retrieval = RetrievalCache(cache, decoder.rope, budget=BUDGET, chunk_size=CHUNK)
            retrieval.refresh()
            found.append(counted_replay(decoder, retrieval, 4))
        of_layers.append(found)
    names = [f"prefill of {context:,} tokens, {where}", f"verification of {ROWS} rows, {where}"]
    for name, one, two in zip([*names, "pass of the retrieval cache"], *of_layers, strict=False):
        yield name, Counter({what: one[what] + (LAYERS - 1) * (two[what] - one[what]) for what in two})


def counted_replay(decoder: Decoder, cache: Any, rows: int) -> Counter[str]:
    passes = Passes(decoder, cache, Graphs(CountedGraphs()))
    tokens = torch.zeros(rows, dtype=torch.int64)

    def step() -> None:
        length = cache.length
        passes.forward(tokens, rows)
        cache.rollback(length)

    for _ in range(2):
        step()
    return counted(step)


def draft_token() -> Counter[str]:
    """One of a small model's: its pass, the distribution, and the draw."""
    decoder = decoder_of(2, vocab_size=32000)
    cache = StreamingCache(decoder)
    decoder.forward(torch.zeros(cache.sinks + cache.window, dtype=torch.int64), cache)
    counts = counted_replay(decoder, cache, 1)
    sampler = Sampler(Sampling(seed=1), CommonNoise(1), frozenset())
    logits = torch.randn(1, 32000)
    return counts + counted(lambda: draw(distributions(logits, [sampler], [1]), [sampler], [1], [CONTEXT]))


def captures_of_a_run() -> Counter[str]:
    """Captures of a run of three tiers for 200 tokens, and those of the next one."""
    with tempfile.TemporaryDirectory() as directory, use_kernels(attention="plain", layers="plain"):
        root = Path(directory)
        save_llama(root / "target", num_key_value_heads=2)
        save_llama(root / "draft", seed=9, num_hidden_layers=1)
        lengths: dict[str, Any] = {"draft_length": 3, "block_length": 7, "budget": 64}
        engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", **lengths)
        engine._capture = recorder = Recorder()
        found = Counter[str]()
        for name in ("first run", "second run"):
            before = recorder.captures
            engine.generate(random_tokens(300, seed=3), Sampling(seed=1), 200)
            found[name] = recorder.captures - before
        return found


@torch.inference_mode()
def main() -> None:
    rows: list[tuple[str, Counter[str]]] = []
    with as_on_a_gpu():
        rows.append(("draft token", draft_token()))
        for resident in (1, 0.95, 1 / 3, 0):
            rows += passes_of(resident)
    columns = ["launches", "operations", "copies across the link"]
    print("| what |", " | ".join(columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for name, counts in rows:
        print("|", name, "|", " | ".join(f"{counts[column]:,}" for column in columns), "|")
    print("captures:", dict(captures_of_a_run()))


if __name__ == "__main__":
    main()
