"""Messages on stderr: the settings of a run, the progress of the prefill, and the statistics of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...tp.units import gib
from ..terminal.streams import print_note
from ..terminal.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ...offload import Engine, Generation
    from ...offload.batch.sequence import BatchSequence
    from .prompt import Prompt

_ENDINGS = {"eos": "end", "stop": "end", "length": "length", "interrupted": "interrupted"}

NO_TEMPLATE = "--template-arg changes nothing here: the model's chat template is not used"
AS_PLAIN_TEXT = "the model gets questions and answers as plain text (Question: … Answer: …)"

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines about progress, if there is no terminal."""


def report_choices(
    console: Console, engine: Engine, model: str, source: str, prompt: Prompt, max_new_tokens: int, answers: int = 1
) -> None:
    """Prints the model, the device and the settings of a run in a few lines, before the run.

    Args:
        prompt: the longest prompt.
        answers: how many answers are written together.
    """
    from ...offload.planning.memory import available_bytes
    from ...tp.matrices import num_parameters
    from .open import engine_in_words

    target, draft = engine.target, engine.draft
    tokens = len(prompt.token_ids)
    capacity = tokens + max_new_tokens
    plan = engine.plan(capacity)
    tiers = [f"target on all {capacity:,} tokens"]
    if plan.budget:
        tiers.insert(0, f"target on {plan.budget:,} chosen tokens")
        kind = "multi-token-prediction head" if draft and draft.config.is_head else "draft"
        drafts = [f"{kind} of {num_parameters(draft.config) / 1e6:,.1f} M parameters"] if draft else []
        drafts += ["lookup in earlier text"] if engine.settings.lookup else []
        if drafts:
            tiers.insert(0, " or ".join(drafts))
    dropped = f" ({prompt.dropped:,} tokens dropped by --truncate)" if prompt.dropped else ""
    available = available_bytes(target.device)
    each = " on each rank" if target.ranks.size > 1 else ""
    wanted = f"up to {max_new_tokens:,} new ones" + (f" for each of {answers:,} answers" if answers > 1 else "")
    rows = {
        "model": engine_in_words(engine, model),
        "prompt": f"{tokens:,} tokens{f' of {source}' if source else ''}{dropped}; {wanted}",
        "tiers": " → ".join(tiers),
        "memory": f"KV cache {gib(plan.kv)} planned{each}, {gib(available)} available",
    }
    if plan.request.taken_by_others > 0.02 * (plan.request.gpu_total_bytes or 0):
        rows["memory"] += f"; other processes have {gib(plan.request.taken_by_others)} of the GPU"
    if plan.disk_kv:
        folder = f" ({engine.contexts.store.root})" if engine.contexts else ""
        rows["memory"] += (
            f"; {gib(plan.disk_kv)} of the KV cache are on disk{folder} and are read in every verification"
        )
    print_rows(console, rows)


def report_context(run: Generation | BatchSequence) -> None:
    """Prints how much prefill a saved context saves a run."""
    saved = run.saved
    if saved and saved.prefix:
        print_note(f"starts from the saved context {saved.prefix.name}: {saved.prefix.tokens:,} tokens need no prefill")


@dataclass(frozen=True)
class StartProgress:
    """Functions that show the progress before the first token. They are called with the finished share, 0 to 1."""

    memory: Callable[[float], None]
    """For allocating host memory."""
    prefill: Callable[[float], None]
    """For the prefill."""


NO_PROGRESS = StartProgress(lambda share: None, lambda share: None)
"""Shows nothing."""


@contextmanager
def start_progress(console: Console, tokens: int) -> Iterator[StartProgress]:
    """Shows the progress as a bar with the time left, or as lines if there is no terminal."""
    names = "taking host memory for the KV cache", f"prefill of {tokens:,} tokens"
    if not console.is_terminal:
        yield StartProgress(*map(progress_lines, names))
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, refresh_per_second=4, transient=True) as progress:
        tasks = [progress.add_task(name, total=1.0, visible=False) for name in names]
        yield StartProgress(*(partial(_update, progress, task) for task in tasks))


def _update(progress: Progress, task: TaskID, share: float) -> None:
    """Shows a bar from its first share to its last."""
    progress.update(task, completed=share, visible=share < 1.0)


def progress_lines(what: str) -> Callable[[float], None]:
    """A function that is called with the finished share, 0 to 1, and prints it in a line from time to time."""
    began = told = time.monotonic()

    def on_progress(share: float) -> None:
        nonlocal told
        now = time.monotonic()
        if 0 < share < 1 and now - told >= SECONDS_BETWEEN_LINES:
            told = now
            left = (now - began) * (1 - share) / share
            print_note(f"{what}: {share:.0%}, about {left:.0f} s left")

    return on_progress


def with_text(stats: dict[str, Any], text: str) -> dict[str, Any]:
    """The JSON with additional data that the engine does not have: the text, and the threads of this process."""
    import torch

    document: dict[str, Any] = {}
    for key, value in stats.items():
        document[key] = value
        if key == "world_size":
            document["threads"] = torch.get_num_threads()
        if key == "token_ids":
            document["text"] = text
    return document


def report_statistics(console: Console, stats: dict[str, Any]) -> None:
    """Prints the JSON of a run in a few lines."""
    tbt, accepted, seconds = stats["tbt_ms"], stats["acceptance"], stats["time_s"]
    read, memory, settings = stats["kv_read"], stats["memory"], stats["settings"]
    endings = {"length": "to the length asked for", "eos": "to the end of the text", "interrupted": "interrupted"}
    endings["stop"] = "to the end of the answer"
    rows = {"written": f"{stats['new_tokens']:,} tokens, {endings[stats['finish_reason']]}; seed {stats['seed']}"}
    if stats["new_tokens"]:
        rows["TTFT"] = f"{stats['ttft_s']:.2f} s for a prompt of {stats['prompt_tokens']:,} tokens"
    if stats["rounds"]:
        times = ", ".join(f"{name} {tbt[name]:.1f}" for name in ("mean", "p50", "p95"))
        rows["TBT"] = f"{times} ms ({stats['tokens_per_s']:.1f} tokens/s)"
        if settings["tiers"] > 1:
            shares = {name: accepted[f"{name}_per_token"] for name in ("draft", "retrieval")}
            tested = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)
            per_round = f"{accepted['tokens_per_round']:.1f} tokens/round over {stats['rounds']:,} rounds"
            if stats["plain_rounds"] > stats["rounds"] / 2:
                per_round += f", {stats['plain_rounds']:,} of them without a draft, as that was faster"
            rows["accepted"] = f"{tested} of tested tokens, {per_round}" if tested else per_round
        total = max(sum(seconds.values()), 1e-9)
        rows["a round"] = ", ".join(f"{name} {part / total:.0%}" for name, part in seconds.items() if part)
        if read["bytes"]:
            rows["KV read"] = f"{read['bytes'] / 1e9:.2f} GB{_at(read['gb_per_s'])}"
        if stats["link"]["bytes_streamed"]:
            rows["link"] = describe_link(stats["link"])
        if stats["disk"]["bytes_read"]:
            rows["disk"] = describe_disk(stats["disk"])
    if stats["new_tokens"]:
        rows["memory"] = f"{describe_memory(memory)}; KV cache {gib(memory['kv_bytes'])}"
    if stats["warnings"]:
        rows["warning"] = "; ".join(stats["warnings"])
    print_rows(console, rows)


def describe_link(link: dict[str, Any]) -> str:
    """Describes the traffic over the link, from the JSON."""
    crossed = f"{link['bytes_streamed'] / 1e9:.2f} GB{_at(link['gb_per_s'])}"
    return f"{crossed}; computation waited {link['waited_s']:.2f} s"


def describe_disk(disk: dict[str, Any]) -> str:
    """Describes the reads from a disk, from the JSON."""
    return f"{disk['bytes_read'] / 1e9:.2f} GB read{_at(disk['gb_per_s'])}; computation waited {disk['waited_s']:.2f} s"


def describe_memory(memory: dict[str, Any]) -> str:
    """Describes the peak memory, from the JSON."""
    device = f", on the device {gib(memory['device_peak_bytes'])}" if memory["device_peak_bytes"] else ""
    return f"peak {gib(memory['host_peak_bytes'])}{device}"


def _at(gb_per_s: float | None) -> str:
    """Describes a speed; empty if it is not known."""
    return "" if gb_per_s is None else f" at {gb_per_s:.1f} GB/s"


def print_rows(console: Console, rows: dict[str, str]) -> None:
    """Prints labels and values. A terminal wraps values beside their labels; a log gets whole lines."""
    from rich.table import Table
    from rich.text import Text

    if console.is_terminal:
        table = Table.grid("", "", padding=(0, 1, 0, 0))
        for label, value in rows.items():
            table.add_row(Text(f"{label:<9}", "dim"), Text(value))
        console.print(table)
        return
    for label, value in rows.items():
        console.print(f"{label:<10}{value}", soft_wrap=True, markup=False)


def report_several(console: Console, document: dict[str, Any], names: Sequence[str]) -> None:
    """Prints the JSON of a batch.

    Args:
        names: the names of its sequences.
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
        rows["together"] = f"{speed}; prefill took {document['prefill_s']:.2f} s"
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
    """A sequence as a row of the table. Cells for stages that it has not reached are `-`."""
    if "error" in one:
        return [str(number), "-", "error", "-", "-", "-", name]
    tbt = f"{one['tbt_ms']['mean']:.1f}" if one.get("rounds") else "-"
    share = one["acceptance"]["retrieval_per_token"] if one.get("rounds") else None
    ttft = f"{one['ttft_s']:.2f}" if one.get("new_tokens") else "-"
    ending = _ENDINGS[one.get("finish_reason", "interrupted")]
    return [str(number), f"{one['new_tokens']:,}", ending, ttft, tbt, "-" if share is None else f"{share:.0%}", name]
