"""Several sequences over one prefix in llama.cpp, through its batch interface: the common text is read once, its cells
of the KV cache then belong to every sequence, and each step computes one row of each.

`llama_cpp.Llama` has one sequence only, so that contexts are made with the functions below it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp  # pyright: ignore[reportMissingImports]

from .protocol import Job, Timed

BATCH_TOKENS = 512
"""Rows of a call at most, as `llama_cpp.Llama` has it."""

_ALL_LAYERS = 2**31 - 1


class Row(NamedTuple):
    """A token to be computed."""

    token: int
    position: int
    sequence: int
    draws: bool
    """Whether the sequence's next token is drawn after it."""


class Context:
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
        params.kv_unified = True  # else each sequence had its own part of the cache, and a copy of the text
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
        """Gives all memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)

    def clear(self) -> None:
        """Empties the cache."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def share(self, sequences: int) -> None:
        """Has what sequence 0 holds belong to the others, too."""
        for sequence in range(1, sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, 0, -1)

    def compute(self, rows: Sequence[Row], samplers: Sequence[Any], answers: list[list[int]]) -> None:
        """Computes rows, and appends what is drawn after them to the answers of their sequences.

        Raises:
            RuntimeError: llama.cpp cannot.
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


def generate(
    context: Context, samplers: Sequence[Any], text: list[int], questions: list[list[int]], max_new_tokens: int
) -> Timed:
    """`max_new_tokens` tokens after `text` and each of `questions`, drawn by the sampler of each."""
    answers: list[list[int]] = [[] for _ in questions]
    context.clear()
    began = time.perf_counter()
    context.compute([Row(token, position, 0, False) for position, token in enumerate(text)], samplers, answers)
    context.share(len(questions))
    rows = [
        Row(token, len(text) + place, sequence, place == len(question) - 1)
        for sequence, question in enumerate(questions)
        for place, token in enumerate(question)
    ]
    context.compute(rows, samplers, answers)
    first_at = time.perf_counter()
    for step in range(max_new_tokens - 1):
        rows = [
            Row(answer[-1], len(text) + len(question) + step, sequence, True)
            for sequence, (question, answer) in enumerate(zip(questions, answers, strict=True))
        ]
        context.compute(rows, samplers, answers)
    ended = time.perf_counter()
    return Timed([token for answer in answers for token in answer], first_at - began, ended - first_at, len(questions))
