"""llama.cpp through llama-cpp-python, on a GGUF file written from the same weights.

Everything between token ids in and token ids out is llama.cpp's own, its sampling too, in the order of the others'.
It imports no PyTorch but to write the file, in another process, so that its memory is its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]

from . import llama_cpp_sequences
from .protocol import Job, Timed

_KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Numbers of ggml's types (`ggml.h`); the binding does not name all of them."""

TRIAL_TOKENS = 8192
"""Of a long prompt, what flash attention is tried on: one way may take several times as long as the other."""


def prepare(job: Job) -> str:
    """Writes the file that `load` reads, and returns its path.

    Raises:
        ModelError: see `write_gguf`.
    """
    from ....tp.weights.gguf_file import write_gguf

    path = _path(job)
    write_gguf(Path(job.model), path, job.dtype)
    return str(path)


def load(job: Job) -> LlamaCpp:
    return LlamaCpp(job) if job.questions is None else LlamaCppSequences(job)


class LlamaCpp:
    """A model in llama.cpp, with flash attention off or on: whichever is faster after at most `TRIAL_TOKENS` of the
    prompt, by the time that the job would take at that speed."""

    kv_cache = "KV cache"
    """What `ran` calls it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model: Any = None
        self.ran = "not tried yet"

    def generate(self, prompt_ids: list[int], max_new_tokens: int) -> Timed:
        if self._model is None:
            self._choose(prompt_ids[:TRIAL_TOKENS], max_new_tokens)
        return self._run(prompt_ids, max_new_tokens)

    def _run(self, prompt_ids: list[int], max_new_tokens: int) -> Timed:
        return _generate(self._model, self._job, prompt_ids, max_new_tokens)

    def _choose(self, prompt_ids: list[int], max_new_tokens: int) -> None:
        job, seconds = self._job, dict[bool, float]()
        for flash in (False, True):
            self._model = self._opened(flash)
            run = self._run(prompt_ids, max_new_tokens)
            seconds[flash] = run.ttft_s * len(job.prompt_ids) / len(prompt_ids)
            seconds[flash] += run.decode_s / max(1, max_new_tokens - 1) * (job.max_new_tokens - 1)
        flash = seconds[True] < seconds[False]
        if not flash:
            self._model = self._opened(flash)
        self.ran = (
            f"llama.cpp through llama-cpp-python {llama_cpp.__version__}, weights (GGUF) and {self.kv_cache} in one "
            f"format, flash attention {'on' if flash else 'off'}, the faster of both at {len(prompt_ids):,} tokens, "
            f"{job.place}"
        )

    def _opened(self, flash: bool) -> Any:
        if self._model is not None:
            self._model.close()
        job = self._job
        return llama_cpp.Llama(
            str(_path(job)),
            n_ctx=len(job.prompt_ids) + job.max_new_tokens,
            n_threads=job.threads,
            n_threads_batch=job.threads,
            n_gpu_layers=-1 if job.device == "cuda" else 0,
            flash_attn=flash,
            type_k=_KV_TYPES[job.dtype],
            type_v=_KV_TYPES[job.dtype],
            verbose=False,
        )


class LlamaCppSequences(LlamaCpp):
    """The same for several sequences that begin alike."""

    kv_cache = "one KV cache of all sequences, the common text in it once,"

    def generate_batch(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        self._questions = questions
        return self.generate(text, max_new_tokens)

    def _run(self, prompt_ids: list[int], max_new_tokens: int) -> Timed:
        samplers = [_sampler(self._job, sequence) for sequence in range(len(self._questions))]
        try:
            return llama_cpp_sequences.generate(self._model, samplers, prompt_ids, self._questions, max_new_tokens)
        finally:
            for sampler in samplers:
                llama_cpp.llama_sampler_free(sampler)

    def _opened(self, flash: bool) -> llama_cpp_sequences.Context:
        if self._model is not None:
            self._model.close()
        return llama_cpp_sequences.Context(_path(self._job), self._job, _KV_TYPES[self._job.dtype], flash)


def _generate(model: Any, job: Job, prompt_ids: list[int], max_new_tokens: int) -> Timed:
    model.reset()
    sampler = _sampler(job)
    began = time.perf_counter()
    model.eval(prompt_ids)
    tokens = [llama_cpp.llama_sampler_sample(sampler, model.ctx, -1)]
    first_at = time.perf_counter()
    while len(tokens) < max_new_tokens:
        model.eval(tokens[-1:])
        tokens.append(llama_cpp.llama_sampler_sample(sampler, model.ctx, -1))
    ended = time.perf_counter()
    llama_cpp.llama_sampler_free(sampler)
    return Timed(tokens, first_at - began, ended - first_at)


def _sampler(job: Job, sequence: int = 0) -> Any:
    """Temperature, top-k, top-p, min-p, then a draw (each sequence with its own numbers); or the largest logit."""
    chain: Any = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    parts: list[Any] = [llama_cpp.llama_sampler_init_greedy()]
    sampling = job.sampling
    if not sampling.greedy:
        parts = [
            llama_cpp.llama_sampler_init_temp(sampling.temperature),
            *([llama_cpp.llama_sampler_init_top_k(sampling.top_k)] if sampling.top_k else []),
            llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
            llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
            llama_cpp.llama_sampler_init_dist(((sampling.seed or 0) + sequence) % 2**32),
        ]
    for part in parts:
        llama_cpp.llama_sampler_chain_add(chain, part)
    return chain


def _path(job: Job) -> Path:
    return Path(job.folder) / "model.gguf"
