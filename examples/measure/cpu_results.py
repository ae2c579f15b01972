"""Measures the steps of the embedded pair on this CPU: with plain PyTorch, with compiled attention, with all compiled
kernels, and where passes of the tiers that draft are captured and replayed, too.

    python examples/measure/cpu_results.py --contexts 32768 131072 --json cpu.json
    python examples/measure/cpu_results.py --contexts 32768 --prefill

Each kind of step is timed as a whole and by part, over a cache of zeros, with random weights: its time does not depend
on them. Two bounds are measured as well: the bytes of keys and values over the memory's bandwidth, and the arithmetic
of attention, with as many rows over keys that fit into the processor's caches. With `--prefill` the attention of a
prefill is timed instead, by the compiled kernels and by PyTorch's flash kernel, which computes it where those were not
built. The machine must be idle otherwise.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from report import make_parser, print_table, write_json
from triforce.kernels.attention import attend, attend_blocks
from triforce.kernels.cpu.library import cpu_level
from triforce.kernels.selection import Backend, use_kernels
from triforce.offload.caches import full as full_cache
from triforce.offload.caches import retrieval as retrieval_cache
from triforce.offload.caches import streaming as streaming_cache
from triforce.offload.graphs.capture import capture_for
from triforce.offload.graphs.passes import Passes
from triforce.offload.planning.cost_model import Assumptions
from triforce.offload.settings import Settings
from triforce.offload.shape_steps import ShapeSteps
from triforce.offload.transfer.bandwidth import memory_bandwidth, timed
from triforce.offload.transfer.placement import block_size_for
from triforce.tp import matrices, rope
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.registry import EMBEDDED, find_pair

CPU = torch.device("cpu")
CACHED_KEYS = 1024
"""Keys whose rows are in the processor's caches after the first time."""

CAPTURED = "captured"
VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain PyTorch": lambda: use_kernels(attention="plain", layers="plain"),
    "compiled attention": lambda: use_kernels(layers="plain"),
    "compiled steps": use_kernels,
    CAPTURED: use_kernels,
}
"""The kernels that steps are computed with; passes run as they come in all but the last."""

PREFILL_BACKENDS: tuple[Backend, ...] = ("compiled", "flash_cpu")
PREFILL_ROWS = 4096
"""Tokens that prefill takes through a layer together."""

PARTS = {
    "attention": [
        *((module, "attend") for module in (full_cache, retrieval_cache, streaming_cache)),
        (full_cache, "attend_blocks"),
    ],
    "products": [(matrices, "linear"), (matrices, "gated_mlp")],
    "rotation": [(rope, "rotate")],
}
"""The functions whose time is counted as a part; the rest of a step is dispatch, copies and the cache's own work."""

STEPS = {
    "one row, full cache": ("FullCache", 1),
    "13 rows, full cache": ("FullCache", 13),
    "5 rows, retrieval cache": ("RetrievalCache", 5),
    "a draft step": ("StreamingCache", 1),
}


class Profile:
    """Seconds of passes and of their parts, by kind of cache and number of rows."""

    def __init__(self) -> None:
        self.passes: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
        self._parts: dict[str, float] = {}

    def part(self, name: str, function: Callable) -> Callable:
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began
            return result

        return measured

    def whole(self, forward: Callable) -> Callable:
        def measured(self_: Any, token_ids: torch.Tensor, *args: Any) -> Any:
            self._parts = {}
            began = time.perf_counter()
            result = forward(self_, token_ids, *args)
            found = {"whole": time.perf_counter() - began} | self._parts
            self.passes[type(self_.cache).__name__, len(token_ids)].append(found)
            return result

        return measured

    def medians_ms(self, kind: tuple[str, int]) -> dict[str, float]:
        passes = self.passes[kind]
        return {name: 1e3 * statistics.median(one.get(name, 0.0) for one in passes) for name in ("whole", *PARTS)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=5, help="times that each kind of step is measured anew")
    parser.add_argument("--prefill", action="store_true", help="compare implementations of prefill attention instead")
    options = parser.parse_args()
    target, draft = (ModelConfig.load(directory) for directory in find_pair(EMBEDDED, None) if directory)
    if options.prefill:
        write_json(options, {"prefill_s": measure_prefill(options, target)})
        return
    results: dict[str, Any] = {"memory_gb_per_s": memory_bandwidth(CPU) / 1e9}
    for context in options.contexts:
        measured = {name: measure(name, target, draft, context, options.rounds) for name in VARIANTS}
        floor = context * target.kv_bytes_per_token(torch.bfloat16) / results["memory_gb_per_s"] / 1e6
        bounds = {"memory": floor} | {f"arithmetic of {n} rows": arithmetic_ms(target, n, context) for n in (1, 13)}
        results[str(context)] = {"bounds_ms": bounds, "steps_ms": measured}
        print_steps(options, context, results[str(context)])
        write_json(options, results, whole=False)
    write_json(options, results)


def measure(
    variant: str, target: ModelConfig, draft: ModelConfig, context: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind of step, as a whole and by part."""
    profile = Profile()
    settings = Settings(tiers=3, draft_length=4, block_length=12)
    with ExitStack() as patches:
        patches.enter_context(VARIANTS[variant]())
        for part, functions in PARTS.items():
            for module, name in functions:
                patches.enter_context(patch.object(module, name, profile.part(part, getattr(module, name))))
        patches.enter_context(patch.object(Passes, "forward", profile.whole(Passes.forward)))
        captures = capture_for if variant == CAPTURED else lambda _: None
        where = {"dtype": torch.bfloat16, "device": CPU, "context": context}
        steps = ShapeSteps(target, draft, settings, **where, make_capture=captures)
        for _ in range(rounds):
            steps.at(context, Assumptions())
    return {name: profile.medians_ms(kind) for name, kind in STEPS.items()}


@torch.inference_mode()
def arithmetic_ms(target: ModelConfig, rows: int, context: int) -> float:
    """What attention of all layers takes for `context` keys at least: as if none of them had to come from memory."""
    heads, kv_heads, dim = target.num_heads, target.num_kv_heads, target.head_dim
    q = torch.randn(heads, rows, dim, dtype=torch.bfloat16)
    k, v = torch.randn(2, kv_heads, CACHED_KEYS, dim, dtype=torch.bfloat16).unbind()
    seconds = min(timed(lambda: attend(q, k, v, scale=dim**-0.5), CPU, repeats=500))
    return 1e3 * seconds * context / CACHED_KEYS * target.num_layers


def measure_prefill(options: argparse.Namespace, target: ModelConfig) -> dict[int, dict[str, float]]:
    """The seconds of attention in the last part of a prefill, of all layers, by context and kernel."""
    seconds = {
        context: {kernel: prefill_seconds(kernel, target, context, options.rounds) for kernel in PREFILL_BACKENDS}
        for context in options.contexts
    }
    rows = [{"tokens": context, **kernels} for context, kernels in seconds.items()]
    print_table(options, f"attention of {PREFILL_ROWS} rows, {cpu_level().name}, s", rows)
    return seconds


@torch.inference_mode()
def prefill_seconds(backend: Backend, target: ModelConfig, context: int, rounds: int) -> float:
    """Seconds that all layers attend the last `PREFILL_ROWS` rows of a prompt of `context` tokens."""
    rows, block_size = min(PREFILL_ROWS, context), block_size_for(context, 8)
    q = torch.randn(target.num_heads, rows, target.head_dim, dtype=torch.bfloat16)
    layer = (-(-context // block_size), 2, target.num_kv_heads, block_size, target.head_dim)
    blocks = torch.randn(*layer, dtype=torch.bfloat16)

    def step() -> None:
        attend_blocks(q, blocks, context, scale=target.head_dim**-0.5, diagonal=context - rows)

    with use_kernels(prefill=backend):
        return target.num_layers * statistics.median(timed(step, CPU, rounds))


def print_steps(options: argparse.Namespace, context: int, found: dict[str, Any]) -> None:
    """Prints a row for each kind of step, and the bounds below them."""

    def cell(ms: dict[str, float]) -> str:
        parts = " + ".join(f"{ms[part]:.2f}" for part in PARTS)
        return f"{ms['whole']:.2f}" + f" ({parts})" * any(ms[part] for part in PARTS)

    rows = [{"": step, **{name: cell(steps[step]) for name, steps in found["steps_ms"].items()}} for step in STEPS]
    bounds = ", ".join(f"{name}: {ms:.2f} ms" for name, ms in found["bounds_ms"].items())
    title = f"{context:,} tokens, bfloat16, ms (attention + products + rotation)"
    print_table(options, title, rows, notes=[f"bounds: {bounds}"])


if __name__ == "__main__":
    main()
