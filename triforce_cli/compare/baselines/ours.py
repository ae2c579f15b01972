"""This engine as a system to compare: speculating (`triforce`), or token by token (`autoregressive`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....offload import Engine, Sampling
from .protocol import Job, Timed


def load(job: Job) -> Ours:
    """Raises:
    TriforceError: see `Engine.load`.
    """
    return Ours(job)


class Ours:
    """An engine and the sampling it is asked for."""

    def __init__(self, job: Job) -> None:
        self._engine = engine = _engine(job)
        self._sampling = _sampling(job)
        tiers = 1 if job.system == "autoregressive" else 3 if engine.draft or engine.settings.lookup else 2
        names = {1: "token by token on the full cache", 2: "two tiers (no draft)", 3: "three tiers"}
        self.ran = f"this engine, {names[tiers]}, {job.place}"

    def generate(self, prompt_ids: list[int], max_new_tokens: int) -> Timed:
        """Raises:
        RuntimeError: the engine reused a part of the prompt from its cache, so the prefill was not measured.
        """
        result = self._engine.generate(prompt_ids, self._sampling, max_new_tokens, ignore_eos=True, reuse=0)
        stats = result.stats
        if stats["reused_tokens"] and not stats["context"]:
            raise RuntimeError(f"{stats['reused_tokens']} tokens of the prompt were in the cache already")
        details = {
            name: stats[name]
            for name in ("settings", "rounds", "acceptance", "time_s", "link", "seed", "reused_tokens")
        }
        return Timed(result.token_ids, stats["ttft_s"], stats["decode_s"], details=details)


def logits(job: Job) -> list[list[float]]:
    """The target's logits, with its full cache, where answers differ.

    `job.options` has `answer`, the tokens after the prompt, and `candidates`, a list of `[index, *tokens]`. In one pass
    over prompt and answer, `tokens` are looked up in the logits from which token `index` of the answer was drawn.
    """
    answer: list[int] = job.options["answer"]
    candidates: list[list[int]] = job.options["candidates"]
    engine = Engine.load(job.model, draft="none", device=job.device, dtype=job.dtype, tiers=1)
    rows = engine.logits(job.prompt_ids, answer[: max(index for index, *_ in candidates)])
    return [[float(rows[index, token]) for token in tokens] for index, *tokens in candidates]


def audit(job: Job) -> list[int]:
    """What decoding token by token draws at each position of an answer, `job.options["answer"]`."""
    engine = _engine(replace(job, system="autoregressive", options=job.options["settings"]))
    return engine.drawn_alone(job.prompt_ids, job.options["answer"], _sampling(job))


def _sampling(job: Job) -> Sampling:
    return Sampling(job.temperature, job.top_p, job.top_k, job.seed)


def _engine(job: Job) -> Engine:
    settings: dict[str, Any] = dict(job.options)
    alone = job.system == "autoregressive"
    if alone:
        settings = {name: value for name, value in settings.items() if name in ("resident", "exact")}
    return Engine.load(
        job.asked_model,
        draft="none" if alone else job.asked_draft,
        device=job.device,
        dtype=job.dtype,
        capacity=len(job.prompt_ids) + job.max_new_tokens,
        context=job.context,
        tiers=1 if alone else 3,
        **settings,
    )
