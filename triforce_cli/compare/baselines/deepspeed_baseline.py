"""DeepSpeed's ZeRO-3 inference with parameters offloaded to host memory, through transformers' `generate()`.

On a GPU, the KV cache is offloaded too, by transformers' own offloaded cache. With current transformers, this is
equivalent to the KV offload of ZeRO-Inference. `ran` says which of this was done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from ....tp.errors import ModelError
from ....tp.model.config import ModelConfig
from ....tp.weights.weight_files import gguf_index
from .protocol import Job, Timed


def load(job: Job) -> DeepSpeed:
    return DeepSpeed(job)


class DeepSpeed:
    """A model of transformers whose parameters DeepSpeed fetches layer by layer, on one rank."""

    def __init__(self, job: Job) -> None:
        _set_single_rank(job)
        import deepspeed  # pyright: ignore[reportMissingImports]
        import torch
        import transformers
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        from .transformers_baseline import without_defaults

        directory = Path(job.model)
        if ModelConfig.load(directory).quantisation is not None or gguf_index(directory) is not None:
            raise ModelError(
                f"{job.given_model} has quantised weights or is a GGUF file; DeepSpeed is not measured with these"
            )
        transformers.logging.set_verbosity_error()
        cuda = job.device == "cuda"
        backend = "nccl" if cuda else "gloo"
        store = Path(job.folder, "deepspeed-store")
        store.unlink(missing_ok=True)
        deepspeed.init_distributed(
            backend, auto_mpi_discovery=False, verbose=False, init_method=f"file://{store}", rank=0, world_size=1
        )
        config = _config(job)
        self._zero = HfDeepSpeedConfig(config)  # transformers loads into ZeRO-3's partitions while this is alive
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            job.model,
            dtype=getattr(torch, job.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
        )
        without_defaults(model)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        self._job, self._model = job, cast(Any, engine.module)
        self._model.eval()
        cache = "offloaded KV cache" if cuda else "DynamicCache"
        calls = "generate()" if job.questions is None else "generate() on a left-padded batch"
        self.ran = (
            f"DeepSpeed {deepspeed.__version__}, ZeRO stage 3 inference, parameters offloaded to host memory, "
            f"{backend}, one rank; transformers {transformers.__version__}, {calls}, SDPA attention, {cache}, "
            f"{job.conditions}"
        )

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        from .transformers_baseline import generation_config, left_padded, seed, timed_generate

        job = self._job
        seed(job)
        config = generation_config(job, max_new_tokens)
        if job.device == "cuda":
            config.cache_implementation = "offloaded"
        prompts = [[*text, *question] for question in questions]
        return timed_generate(self._model, *left_padded(prompts, job.device), config, {})


def _set_single_rank(job: Job) -> None:
    """Sets the environment variables that DeepSpeed's launcher sets for one rank; they are read when it is imported."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})  # read, but the store is a file
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"


def _config(job: Job) -> dict[str, Any]:
    return {
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "fp16": {"enabled": job.dtype == "float16"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": job.device == "cuda"}},
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 1,
        "steps_per_print": 10**9,
    }
