"""Random matrices in four and eight bits, as they are read from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from quantised import FORMATS
from triforce.kernels.quantised import BLOCK_FORMS, BlockMatrix, GroupedMatrix
from triforce.tp.model.quantisation import quantisation_of

Held = TypeVar("Held", GroupedMatrix, BlockMatrix)


class Tensors:
    """A checkpoint with one projection, `it`."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name.removeprefix("it.") in self.tensors

    def stored(self, name: str, *shape: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        tensor = self.tensors[name.removeprefix("it.")]
        assert tuple(tensor.shape) == shape and tensor.dtype in dtypes
        return tensor.clone()


def quantisation(name: str) -> Any:
    return quantisation_of({"quantization_config": FORMATS[name].config}, "config.json")


def matrix_of(name: str, outputs: int = 48, inputs: int = 96, seed: int = 0) -> tuple[GroupedMatrix, torch.Tensor]:
    """A random matrix in one of `FORMATS` as it is read, and its numbers."""
    stored = FORMATS[name].store(np.random.default_rng(seed), outputs, inputs)
    return quantisation(name).read(Tensors(stored.tensors), "it", outputs, inputs), torch.from_numpy(stored.numbers)


def moved(matrix: Held, device: str) -> Held:
    """The same on a device."""
    held = {name: value.to(device) for name, value in vars(matrix).items() if isinstance(value, torch.Tensor)}
    return replace(matrix, **held)


def blocks_of(form: str, outputs: int, inputs: int, seed: int = 0) -> tuple[BlockMatrix, torch.Tensor]:
    """A random matrix in one of `BLOCK_FORMS`, and its numbers."""
    from gguf_blocks import numbers_of, random_blocks  # which skips a test where gguf is not installed

    assert form in BLOCK_FORMS
    blocks = random_blocks(form, outputs, inputs, seed)
    return BlockMatrix(blocks, form), numbers_of(blocks, form)
