"""`triforce compare`: its options, the checks before PyTorch is imported, and the measurement up to its results."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...offload.speculation.sampling import Sampling
from ...tp.errors import TriforceError, UsageError
from ..call import Call
from ..measurement import (
    NEW_TOKENS,
    QUESTION_TOKENS,
    REPEAT,
    MeasuringOptions,
    Subject,
    check_sequences,
    check_single_process,
    questions_about,
    subject_of,
    written_after,
)
from ..options import ASK, MEASURING, OUTPUT, PROMPT, SAMPLING, SAMPLING_OPTIONS, TRUNCATE, flag, new_tokens, option
from ..parameters import MINUTES, real, whole, words
from ..terminal.output import JsonFile
from ..terminal.streams import print_note
from .baselines.catalogue import BASELINES, TRIFORCE, Entry

if TYPE_CHECKING:
    from .baselines.protocol import Job
    from .comparison import Row

EPILOG = """[bold]Examples[/]

  This engine against itself without speculation, and against transformers:
  [cyan]triforce compare[/]

  A book, in float32, where greedy texts must be the same:
  [cyan]triforce compare --prompt-file book.txt --dtype float32 --baseline transformers[/]

  The first 8,192 tokens of a book, with every run in a file:
  [cyan]triforce compare --prompt-file book.txt --prompt-tokens 8192 --json runs.json[/]

  Eight questions about a book, answered together:
  [cyan]triforce compare --prompt-file book.txt --batch 8 --baseline transformers --baseline transformers-prefix[/]
"""


DEFAULT_BASELINES = ("autoregressive", "transformers")
"""The baselines that are always installed."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(MeasuringOptions):
    """The options of `triforce compare`."""

    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"System to compare with; may be repeated: {', '.join(BASELINES)}. "
            f"Default: {' and '.join(DEFAULT_BASELINES)}, which are always installed.",
            autocompletion=words(*BASELINES),
            show_default=False,
            rich_help_panel=MEASURING,
        ),
    ] = None
    gpus: int = 1  # no option here: each system runs in one process
    repeat: Annotated[int, REPEAT] = 3
    batch: Annotated[
        int | None,
        option(
            MEASURING,
            whole(1),
            "Number of sequences to decode together. All have the same text; each has its own question (32 tokens from "
            "a different place of the text). Compares the tokens per second of all together. transformers-prefix needs "
            "this option.",
        ),
    ] = None
    time_limit: Annotated[
        float,
        option(
            MEASURING,
            MINUTES,
            "Maximum number of minutes for one system to load, warm up and run once. A system that takes longer is "
            "stopped, and its row says so.",
        ),
    ] = 60
    audit: Annotated[
        bool,
        flag(
            "--audit",
            MEASURING,
            "Compute every token of triforce's answer again, token by token, and report how many agree. For greedy "
            "text, or with --seed.",
        ),
    ] = False
    ask: Annotated[str | None, ASK] = None
    truncate: Annotated[str, TRUNCATE] = "error"
    prompt_tokens: Annotated[
        int | None, option(PROMPT, whole(1), "Use only the first N tokens of the prompt.")
    ] = None  # fmt: skip
    max_new_tokens: Annotated[int, new_tokens(1, NEW_TOKENS)] = 128
    sampling: Annotated[
        Sampling,
        SAMPLING_OPTIONS
        | {
            "temperature": option(
                SAMPLING,
                real("T"),
                "Softmax temperature; 0 is greedy decoding. The greedy texts of all systems can be compared with each "
                "other; when sampling with --seed, only the texts of this engine can be compared.",
            )
        },
    ] = Sampling(temperature=0.0)  # noqa: RUF009 - frozen
    debug: Annotated[
        bool, flag("--debug", OUTPUT, "Show tracebacks of errors, and what failing systems printed.")
    ] = False  # fmt: skip


def compare(options: CompareOptions, call: Call) -> None:
    """Measures this engine and other systems with the same weights, the same prompt and the same sampling.

    Each run is a process of its own, with one warm-up.
    The order of the systems rotates. Only one system is in memory at a time.
    [bold]Ctrl-C[/] stops; the results so far are shown. Exits 1 if there is nothing to compare.
    """
    from ..session.source import read_ask

    chosen = _baselines(options)
    _check_batch(options, chosen)
    others = [entry.name for entry in chosen if entry.module != TRIFORCE.module]
    if options.settings.rope_scaling and others:
        raise UsageError(
            f"--rope-scaling changes the model, but {others[0]} does not get this option; compare with "
            "--baseline autoregressive alone"
        )
    if options.audit and not options.sampling.greedy and options.sampling.seed is None:
        raise UsageError("--audit computes the tokens again, so it needs --seed if --temperature is above 0")
    check_single_process("compare runs each system in a single process, not on several ranks")
    options = replace(options, ask=read_ask(options.ask, print_note))
    if all(entry.missing() for entry in chosen):
        raise TriforceError("; ".join(f"{entry.name} is {entry.missing()}" for entry in chosen))
    with JsonFile.prepare(options.json) as json_file, subject_of(options, call) as subject:
        _measure(options, chosen, subject, json_file, call)


def _baselines(options: CompareOptions) -> list[Entry]:
    """The chosen baselines, without duplicates.

    Raises:
        UsageError: there is no baseline with one of the names.
    """
    names = dict.fromkeys(options.baseline or DEFAULT_BASELINES)
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"--baseline is {name!r}; it is one of {', '.join(BASELINES)}")
    return [BASELINES[name] for name in names]


def _check_batch(options: CompareOptions, chosen: list[Entry]) -> None:
    """Checks the options for several sequences.

    Raises:
        UsageError: an option or a baseline has no meaning with `--batch`, or without it.
    """
    if options.batch is None:
        for entry in chosen:
            if entry.batch_only:
                raise UsageError(
                    f"--baseline {entry.name} is for sequences with the same beginning; give --batch N too"
                )
        return
    check_sequences(options.batch)
    if options.ask is not None:
        raise UsageError("--ask and --batch are both given, but --batch gives each sequence its own question; give one")
    if options.audit:
        raise UsageError("--audit and --batch are both given, but only a single answer can be audited; leave one out")


def _measure(
    options: CompareOptions, baselines: list[Entry], subject: Subject, json_file: JsonFile, call: Call
) -> None:
    """Measures all systems and writes the results.

    Raises:
        TriforceError: the comparison is not possible, or nothing could be compared; then the table is written.
        Stop: this was interrupted; the measurements so far are written.
    """
    from .comparison import Comparison, Row, compare
    from .report import as_document, report

    with tempfile.TemporaryDirectory(prefix="triforce-compare-") as folder:
        job = _job(options, subject, folder)
        comparison = Comparison(job, options.repeat, [Row(entry) for entry in (TRIFORCE, *baselines)])

        def document(interrupted: bool) -> dict[str, Any]:
            return as_document(comparison, call.command, interrupted)

        with written_after(document, json_file, report), call.signals.interruptible():
            compare(
                comparison,
                limit_s=60 * options.time_limit,
                settings=options.settings.given,
                audits=options.audit,
                on_start=lambda number, count, name: print_note(f"{number} of {count}: {name} ..."),
                on_end=lambda row: _report_run(row, options.debug),
            )
    if comparison.error:
        raise TriforceError(comparison.error)
    if not comparison.triforce.runs:
        raise TriforceError(f"there is nothing to compare: triforce failed ({comparison.triforce.failure})")
    if not any(row.runs for row in comparison.rows[1:]):
        raise TriforceError("there is nothing to compare: no baseline ran")


def _job(options: CompareOptions, subject: Subject, folder: str) -> Job:
    """The job for every system.

    Raises:
        TriforceError: the job is not possible.
    """
    import torch

    from ...tp.devices import resolve_device, resolve_dtype
    from .baselines.protocol import Job

    # A CUDA context would take GPU memory from those that are measured, so none is made here.
    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = "cuda" if cuda else resolve_device(options.device).type
    token_ids, questions = _token_ids(options, subject), None
    if options.batch is not None:
        if len(token_ids) <= 2 * QUESTION_TOKENS:
            raise UsageError(
                f"--batch needs a prompt of more than {2 * QUESTION_TOKENS} tokens, but it has {len(token_ids):,}; "
                "give a longer one"
            )
        token_ids = token_ids[:-QUESTION_TOKENS]
        questions = questions_about(token_ids, options.batch)
    return Job(
        system="",
        model=str(subject.target.resolve()),
        draft=str(subject.draft.resolve()) if subject.draft else None,
        given_model=options.model,
        given_draft=options.draft,
        device=device,
        dtype=str(resolve_dtype(options.dtype, subject.config)).removeprefix("torch."),
        prompt_ids=token_ids,
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        threads=options.settings.threads or torch.get_num_threads(),
        questions=questions,
        context=options.context,
        folder=folder,
    )


def _token_ids(options: CompareOptions, subject: Subject) -> list[int]:
    """The prompt, or the first tokens of it that `--prompt-tokens` chooses.

    Raises:
        TriforceError: the prompt does not fit, or is too short.
    """
    from ...offload.checks import check_context
    from ..session.prompt import build_prompt, long_prompt

    wanted, new = options.prompt_tokens, options.max_new_tokens
    source, tokenizer, config = subject.source, subject.tokenizer, subject.config
    if wanted is None:
        return list(build_prompt(source, options.ask, tokenizer, config, new, options.truncate).token_ids)
    if options.ask is not None:
        raise UsageError(
            "--ask and --prompt-tokens are both given, but --prompt-tokens drops the end of the prompt, where the "
            "question is; give one"
        )
    check_context(config, wanted, new)
    prompt = long_prompt(source, tokenizer, config, wanted)
    if prompt.text_tokens < wanted:
        raise UsageError(f"--prompt-tokens is {wanted:,}, but the prompt has {prompt.text_tokens:,} tokens")
    return prompt.token_ids


def _report_run(row: Row, debug: bool) -> None:
    """Prints a line about the run of a system that has just ended. With `debug`, also prints the output of a failed
    run."""
    if row.failure:
        print_note(f"{row.entry.name}: {row.failure}")
        if debug and row.log:
            print_note(row.log)
        return
    last = row.runs[-1]
    print_note(f"{row.entry.name}: TTFT {last.ttft_s:.2f} s, TBT {last.tbt_s * 1e3:.1f} ms")
