"""This engine as a system to compare: speculating (`triforce`), or token by token (`autoregressive`)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ....offload import Engine, Request
from ....tp.errors import TriforceError
from .protocol import Job, Timed


def load(job: Job) -> Ours:
    """Raises:
    TriforceError: see `Engine.load`.
    """
    return Ours(job)


class Ours:
    """An engine, and the sampling of its job."""

    def __init__(self, job: Job) -> None:
        self._engine = engine = _engine(job)
        self._sampling, self._together = job.sampling, job.questions is not None
        tiers = 1 if job.system == "autoregressive" else 3 if engine.draft or engine.settings.lookup else 2
        names = {1: "token by token on the full cache", 2: "two tiers (no draft)", 3: "three tiers"}
        together = "all sequences together, " if self._together else ""
        self.ran = f"this engine, {names[tiers]}, {together}{job.conditions}"

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        """Raises:
        TriforceError: a sequence cannot be answered, or not together with others.
        RuntimeError: a part of the prompt was already in the cache, so that its prefill was not measured. Only the
            first sequence is checked, because the others share its prefix.
        """
        requests = [
            Request([*text, *question], self._sampling, max_new_tokens, ignore_eos=True, number=number)
            for number, question in enumerate(questions)
        ]
        began = first_at = time.perf_counter()
        batch = self._engine.batch(requests, reuse=0)
        without_token, tokens, first_tokens = set(range(len(requests))), 0, 0
        for index, event in batch:
            tokens += len(event.tokens)
            if index in without_token:
                without_token.discard(index)
                first_at, first_tokens = time.perf_counter(), tokens
        ended = time.perf_counter()
        for number, one in enumerate(batch.sequences):
            if one.error:
                raise TriforceError(f"sequence {number}: {one.error}" if self._together else one.error)
        stats = batch.stats()
        first = stats["sequences"][0]
        if first["reused_tokens"] and not first["context"]:
            raise RuntimeError(f"{first['reused_tokens']} tokens of the prompt were in the cache already")
        if self._together:
            of_each = ("rounds", "acceptance", "time_s", "link", "reused_tokens")
            details = {name: stats[name] for name in ("settings", "rounds")}
            details |= {name: first[name] for name in ("seed", "reused_tokens")}
            details["sequences"] = [{name: one[name] for name in of_each} for one in stats["sequences"]]
        else:
            names = ("settings", "rounds", "acceptance", "time_s", "link", "seed", "reused_tokens")
            details = {name: first[name] for name in names}
        token_ids = [token for one in batch.sequences for token in one.statistics.token_ids]
        return Timed(token_ids, first_at - began, ended - first_at, first_tokens, details)


def logits(job: Job) -> list[list[float]]:
    """The target's logits, with its full cache, where answers differ.

    `job.options` has `answer`, the tokens after the prompt (of several sequences one answer after another), and
    `candidates`, a list of `[sequence, index, *tokens]`. In one pass over a sequence's prompt and answer, `tokens` are
    looked up in the logits from which token `index` of its answer was drawn.
    """
    answer: list[int] = job.options["answer"]
    candidates: list[list[int]] = job.options["candidates"]
    engine = Engine.load(job.model, draft="none", device=job.device, dtype=job.dtype, tiers=1)
    found: list[list[float]] = [[] for _ in candidates]
    for sequence, prompt in enumerate(job.prompts):
        wanted = [place for place, (of, *_) in enumerate(candidates) if of == sequence]
        if not wanted:
            continue
        start = sequence * job.max_new_tokens
        rows = engine.logits(prompt, answer[start : start + max(candidates[place][1] for place in wanted)])
        for place in wanted:
            _, index, *tokens = candidates[place]
            found[place] = [float(rows[index, token]) for token in tokens]
    return found


def audit(job: Job) -> list[int]:
    """The tokens that decoding token by token draws at each position of an answer, `job.options["answer"]`."""
    engine = _engine(replace(job, system="autoregressive", options=job.options["settings"]))
    return engine.drawn_alone(job.prompt_ids, job.options["answer"], job.sampling)


def _engine(job: Job) -> Engine:
    settings: dict[str, Any] = dict(job.options)
    alone = job.system == "autoregressive"
    if alone:
        settings = {
            name: value
            for name, value in settings.items()
            if name in ("resident", "exact", "pack", "host_memory", "rope_scaling")
        }
    return Engine.load(
        job.given_model,
        draft="none" if alone else job.given_draft,
        device=job.device,
        dtype=job.dtype,
        capacity=job.prompt_tokens + job.max_new_tokens,
        context=job.context,
        **settings | {"tiers": 1 if alone else 3, "threads": None},  # the process has the job's threads
    )
