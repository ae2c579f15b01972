"""Hugging Face transformers: `generate()`, alone or assisted by the draft, of one sequence or a padded batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ....tp.errors import ModelError
from ....tp.matrices import ModelMatrices, layer_prefix
from ....tp.model.config import ModelConfig
from ....tp.model.families import Experts
from ....tp.model.linear_attention import LinearAttention
from ....tp.weights.checkpoint import Checkpoint
from ....tp.weights.weight_files import gguf_index
from .protocol import Job, Timed


def load(job: Job) -> Transformers:
    return CopiedPrefix(job) if job.system == "transformers-prefix" else Transformers(job)


class Transformers:
    """A model of transformers, and perhaps its assistant, with PyTorch's scaled dot-product attention."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = _load(job.model, job)
        self._assistant = None
        what = "generate()" if job.questions is None else "generate() on a left-padded batch"
        if job.system == "transformers-assisted":
            if job.draft is None:
                raise ValueError("assisted generation needs a draft")
            self._assistant = _load(job.draft, job)
            what = "generate() assisted by the draft, with the library's own lengths"
        self.ran = f"transformers {transformers.__version__}, {what}, SDPA attention, DynamicCache, {job.conditions}"

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        seed(self._job)
        ids, mask = left_padded([[*text, *question] for question in questions], self._job.device)
        options = {"assistant_model": self._assistant} if self._assistant is not None else {}
        return timed_generate(self._model, ids, mask, generation_config(self._job, max_new_tokens), options)


class CopiedPrefix(Transformers):
    """The same for several sequences that begin alike: the common text is read once, and its cache copied for each."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ran = (
            f"transformers {transformers.__version__}, the common text prefilled once and its DynamicCache copied for "
            f"each sequence, generate() on a left-padded batch of the rest, SDPA attention, {job.conditions}"
        )

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        seed(self._job)
        began = time.perf_counter()
        prefix = torch.tensor([text], device=self._job.device)
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(questions))
        ids, mask = left_padded(questions, self._job.device)
        prefixes = prefix.expand(len(questions), -1)
        # `generate` wants whole prompts, and computes what the cache lacks of them.
        ids, mask = torch.cat([prefixes, ids], 1), torch.cat([torch.ones_like(prefixes), mask], 1)
        config, options = generation_config(self._job, max_new_tokens), {"past_key_values": cache}
        return timed_generate(self._model, ids, mask, config, options, began)


def seed(job: Job) -> None:
    """Starts PyTorch's generator from the job's seed, if it has one."""
    if job.sampling.seed is not None:
        torch.manual_seed(job.sampling.seed)


def left_padded(prompts: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both `[len(prompts), n]`: each prompt at the end of its row."""
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (n - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def generation_config(job: Job, max_new_tokens: int) -> transformers.GenerationConfig:
    """The job's sampling, to the full length."""
    samples = not job.sampling.greedy
    filters = job.sampling.filters if samples else {}
    return transformers.GenerationConfig(max_new_tokens=max_new_tokens, do_sample=samples, pad_token_id=0, **filters)


def timed_generate(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    config: transformers.GenerationConfig,
    options: dict[str, Any],
    began: float | None = None,
) -> Timed:
    """Runs `model.generate` and records when tokens are written.

    Args:
        ids, mask: `[sequences, n]`, see `left_padded`.
        began: when the run began, by `time.perf_counter`; `None`: now.
    """
    clock = _Clock()
    began = time.perf_counter() if began is None else began
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, generation_config=config, streamer=clock, **options)
    first_at, first_tokens = clock.times[0]
    return Timed(
        out[:, ids.shape[1] :].flatten().tolist(),
        ttft_s=first_at - began,
        decode_s=clock.times[-1][0] - first_at,
        first_tokens=first_tokens,
        details={"steps": len(clock.times)},
    )


class _Clock(BaseStreamer):
    """Records the time and the number of tokens of each call of `put` after the first, which has the prompt."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._seen_prompt = False

    def put(self, value: Tensor) -> None:
        if self._seen_prompt:
            self.times.append((time.perf_counter(), value.numel()))
        self._seen_prompt = True

    def end(self) -> None:
        pass


def _load(directory: str, job: Job) -> Any:
    transformers.logging.set_verbosity_error()
    config = ModelConfig.load(Path(directory))
    if config.quantisation is not None or gguf_index(Path(directory)) is not None:
        return _load_expanded(Path(directory), config, job)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, job.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    without_defaults(model)
    return model.to(job.device).eval()


def _load_expanded(directory: Path, config: ModelConfig, job: Job) -> Any:
    """Loads a model whose weights are stored in few bits or in a GGUF file, with expanded weights."""
    dtype, read = getattr(torch, job.dtype), {}
    checkpoint = Checkpoint(directory, dtype, torch.device("cpu"))
    matrices = ModelMatrices.of(config)
    of_layers = [
        (layer_prefix(layer), one)
        for layer in range(config.num_layers)
        for matrix in matrices.of_layer(layer)
        for one in matrix.projections
    ]
    ends = [("", one) for matrix in (matrices.embedding, matrices.head) if matrix for one in matrix.projections]
    for prefix, one in (*of_layers, *ends):
        found = one.read(checkpoint, prefix, config.quantisation)
        read[f"{prefix}{one.name}.weight"] = found if isinstance(found, Tensor) else found.expand(dtype)
    read |= {name: checkpoint.read(name, *checkpoint.shape(name)) for name in checkpoint.unread()}
    if config.experts:
        _stack_experts(read, config.experts, config.num_layers)
    if config.linear and config.linear.plain_decay:
        _undo_file_order(read, config.linear)
    if config.float32_norms and not config.zero_centred_norms:  # transformers adds the 1 that they have already
        for name in [name for name in read if name.endswith("norm.weight") and ".linear_attn." not in name]:
            read[name] = (checkpoint.read(name, *checkpoint.shape(name), dtype=torch.float32) - 1.0).to(dtype)
    theirs: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    theirs = theirs.get_text_config()  # of several models
    if hasattr(theirs, "quantization_config"):
        del theirs.quantization_config
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(theirs, dtype=dtype, attn_implementation="sdpa")
    missing, unknown = model.load_state_dict(read, strict=False)
    missing = sorted(set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()))
    if unknown or missing:
        both = ("does not know the weights", unknown), ("needs the weights, which the file lacks,", missing)
        raise ModelError("; ".join(f"transformers {what} {', '.join(names)}" for what, names in both if names))
    model.tie_weights()
    without_defaults(model)
    return model.to(job.device).eval()


def _undo_file_order(read: dict[str, Tensor], linear: LinearAttention) -> None:
    """Converts tensors of GGUF files to those of transformers: neighbouring value heads share a key head, `A_log` is a
    logarithm, and in Qwen3-Next's projections the outputs for a key head are adjacent."""
    together, width, keys = linear.value_heads // linear.key_heads, linear.value_dim, linear.keys
    heads = torch.arange(linear.value_heads)
    heads = heads.view(together, -1).t().flatten() if linear.tiled else heads
    values = (heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    channels = torch.cat((torch.arange(2 * keys), 2 * keys + values))
    rows = {"in_proj_qkv": channels, "conv1d": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    for layer in linear.layers:
        prefix = f"{layer_prefix(layer)}linear_attn."
        for name, order in rows.items():
            if f"{prefix}{name}.weight" in read:
                read[f"{prefix}{name}.weight"] = read[f"{prefix}{name}.weight"][order]
        read[f"{prefix}out_proj.weight"] = read[f"{prefix}out_proj.weight"][:, values]
        read[f"{prefix}dt_bias"] = read[f"{prefix}dt_bias"][heads]
        read[f"{prefix}A_log"] = (-read[f"{prefix}A_log"][heads]).log()
        if linear.names.joint_decay and not linear.names.joint_gate:
            qkv, z = (read.pop(f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z"))
            parts = (*qkv.split((keys, keys, linear.values)), z)
            by_key_head = torch.cat([part.unflatten(0, (linear.key_heads, -1)) for part in parts], dim=1)
            read[f"{prefix}in_proj_qkvz.weight"] = by_key_head.flatten(0, 1)


def _stack_experts(read: dict[str, Tensor], experts: Experts, num_layers: int) -> None:
    """Joins the weights of experts, which have their names in files, to the tensors of transformers' modules, which
    have all experts of a layer in one tensor."""
    names = experts.names
    for prefix in map(layer_prefix, range(num_layers)):
        gates, ups, downs = (
            [read.pop(f"{prefix}{name.format(i)}.weight") for i in range(experts.count)]
            for name in (names.gate, names.up, names.down)
        )
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        read[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(both)
        read[f"{prefix}mlp.experts.down_proj"] = torch.stack(downs)
        read[f"{prefix}mlp.gate.weight"] = read.pop(f"{prefix}{names.router}.weight")


def without_defaults(model: Any) -> None:
    """Removes the checkpoint's own generation settings (an end-of-sequence token, sampling). Otherwise, `generate`
    would use them for settings that a job leaves out."""
    model.generation_config = transformers.GenerationConfig()
