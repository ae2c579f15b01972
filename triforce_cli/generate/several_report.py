"""The statistics of several answers that were written together, as a few lines and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ...tp.units import gib
from ..terminal.tables import make_table
from .report import describe_disk, describe_link, describe_memory, print_rows

_ENDINGS = {"eos": "end", "stop": "end", "length": "length", "interrupted": "interrupted"}


def report_several(console: Console, document: dict[str, Any], names: Sequence[str]) -> None:
    """The JSON of a batch.

    Args: `names` are those of its sequences.
    """
    sequences = document["sequences"]
    failed = sum("error" in one for one in sequences)
    seeds = {one["seed"] for one in sequences if "seed" in one}
    seed = f"; seed {seeds.pop()}" if len(seeds) == 1 else ""
    answers = f"{len(sequences) - failed:,} answers" + (f", {failed:,} failed" if failed else "")
    rows = {"written": f"{document['new_tokens']:,} tokens in {answers}{seed}"}
    if document["rounds"]:
        each = document["decode_s"] / document["rounds"] * 1e3
        speed = f"{document['tokens_per_s']:.1f} tokens/s over {document['rounds']:,} rounds of {each:.1f} ms"
        rows["together"] = f"{speed}; reading took {document['prefill_s']:.2f} s"
    if document["link"]["bytes_streamed"]:
        rows["link"] = describe_link(document["link"])
    if document["disk"]["bytes_read"]:
        rows["disk"] = describe_disk(document["disk"])
    rows["memory"] = f"{describe_memory(document['memory'])}; KV cache {gib(document['memory']['kv_bytes'])}"
    if document["warnings"]:
        rows["warning"] = "; ".join(document["warnings"])
    print_rows(console, rows)
    titles = ("", "tokens", "ended by", "TTFT s", "TBT ms", "accepted", "question")
    cells = [_cells(i, one, name) for i, (one, name) in enumerate(zip(sequences, names, strict=True), 1)]
    console.print(make_table(titles, cells, left=("ended by", "question")))


def _cells(number: int, one: dict[str, Any], name: str) -> list[str]:
    """A sequence as a row of the table; what it has not come to is left out."""
    if "error" in one:
        return [str(number), "-", "error", "-", "-", "-", name]
    tbt = f"{one['tbt_ms']['mean']:.1f}" if one.get("rounds") else "-"
    share = one["acceptance"]["retrieval_per_token"] if one.get("rounds") else None
    ttft = f"{one['ttft_s']:.2f}" if one.get("new_tokens") else "-"
    ending = _ENDINGS[one.get("finish_reason", "interrupted")]
    return [str(number), f"{one['new_tokens']:,}", ending, ttft, tbt, "-" if share is None else f"{share:.0%}", name]
