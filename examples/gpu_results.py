"""Measures the offload path with a published shape: the link's ceiling, and each kind of step against its floor.

    python examples/gpu_results.py --shape yarn-llama-2-7b-128k --contexts 32768 131072 --json gpu.json

Weights are random and keys and values zeros: what a step costs does not depend on them. `--memory-gib` caps the GPU's
memory, to stand for a smaller card. Without a GPU it runs on the CPU, over a thread in place of the link: of use for
trying the script, not for its figures. Acceptance needs trained weights: `triforce generate` with the embedded pair.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from triforce.kernels.packages import usable_packages
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache
from triforce.offload.caches.synthetic import fill_with_zeros
from triforce.offload.graphs.passes import Graphs, Passes, Replayable, capture_for
from triforce.offload.planning.memory import available_bytes, plan_memory
from triforce.offload.planning.placement import make_blocks, plan_placement, resident_bytes
from triforce.offload.planning.shape_steps import RandomWeights
from triforce.offload.transfer.bandwidth import REPEATS, link_bandwidth, make_link, timed
from triforce.offload.transfer.link import Link
from triforce.tp.devices import device_name
from triforce.tp.model.config import ModelConfig
from triforce.tp.model.decoder import Decoder
from triforce.tp.weights.registry import PRESETS

CHUNK = 8


def main() -> None:
    options = parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and options.memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * 2**30 / total))
    results: dict = {"device": device_name(device), "shape": options.shape, "torch": torch.__version__}
    link = make_link(device)
    carried = link_bandwidth(link, device)
    results["link_gb_per_s"] = {way: round(value / 1e9, 2) for way, value in carried.items()}
    target, draft = PRESETS[options.shape].configs()
    steps = Steps(target, draft, device, link, options, results)
    for context in options.contexts:
        steps.measure(context)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(results)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="yarn-llama-2-7b-128k", choices=sorted(PRESETS), help="a preset")
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--budgets", nargs="+", type=int, default=[4096, 12288], help="of the retrieval cache")
    parser.add_argument("--memory-gib", type=float, default=24.0, help="of GPU memory to use; 0 is all")
    parser.add_argument("--resident-gib", type=float, help="of KV kept on the GPU; default: what fits")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens whose prefill is timed; 0 for none")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def median_ms(step: Callable[[], object], device: torch.device) -> float:
    return 1e3 * statistics.median(timed(step, device))


class Steps:
    """Times the steps of one pair of shapes."""

    def __init__(
        self,
        target: ModelConfig,
        draft: ModelConfig | None,
        device: torch.device,
        link: Link,
        options: argparse.Namespace,
        results: dict,
    ) -> None:
        self.config, self.device, self.link, self.options, self.results = target, device, link, options, results
        self.capture = capture_for(device)
        weights = RandomWeights(target.dtype, device)
        self.target = Decoder(target, weights, device)  # pyright: ignore[reportArgumentType]
        self.draft = Decoder(draft, weights, device) if draft else None  # pyright: ignore[reportArgumentType]

    def measure(self, context: int) -> None:
        """Every kind of step with `context` tokens in the cache; milliseconds, and what they are measured against."""
        out = self.results.setdefault("contexts", {})[str(context)] = {}
        if self.options.prefill:
            cache = self.full_cache(self.options.prefill + 64)
            prompt = torch.zeros(self.options.prefill, dtype=torch.int64, device=self.device)

            def prefill() -> None:
                cache.rollback(0)
                self.target.forward(prompt, cache)

            out["prefill_tokens_per_s"] = round(1e3 * self.options.prefill / median_ms(prefill, self.device))
            del cache  # its memory is wanted by the next
        cache = self.full_cache(context + 64)
        fill_with_zeros(cache, context)
        for rows in (1, 13):
            before = cache.blocks.traffic()
            ms = median_ms(lambda: self.step(cache, rows), self.device)  # noqa: B023
            crossed = cache.blocks.traffic().since(before).bytes_in / (REPEATS + 1)
            out[f"full_{rows}_rows_ms"] = round(ms, 3)
            out["streamed_bytes"] = round(crossed)
            out["floor_ms"] = round(crossed / self.results["link_gb_per_s"]["in"] / 1e6, 3)
        out["resident_bytes"] = cache.blocks.resident_bytes
        for budget in self.options.budgets:
            retrieval = RetrievalCache(cache, self.target.rope, budget=budget, chunk_size=CHUNK)
            retrieval.refresh()
            out |= self.drafting_ms(f"retrieval_{budget}", self.target, retrieval, 5)
        if self.draft:
            streaming = StreamingCache(self.draft)
            self.draft.forward(torch.zeros(300, dtype=torch.int64, device=self.device), streaming)
            out |= self.drafting_ms("draft", self.draft, streaming, 1)

    def drafting_ms(self, name: str, decoder: Decoder, cache: Replayable, rows: int) -> dict[str, float]:
        """Milliseconds of a pass that drafts, as it comes and as a graph."""
        token_ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        times = {}
        for ending, capture in (("ms", None), ("graph_ms", self.capture)):
            graphs = Graphs(capture)
            passes = Passes(decoder, cache, graphs)

            def step() -> None:
                length = cache.length
                passes.forward(token_ids, rows)  # noqa: B023
                cache.rollback(length)

            step()  # a graph is captured the second time
            ms = median_ms(step, self.device)
            if graphs.failure:
                self.results["graphs_failed"] = graphs.failure
            elif capture or ending == "ms":
                times[f"{name}_{ending}"] = round(ms, 3)
        return times

    def step(self, cache: FullCache, rows: int) -> None:
        length = cache.length
        self.target.forward(torch.zeros(rows, dtype=torch.int64, device=self.device), cache, num_logits=rows)
        cache.rollback(length)

    def full_cache(self, capacity: int) -> FullCache:
        part, dtype = self.target.part, self.target.dtype
        given = {"dtype": dtype, "capacity": capacity, "chunk_size": CHUNK}
        resident = None if self.options.resident_gib is None else self.options.resident_gib * 2**30
        if resident is None and self.device.type == "cuda":
            free, total = available_bytes(self.device), torch.cuda.mem_get_info(self.device)[1]
            if self.options.memory_gib:
                total = min(total, int(self.options.memory_gib * 2**30))
                free = min(free, total - torch.cuda.memory_allocated(self.device))
            plan = plan_memory(
                self.config, None, dtype=dtype, context=capacity, budget=max(self.options.budgets), chunk_size=CHUNK
            )
            streamed = plan_placement(part, **given, resident_bytes=0, on_gpu=True)
            resident = resident_bytes(free, total, plan, streamed, part.kv_bytes_per_token(dtype), part.num_layers)
        on_gpu = "triton" in usable_packages(self.device)
        placement = plan_placement(part, **given, resident_bytes=resident, on_gpu=on_gpu)
        blocks = make_blocks(part, placement, self.link, device=self.device, **given)
        return FullCache(part, self.target.rope, blocks, chunk_size=CHUNK)


def print_table(results: dict) -> None:
    contexts = results["contexts"]
    table = Table("", *(f"{int(context):,}" for context in contexts), title=f"{results['shape']}, {results['device']}")
    for name in dict.fromkeys(name for values in contexts.values() for name in values):
        table.add_row(name, *(f"{values[name]:,}" if name in values else "-" for values in contexts.values()))
    console = Console()
    console.print(f"link: {results['link_gb_per_s']} GB/s")
    console.print(table)
    if "graphs_failed" in results:
        console.print(f"CUDA graphs could not be captured: {results['graphs_failed']}")


if __name__ == "__main__":
    main()
