"""Hugging Face transformers: `generate()`, alone or assisted by the draft."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .protocol import Job, Timed


def load(job: Job) -> Transformers:
    return Transformers(job)


class Transformers:
    """A model of transformers, and perhaps its assistant, with PyTorch's scaled dot-product attention."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = _load(job.model, job)
        self._assistant = None
        what = "generate()"
        if job.system == "transformers-assisted":
            if job.draft is None:
                raise ValueError("assisted generation needs a draft")
            self._assistant = _load(job.draft, job)
            what = "generate() assisted by the draft, with the library's own lengths"
        self.ran = f"transformers {transformers.__version__}, {what}, SDPA attention, DynamicCache, {job.place}"

    def generate(self, prompt_ids: list[int], max_new_tokens: int) -> Timed:
        if self._job.seed is not None:
            torch.manual_seed(self._job.seed)
        ids = torch.tensor([prompt_ids], device=self._job.device)
        options = {"assistant_model": self._assistant} if self._assistant is not None else {}
        return timed_generate(self._model, ids, generation_config(self._job, max_new_tokens), options)


def generation_config(job: Job, max_new_tokens: int) -> transformers.GenerationConfig:
    """The job's sampling, to the full length."""
    filters = {} if job.greedy else {"temperature": job.temperature, "top_p": job.top_p, "top_k": job.top_k}
    return transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=not job.greedy, pad_token_id=0, **filters
    )


def timed_generate(model: Any, ids: Tensor, config: transformers.GenerationConfig, options: dict[str, Any]) -> Timed:
    """Runs `model.generate` on `ids` `[1, n]` and notes when tokens come."""
    clock = _Clock()
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **options
        )
    first_at, first_tokens = clock.arrivals[0]
    return Timed(
        out[0, ids.shape[1] :].tolist(),
        ttft_s=first_at - began,
        decode_s=clock.arrivals[-1][0] - first_at,
        first_tokens=first_tokens,
        details={"steps": len(clock.arrivals)},
    )


class _Clock(BaseStreamer):
    """Notes the time and the number of tokens of each arrival after the prompt, which `generate` puts first."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._seen_prompt = False

    def put(self, value: Tensor) -> None:
        if self._seen_prompt:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._seen_prompt = True

    def end(self) -> None:
        pass


def _load(directory: str, job: Job) -> Any:
    transformers.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, job.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    without_defaults(model)
    return model.to(job.device).eval()


def without_defaults(model: Any) -> None:
    """Removes the checkpoint's own generation settings (an end-of-sequence token, sampling), which `generate` would use
    for what a job leaves out."""
    model.generation_config = transformers.GenerationConfig()
