"""One run of `triforce compare`: from checked options to the job, the measurements, the table and the JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ...offload.checks import check_context
from ...offload.speculation.vocabulary import check_pair
from ...tp.devices import device_name, resolve_device, resolve_dtype
from ...tp.errors import TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..bench.measure import questions_about
from ..bench.request import QUESTION_TOKENS
from ..call import Call
from ..measurement import publish
from ..session.prompt import build_prompt, saved_text
from ..session.source import Source
from ..terminal.output import JsonFile
from ..terminal.streams import tell
from .baselines.catalogue import Entry
from .baselines.protocol import Job
from .comparison import Row, compare
from .report import as_document, report
from .request import Asked


def run(
    asked: Asked,
    baselines: Sequence[Entry],
    source: Source,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    call: Call,
) -> None:
    """Measures and reports. `directories` are the target's and the draft's.

    Raises:
        TriforceError: the request cannot be met, or nothing could be compared; the table is out then.
        Stop: it was interrupted; what was measured is out.
    """
    with tempfile.TemporaryDirectory(prefix="triforce-compare-") as folder:
        job = make_job(asked, source, directories, folder)
        with call.signals.allowed():
            comparison = compare(
                job,
                baselines,
                repeats=asked.repeat,
                limit_s=60 * asked.time_limit,
                settings=asked.settings.given,
                audits=asked.audit,
                on_start=lambda number, count, name: tell(f"{number} of {count}: {name} ..."),
                on_end=lambda row: _tell_of(row, asked.debug),
            )
    name = device_name(torch.device(job.device))
    publish(as_document(comparison, name, call.command), json_file, report)
    if comparison.interrupted:
        raise comparison.interrupted
    if comparison.wrong:
        raise TriforceError(comparison.wrong)
    if not comparison.possible:
        raise TriforceError(
            "there is nothing to compare: "
            + ("no baseline ran" if comparison.triforce.runs else f"triforce failed ({comparison.triforce.failure})")
        )


def make_job(asked: Asked, source: Source, directories: tuple[Path, Path | None], folder: str) -> Job:
    """The job of every system.

    Raises:
        TriforceError: it cannot be met.
    """
    target, draft = directories
    if asked.audit and not asked.sampling.greedy and asked.sampling.seed is None:
        raise UsageError("--audit computes the tokens again, which needs --seed where --temperature is above 0")
    config = check_pair(target, draft)
    # A CUDA context would take GPU memory from those that are measured, so none is made here.
    cuda = torch.cuda.is_available() and asked.device != "cpu"
    device = "cuda" if cuda else resolve_device(asked.device).type
    token_ids, questions = _token_ids(asked, source, Tokenizer.load(target), config), None
    if asked.batch is not None:
        if len(token_ids) <= 2 * QUESTION_TOKENS:
            raise UsageError(
                f"--batch ends the prompt with a question of {QUESTION_TOKENS} tokens about it, but it has "
                f"{len(token_ids):,} tokens; give a longer one"
            )
        token_ids = token_ids[:-QUESTION_TOKENS]
        questions = questions_about(token_ids, asked.batch)
    return Job(
        system="",
        model=str(target.resolve()),
        draft=str(draft.resolve()) if draft else None,
        asked_model=asked.model,
        asked_draft=asked.draft,
        device=device,
        dtype=str(resolve_dtype(asked.dtype, config)).removeprefix("torch."),
        prompt_ids=token_ids,
        max_new_tokens=asked.max_new_tokens,
        sampling=asked.sampling,
        threads=asked.settings.threads or torch.get_num_threads(),
        questions=questions,
        context=asked.context,
        folder=folder,
    )


def _token_ids(asked: Asked, source: Source, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """The prompt, or as many of its first tokens as were asked for."""
    wanted, new = asked.prompt_tokens, asked.max_new_tokens
    if wanted is None:
        return build_prompt(source, asked.ask, tokenizer, config, new, asked.truncate).token_ids
    if asked.ask is not None:
        raise UsageError("--ask and --prompt-tokens are both given, but the question stands at the end; give one")
    check_context(config, wanted, new)
    if source.context is not None:
        token_ids, _ = saved_text(source.context, config)
    else:
        token_ids = build_prompt(source, None, tokenizer, config, new, "tail").token_ids
    if len(token_ids) < wanted:
        raise UsageError(f"--prompt-tokens is {wanted:,}, but the prompt has {len(token_ids):,} tokens")
    return token_ids[:wanted]


def _tell_of(row: Row, debug: bool) -> None:
    """A line for people about what just ended."""
    if row.failure:
        tell(f"{row.entry.name}: {row.failure}")
        if debug and row.log:
            tell(row.log)
        return
    last = row.runs[-1]
    tell(f"{row.entry.name}: TTFT {last.ttft_s:.2f} s, TBT {last.tbt_s * 1e3:.1f} ms")
