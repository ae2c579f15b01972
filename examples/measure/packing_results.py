"""Measures how far real keys and values can be packed without loss, how fast `unpack` is, and what a run that streams
them takes.

    python examples/measure/packing_results.py --prompt-file BOOKS/emma.txt --tokens 8192 32768 --json packing.json
    python examples/measure/packing_results.py --prompt-file BOOKS/emma.txt --tokens 32768 --streamed-only --link-gbps 1

The pair's target reads a book in bfloat16. Its keys and values are counted with 3 and with 4 bits of exponent below the
largest of a group, for groups of 64 tokens of a channel and of 64 channels of a token; then they are packed as
`kernels.packing` does it, into slots of one size. Numbers of three known distributions are counted too, because other
models have other keys and values. Speeds are those of all layers together, in bytes of unpacked values, beside a copy
of the same bytes; they mean something on an idle machine only.

With `--link-gbps` the pair answers after each length with all blocks streamed over a link of so many gigabytes a second
(a thread), raw and packed, each in a process of its own: bytes over the link, seconds of a verification, memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from report import make_parser, print_table, write_json
from torch import Tensor
from triforce.kernels.packing import pack, unpack
from triforce.kernels.slots import FARTHEST, GROUP, VALUES_PER_EXCEPTION
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

EXCEPTION_BITS = 32
"""Of an exception in a slot; 24 are the least that its place in a tile and its exponent take."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768], help="lengths, multiples of 64")
    parser.add_argument("--block", type=int, default=2048, help="tokens of a block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7, help="of the speeds, of which medians are printed; 0: none")
    parser.add_argument("--link-gbps", type=float, help="also measure runs that stream")
    parser.add_argument("--streamed-only", action="store_true", help="measure nothing else")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    text = given.prompt_file.read_text(encoding="utf-8-sig")
    found, spreads = {}, {} if given.streamed_only else known_distributions()
    if spreads:
        rows = [{"": name, "3 bits": f"{a:.2%}", "4 bits": f"{b:.4%}"} for name, (a, b) in spreads.items()]
        print_table(given, "exceptions in known distributions", rows)
    for tokens in given.tokens:
        found[tokens] = {}
        if given.link_gbps:
            found[tokens]["streamed"] = streamed(given.model, text, tokens, given.link_gbps, given.threads)
            show_streamed(given, tokens, found[tokens]["streamed"])
        if given.streamed_only:
            continue
        kv = keys_and_values(given.model, text, tokens)
        found[tokens]["variants"] = rows = list(variants(kv, given.block))
        shown = [{**row, "exceptions": f"{row['exceptions']:.4%}"} for row in rows]
        columns = ("of", "bits", "groups", "exceptions", "bits_a_value", "bits_in_slots")
        print_table(given, f"{tokens:,} tokens: {kv.numel():,} values", shown, columns)
        found[tokens]["packed"] = packed(kv, given.block)
        room = f"{FARTHEST} at most below the largest, room for {1 / VALUES_PER_EXCEPTION:.2%} exceptions"
        print_table(given, f"{tokens:,} tokens packed, {room}", [found[tokens]["packed"]])
        found[tokens]["speed"] = speeds(kv, given.block, given.repeat) if given.repeat else None
        if given.repeat:
            print_table(given, f"{tokens:,} tokens, GB/s of unpacked values", [found[tokens]["speed"]])
    write_json(given, {"tokens": found, "distributions": spreads})


def show_streamed(given: argparse.Namespace, tokens: int, runs: dict[str, dict]) -> None:
    rows = [
        {
            "pack": name,
            "ms a verification": run["verify_ms"],
            "MB over the link each": run["bytes_a_pass"] / 1e6,
            "MB of the process": run["process_bytes"] / 1e6,
            "at most": run["peak_bytes"] / 1e6,
        }
        for name, run in runs.items()
    ]
    ratio = f"packed against raw: verification {runs['on']['verify_ms'] / runs['off']['verify_ms']:.3f} x"
    print_table(given, f"{tokens:,} tokens over a link of {given.link_gbps:g} GB/s", rows, notes=[ratio])


@torch.inference_mode()
def keys_and_values(model: str, text: str, tokens: int) -> Tensor:
    """`[num_layers, 2, num_kv_heads, tokens, head_dim]` bfloat16 of the first tokens of a text."""
    ids = Tokenizer.load(find_pair(model)[0]).encode(text, True)[:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the text has only {len(ids):,} tokens")
    decoder = Engine.load(model, "none", device="cpu", dtype="bfloat16", tiers=2).target
    config, rope = decoder.config, decoder.rope
    cache = FullCache.on_device(config, rope, dtype=decoder.dtype, device=decoder.device, capacity=tokens)
    decoder.forward(torch.tensor(ids), cache)
    return torch.stack([torch.stack(cache.blocks.slice(i, 0, tokens)) for i in range(config.num_layers)])


def variants(kv: Tensor, block: int) -> Iterator[dict]:
    """Shares of exceptions and bits a value, of keys and of values, by the bits of exponent and the kind of group."""
    for (half, name), groups, bits in product(enumerate(("keys", "values")), ("channel", "token"), (3, 4)):
        shares = torch.cat([exceptions(layer[half], bits, groups, block) for layer in kv])
        fixed = 8 + bits + 8 / GROUP
        mean = shares.mean().item()
        yield {
            "of": name,
            "bits": bits,
            "groups": groups,
            "exceptions": mean,
            "most_exceptions_in_a_block": shares.max().item(),
            "bits_a_value": fixed + EXCEPTION_BITS * mean,
            "bits_in_slots": fixed + in_slots(shares),
        }


def exceptions(values: Tensor, bits: int, groups: str, block: int) -> Tensor:
    """The share of exceptions in each block of a layer's keys or values `[num_kv_heads, tokens, head_dim]`."""
    exponents = values.view(torch.int16).to(torch.int32) >> 7 & 0xFF
    grouped = exponents.unflatten(1, (-1, GROUP)) if groups == "channel" else exponents.unflatten(2, (-1, GROUP))
    axis = 2 if groups == "channel" else 3
    far = grouped.amax(axis, keepdim=True) - grouped >= 2**bits
    of_token = far.reshape(values.shape).float().mean((0, 2))
    return torch.stack([part.mean() for part in of_token.split(block)])


def known_distributions() -> dict[str, list[float]]:
    """Shares of exceptions with 3 and with 4 bits, a channel's groups, by the name of what numbers are drawn from."""
    torch.manual_seed(0)
    drawn = {
        "normal": torch.randn,
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample,
        "Student's t, 3 degrees of freedom": torch.distributions.StudentT(3.0).sample,
    }
    scales = torch.rand(1024).exp2()  # how far below a power of two the largest is
    values = {name: (draw((64, 1024, 64)) * scales[:, None]).transpose(1, 2) for name, draw in drawn.items()}
    return {
        name: [exceptions(of.bfloat16().contiguous(), bits, "channel", 64).mean().item() for bits in (3, 4)]
        for name, of in values.items()
    }


def in_slots(shares: Tensor) -> float:
    """Bits a value that exceptions take where all slots have one size, the best there is: a block with more than fit
    stays raw, in 16 bits beside its slot."""
    sizes = torch.cat((torch.zeros(1), shares)).unique()
    raw = (shares.unsqueeze(0) > sizes.unsqueeze(1)).float().mean(1)
    return (EXCEPTION_BITS * sizes + 16 * raw).min().item()


def packed(kv: Tensor, block: int) -> dict:
    """Bits a value as they are stored, slots and blocks that stay raw counted, keys and values of a block apart."""
    raw_bytes = stored = blocks = raw = 0
    for part in kv.split(block, 3):
        slots, fits = pack(part)
        check = torch.empty_like(part)
        unpack(slots, check)
        assert torch.equal(check[fits].view(torch.int16), part[fits].view(torch.int16))
        left = int((~fits).sum())
        raw_bytes += part.numel() * 2
        stored += slots.numel() + left * part[0, 0].numel() * 2
        blocks, raw = blocks + fits.numel(), raw + left
    return {"bits_a_value": 16 * stored / raw_bytes, "blocks": blocks, "raw_blocks": raw}


def speeds(kv: Tensor, block: int, repeat: int) -> dict:
    """Gigabytes of unpacked values a second, medians; all whole blocks."""
    kv = torch.stack(kv[:, :, :, : kv.shape[3] // block * block].split(block, 3)).contiguous()
    slots, out = pack(kv)[0], torch.empty_like(kv)
    runs = {"unpack": lambda: unpack(slots, out), "pack": lambda: pack(kv, slots), "copy": lambda: out.copy_(kv)}
    seconds = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    return {name: kv.numel() * 2 / statistics.median(times) / 1e9 for name, times in seconds.items()}


def streamed(model: str, text: str, tokens: int, link_gbps: float, threads: int) -> dict[str, dict]:
    """What a run takes that streams all blocks over a link, by whether they are packed."""
    found = {}
    for pack_it in ("off", "on"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[pack_it] = pool.submit(streamed_run, model, text, tokens, link_gbps, threads, pack_it).result()
    assert found["on"]["token_ids"] == found["off"]["token_ids"], "packing changed the text"
    return found


def streamed_run(model: str, text: str, tokens: int, link_gbps: float, threads: int, pack_it: str) -> dict:
    """One such run of two tiers, in a fresh process."""
    torch.set_num_threads(threads)
    ids = Tokenizer.load(find_pair(model)[0]).encode(text, True)[:tokens]
    given: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "resident": 0, "link_gbps": link_gbps}
    engine = Engine.load(model, "none", **given, pack=pack_it, tiers=2, block_length=8, threads=threads)
    run = engine.stream(ids, Sampling(0.0), 128, ignore_eos=True)
    next(run)  # the first one comes from the prefill
    first = run.stats()
    for _ in run:
        pass
    last = run.stats()
    rounds = last["rounds"] - first["rounds"]
    return {
        "token_ids": last["token_ids"],
        "verify_ms": 1e3 * (last["time_s"]["verify"] - first["time_s"]["verify"]) / rounds,
        "bytes_a_pass": (last["link"]["bytes_streamed"] - first["link"]["bytes_streamed"]) / rounds,
        "process_bytes": psutil.Process().memory_info().rss,
        "peak_bytes": last["memory"]["host_peak_bytes"],
    }


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
