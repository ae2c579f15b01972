"""Random matrices in ggml's formats of blocks, and their numbers by gguf-py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="gguf is not installed; the extras test and llama-cpp have it")

FLOATS = {"Q6_K": (208,), "Q5_0": (0,), "Q8_0": (0,), "Q4_0": (0,)}
"""Where blocks hold float16 numbers; of the forms that are not here, at bytes 0 and 2."""

ODD = [float("nan"), float("inf"), float("-inf"), -0.0, 6e-8, -6e-8, 6e-5, 65504.0]


def random_blocks(form: str, outputs: int, inputs: int, seed: int = 0, odd: bool = False) -> torch.Tensor:
    """Rows of blocks, uint8 `[outputs, bytes]`, whose scales are those of weights, or none that a model would have."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    blocks = rng.integers(0, 256, (outputs, inputs // size, num_bytes), dtype=np.uint8)
    for start in FLOATS.get(form, (0, 2)):
        scales = rng.choice(ODD, blocks.shape[:2]) if odd else rng.normal(0, 0.01, blocks.shape[:2])
        blocks[..., start : start + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def numbers_of(blocks: torch.Tensor, form: str) -> torch.Tensor:
    """Those that gguf-py finds, float32 `[outputs, inputs]`."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    with np.errstate(all="ignore"):  # all blocks at once: `gguf.quants.dequantize` takes those of 16 rows at a time
        numbers = getattr(gguf.quants, form).dequantize_blocks(blocks.numpy().reshape(-1, num_bytes))
    return torch.from_numpy(numbers.reshape(len(blocks), -1))
