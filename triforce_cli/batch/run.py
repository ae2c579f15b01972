"""One run of `triforce batch`: from the lines of a file to their answers, messages about them, and the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from ...offload import Engine
from ...tp.errors import TriforceError
from ...tp.parallel.place import Place
from ...tp.units import gib
from ...tp.weights.tokenizer import Tokenizer
from ..session.open import engine_in_words, load_engine, open_pair, stderr_console
from ..session.report import describe_link, describe_memory, print_rows
from ..session.wire import BodyError, request_from_body
from ..terminal.live import LiveDisplay
from ..terminal.output import JsonFile
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import print_note
from .lines import RequestLine
from .options import BatchOptions
from .requests_file import RequestsFile
from .runner import BatchItem, Runner
from .totals import Totals, malformed_line, refused_line


def run(
    options: BatchOptions,
    requests: RequestsFile,
    directories: tuple[Path, Path | None] | None,
    json_file: JsonFile,
    signals: Signals,
) -> None:
    """Answers the requests that have no answer yet.

    Args:
        directories: those of target and draft; `None` if there is nothing to answer.

    Raises:
        TriforceError: the model cannot be loaded, or cannot continue; complete answers are written.
        Stop: the run was interrupted; complete answers are written.
        typer.Exit: a request got no answer.
    """
    console = stderr_console()
    totals = Totals(requests, print_note)
    for line in requests.malformed:
        totals.fail(line, line.error or "")
    items, refused = _checked(options, requests, totals)
    loaded: tuple[Tokenizer, Engine] | None = None
    ended: BaseException | None = None
    if directories is not None and (items or _with_other_ranks()):
        with signals.interruptible():
            _, tokenizer = open_pair(directories, options.template_args, options.settings.rope_scaling)
            loaded = tokenizer, load_engine(options, None)
        _print_start(loaded[1], options, requests, len(items))
    with requests.answers as file:
        for line in requests.malformed:
            file.add(malformed_line(requests, line))
        for line, error in refused:
            file.add(refused_line(line, error))
        if loaded and items:
            tokenizer, engine = loaded
            ended = _answer(options, engine, Runner(engine, tokenizer, file, totals, signals, options), items, console)
    document = totals.document(torch.get_num_threads())
    try:
        json_file.write(document)
    except (TriforceError, Stop) as error:
        ended = ended or error
    _report(console, document)
    if ended is not None:
        raise ended
    if loaded:
        loaded[1].finish()
        loaded[1].close()
    if totals.failures:
        raise typer.Exit(1)


def _checked(
    options: BatchOptions, requests: RequestsFile, totals: Totals
) -> tuple[list[BatchItem], list[tuple[RequestLine, BodyError]]]:
    """The requests to be answered, and those that cannot be answered, with the errors."""
    models = {options.model, Path(options.model).name}
    items, refused = [], []
    for line in requests.wanted:
        try:
            items.append(BatchItem(line, request_from_body(line.body, line.endpoint, options, models)))
        except BodyError as error:
            refused.append((line, error))
            totals.fail(line, str(error))
    return items, refused


def _with_other_ranks() -> bool:
    """Whether other ranks wait for this rank. Then it must load the model in any case."""
    place = Place.from_environment()
    return place is not None and place.size > 1


def _print_start(engine: Engine, options: BatchOptions, requests: RequestsFile, wanted: int) -> None:
    print_note(engine_in_words(engine, options.model))
    before = f"; {requests.skipped:,} have an answer already" if requests.skipped else ""
    print_note(f"{wanted:,} requests of {requests.name}, up to {options.max_sequences:,} answers at a time{before}")


def _answer(
    options: BatchOptions, engine: Engine, runner: Runner, items: Sequence[BatchItem], console: Console
) -> BaseException | None:
    """Answers all requests. Returns the error or interrupt that ended the run, if there was one."""
    later: list[str] = []  # lines that a live display would draw over
    display = None
    if options.live and LiveDisplay.possible(console):
        title = f"triforce · {Path(options.model).name} · {len(items):,} requests · {engine.target.device.type}"
        device, others = engine.target.device, runner.others
        display = LiveDisplay(console, title, runner.rows, runner.lengths, device=device, others=others)
        runner.totals.note = later.append
    try:
        with display or nullcontext():
            runner.run(items, display)
    except (Stop, Exception) as error:
        return error
    finally:
        for line in later:
            print_note(line)
    return None


def _report(console: Console, document: dict[str, Any]) -> None:
    """Prints the JSON in a few lines."""
    counts = document["requests"]
    names = ("skipped", "failed", "interrupted")
    others = "".join(f", {counts[name]:,} {name}" for name in names if counts[name])
    rows = {"answered": f"{counts['answered']:,} of {counts['total']:,} requests{others}; see {document['output']}"}
    if document["new_tokens"]:
        speed = f"{document['tokens_per_s']:.1f} tokens/s, prefill included"
        rows["written"] = f"{document['new_tokens']:,} tokens in {document['total_s']:.1f} s ({speed})"
        read = document["prompt_tokens"] - document["reused_tokens"]
        rows["prompts"] = f"{document['prompt_tokens']:,} tokens; {read:,} of them needed a prefill"
        if document["link"]["bytes_streamed"]:
            rows["link"] = describe_link(document["link"])
        if document["memory"]:
            memory = document["memory"]
            rows["memory"] = f"{describe_memory(memory)}; KV cache {gib(memory['kv_bytes'])}"
    if document["warnings"]:
        rows["warning"] = "; ".join(document["warnings"])
    print_rows(console, rows)
