"""Weights from safetensors, one file or shards, each tensor read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checkpoint:
    """The tensors of a model directory by name; every read checks name, shape and kind.

    Tensors are copied out of the file, which is mapped only while one is read: what is held is the weights, once, and
    replacing the file later changes nothing.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the headers; tensors will come out in `dtype` on `device`.

        Raises:
            ModelError: no safetensors weights, or a file that is missing, truncated or not safetensors.
        """
        self._directory, self._dtype, self._device = directory, dtype, device
        self._paths: dict[str, Path] = {}
        for path in weight_files(directory):
            with _opened(path) as file:
                self._paths.update(dict.fromkeys(file.keys(), path))

    def read(self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor `name`, whose shape must be `shape`, or only those of its `rows` and `columns`.

        Raises:
            ModelError: it is missing, has another shape, or is not in a 16-bit or wider floating-point format.
        """
        if name not in self._paths:
            raise ModelError(f"the weights in {self._directory} lack the tensor {name}")
        with _opened(self._paths[name]) as file:
            part = file.get_slice(name)
            if tuple(part.get_shape()) != shape:
                raise ModelError(
                    f"{name} in {self._directory} has shape {tuple(part.get_shape())}; its config says {shape}"
                )
            every = slice(None)
            tensor = part[rows or every, columns or every] if len(shape) == 2 else part[rows or every]
            if tensor.dtype not in _FORMATS:
                raise ModelError(f"{name} in {self._directory} is {tensor.dtype}; quantised weights are not supported")
            return tensor.to(device=self._device, dtype=self._dtype, copy=True)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is damaged or is not a safetensors file ({error}); download it again") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises:
        ModelError: there are none, or the index is unreadable or names a file that is not there.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(p.name for p in directory.glob("*.bin")) or sorted(p.name for p in directory.glob("*.gguf"))
        hint = f" ({found[0]} is there, but only safetensors weights can be read)" if found else ""
        raise ModelError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read as a weight index: {error}") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, named in {INDEX_FILE}; download it again")
    return [directory / name for name in names]
