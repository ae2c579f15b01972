"""llama.cpp through llama-cpp-python, on the model's GGUF file, or one written from the same weights.

Everything between token ids in and token ids out is llama.cpp's own, its sampling too, in the order of the other
systems. PyTorch is imported only to write the file, in another process, so that it does not count in this one's memory.

Several sequences over one text go through llama.cpp's batch interface: the text is read once, its cells of the KV cache
then belong to every sequence, and each step computes one row of each. `llama_cpp.Llama` has one sequence only, so that
the functions below it are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp  # pyright: ignore[reportMissingImports]

from ....tp.weights.weight_files import gguf_index
from .protocol import Job, Timed

_KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Numbers of ggml's types (`ggml.h`); the binding does not name all of them."""

BATCH_TOKENS = 512
"""Maximum number of rows of a call, as in `llama_cpp.Llama`."""

_ALL_LAYERS = 2**31 - 1

TRIAL_TOKENS = 8192
"""Maximum number of the prompt's tokens that flash attention is tried with: one way may take several times as long as
the other."""


def prepare(job: Job) -> str:
    """Writes the file that `load` reads, unless the model is such a file, and returns its path.

    Raises:
        ModelError: see `write_gguf`.
    """
    from ....tp.weights.gguf_file import write_gguf

    path = _path(job)
    if not path.is_file():
        write_gguf(Path(job.model), path, job.dtype)
    return str(path)


def load(job: Job) -> LlamaCpp:
    return LlamaCpp(job) if job.questions is None else LlamaCppSequences(job)


class LlamaCpp:
    """A model in llama.cpp, with flash attention off or on: whichever is faster after at most `TRIAL_TOKENS` of the
    prompt, by the time that the job would take at that speed."""

    kv_cache = "KV cache"
    """The name of the cache in `ran`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model: Any = None
        self.ran = "not tried yet"

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        if self._model is None:
            self._choose(text[:TRIAL_TOKENS], questions, max_new_tokens)
        return self._run(text, questions, max_new_tokens)

    def _run(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        return _generate(self._model, self._job, [*text, *questions[0]], max_new_tokens)

    def _choose(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> None:
        """Loads the model with flash attention on or off, whichever is faster."""
        job, seconds = self._job, dict[bool, float]()
        for flash in (False, True):
            self._model = self._opened(flash)
            run = self._run(text, questions, max_new_tokens)
            seconds[flash] = run.ttft_s * len(job.prompt_ids) / len(text)
            seconds[flash] += run.decode_s / max(1, max_new_tokens - 1) * (job.max_new_tokens - 1)
        flash = seconds[True] < seconds[False]
        if not flash:
            self._model = self._opened(flash)
        self.ran = (
            f"llama.cpp through llama-cpp-python {llama_cpp.__version__}, {self._weights} flash attention "
            f"{'on' if flash else 'off'}, the faster of both at {len(text):,} tokens, {job.conditions}"
        )

    @property
    def _weights(self) -> str:
        index = gguf_index(Path(self._job.model))
        if index is None:
            return f"weights (GGUF) and {self.kv_cache} in one format,"
        dense = all(tensor["form"] in ("F32", "F16", "BF16") for tensor in index["tensors"].values())
        rounded = "" if dense else ", activations rounded to 8 bits in products with quantised weights"
        return f"the same GGUF file{rounded}, {self.kv_cache} in {self._job.dtype},"

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

    def _run(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        samplers = [_sampler(self._job, sequence) for sequence in range(len(questions))]
        try:
            return self._model.generate(samplers, text, questions, max_new_tokens)
        finally:
            for sampler in samplers:
                llama_cpp.llama_sampler_free(sampler)

    def _opened(self, flash: bool) -> SequencesContext:
        if self._model is not None:
            self._model.close()
        return SequencesContext(_path(self._job), self._job, _KV_TYPES[self._job.dtype], flash)


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


class Row(NamedTuple):
    """A token to be computed."""

    token: int
    position: int
    sequence: int
    draws: bool
    """Whether the sequence's next token is drawn after it."""


class SequencesContext:
    """A model in llama.cpp, and a KV cache that has room for all sequences of a job."""

    def __init__(self, path: Path, job: Job, kv_type: int, flash: bool) -> None:
        """Args:
            path: of the GGUF file.
            kv_type: a number of ggml's types.
            flash: whether it uses flash attention.

        Raises:
            RuntimeError: llama.cpp cannot load the model, or has no memory for the cache.
        """
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = _ALL_LAYERS if job.device == "cuda" else 0
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        own = sum(len(question) + job.max_new_tokens for question in job.questions or [[]])
        params.n_ctx = len(job.prompt_ids) + own
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = job.sequences
        params.kv_unified = True  # otherwise each sequence has its own part of the cache, and a copy of the text
        params.n_threads = params.n_threads_batch = job.threads
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = kv_type
        self._ctx: Any = llama_cpp.llama_init_from_model(self._model, params)
        if not self._ctx:
            llama_cpp.llama_model_free(self._model)
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx:,} tokens")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        """Frees all memory."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)

    def generate(
        self, samplers: Sequence[Any], text: list[int], questions: list[list[int]], max_new_tokens: int
    ) -> Timed:
        """Generates `max_new_tokens` tokens after `text` and each of `questions`, drawn with the sampler of each."""
        answers: list[list[int]] = [[] for _ in questions]
        llama_cpp.llama_memory_clear(self._memory, True)
        began = time.perf_counter()
        self._compute([Row(token, position, 0, False) for position, token in enumerate(text)], samplers, answers)
        for sequence in range(1, len(questions)):  # what sequence 0 holds belongs to the others, too
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, 0, -1)
        rows = [
            Row(token, len(text) + place, sequence, place == len(question) - 1)
            for sequence, question in enumerate(questions)
            for place, token in enumerate(question)
        ]
        self._compute(rows, samplers, answers)
        first_at = time.perf_counter()
        for step in range(max_new_tokens - 1):
            rows = [
                Row(answer[-1], len(text) + len(question) + step, sequence, True)
                for sequence, (question, answer) in enumerate(zip(questions, answers, strict=True))
            ]
            self._compute(rows, samplers, answers)
        ended = time.perf_counter()
        return Timed(
            [token for answer in answers for token in answer], first_at - began, ended - first_at, len(questions)
        )

    def _compute(self, rows: Sequence[Row], samplers: Sequence[Any], answers: list[list[int]]) -> None:
        """Computes rows, and appends the tokens drawn after them to the answers of their sequences.

        Raises:
            RuntimeError: llama.cpp cannot compute them.
        """
        batch = self._batch
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, row in enumerate(part):
                batch.token[i], batch.pos[i] = row.token, row.position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row.sequence
                batch.logits[i] = row.draws
            code = llama_cpp.llama_decode(self._ctx, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            for i, row in enumerate(part):
                if row.draws:
                    token = llama_cpp.llama_sampler_sample(samplers[row.sequence], self._ctx, i)
                    answers[row.sequence].append(token)


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
    gguf = gguf_index(Path(job.model))
    return Path(gguf["files"][0]) if gguf else Path(job.folder) / "model.gguf"
