"""Measures a KV cache of which most is on a disk, against the same cache in memory and against the disk itself.

    python examples/measure/below_memory.py --prompt-file book.txt --tokens 131072 --share 0.25 --json below.json

The same greedy text is written twice: with all of the cache in memory, and with `--share` of it there, both with the
same number of draft tokens, so that verifications do the same. The disk is read directly and in order just before and
after the second run: no verification is faster than its bytes at that speed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import figure_rows, make_parser, print_table, write_json
from triforce.offload import Engine, Sampling
from triforce.offload.contexts.home import contexts_root, user_store
from triforce.offload.contexts.model import ContextRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.transfer.bandwidth import disk_bandwidth
from triforce.offload.transfer.staged.block_file import DiskSpace
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=int, default=131072, help="of prompt and answer")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.25, help="of the KV cache that there is memory for")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiers", type=int, default=3)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--block-length", type=int, default=12)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pack", default="auto", choices=("auto", "on", "off"), help="of what is on the disk")
    parser.add_argument("--context", help="a saved context to begin from, which `triforce read` wrote")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(find_pair(given.model, "none")[0])
    prompt = tokenizer.encode(given.prompt_file.read_text(encoding="utf-8"), True)[: given.tokens - given.new_tokens]
    found = measure(given, prompt)
    print_table(given, f"{given.tokens:,} tokens, {given.share:.0%} of the KV cache in memory", figure_rows(found))
    write_json(given, found)
    if not found["same_tokens"]:
        sys.exit("the tokens differ")


def measure(given: argparse.Namespace, prompt: list[int]) -> dict[str, Any]:
    """Seconds, bytes, and what a verification takes for each second that its bytes take on the disk."""
    least, kv = bytes_of(given, len(prompt))
    in_memory = run(given, prompt)
    space = DiskSpace(contexts_root())
    before = disk_bandwidth(space)
    on_disk = run(given, prompt, host_memory=(least + given.share * kv) / 2**30, pack=given.pack)
    after = disk_bandwidth(space)
    rounds = on_disk["rounds"]
    read, verify_s = on_disk["disk"]["bytes_read"] / rounds, on_disk["time_s"]["verify"] / rounds
    return {
        "tokens": len(prompt) + given.new_tokens,
        "kv_bytes": kv,
        "host_memory_bytes": int(least + given.share * kv),
        "disk_bytes": on_disk["settings"]["disk_bytes"],
        "resident_bytes": on_disk["settings"]["resident_bytes"],
        "packed": on_disk["settings"]["packed"],
        "disk_gb_per_s_before": before / 1e9,
        "disk_gb_per_s_after": after / 1e9,
        "disk_gb_per_s_in_run": on_disk["disk"]["gb_per_s"],
        "read_bytes_per_verification": read,
        "verify_s_in_memory": in_memory["time_s"]["verify"] / in_memory["rounds"],
        "verify_s": verify_s,
        "verify_over_disk": verify_s * (before + after) / 2 / read,
        "tbt_ms_in_memory": in_memory["tbt_ms"]["mean"],
        "tbt_ms": on_disk["tbt_ms"]["mean"],
        "same_tokens": in_memory["token_ids"] == on_disk["token_ids"],
    }


def bytes_of(given: argparse.Namespace, prompt_tokens: int) -> tuple[int, int]:
    """Host memory that the run needs at least, and the KV cache."""
    plan = load(given).plan(prompt_tokens + given.new_tokens)
    request = replace(plan.request, host_bytes=0, disk_bytes=sys.maxsize)
    return make_plan(replace(request, settings=replace(request.settings, host_memory=0.0))).host_total, plan.kv


def load(given: argparse.Namespace, **settings: Any) -> Engine:
    kind = {name: getattr(given, name) for name in ("dtype", "tiers", "threads", "draft_length", "block_length")}
    return Engine.load(given.model, device="cpu", **kind, **settings)


def run(given: argparse.Namespace, prompt: list[int], **settings: Any) -> dict[str, Any]:
    if given.context:
        settings["store"] = user_store()
    options = {"ignore_eos": True, "contexts": ContextRequest(given.context) if given.context else None}
    return load(given, **settings).generate(prompt, Sampling(0.0), given.new_tokens, **options).stats


if __name__ == "__main__":
    main()
