"""Weights from safetensors, one file or shards, each tensor read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model directory by name. Use `Checkpoint.open`; every read checks name and shape."""

    def __init__(self, files: dict[str, safe_open], directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._directory = directory
        self._dtype = dtype
        self._device = device

    @classmethod
    @contextmanager
    def open(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Checkpoint]:
        """Opens the weights of `directory`; tensors come out in `dtype` on `device`.

        Raises:
            ModelError: no safetensors weights, or a file that is missing, truncated or not safetensors.
        """
        with ExitStack() as stack:
            files: dict[str, safe_open] = {}
            for path in weight_files(directory):
                try:
                    handle = stack.enter_context(safe_open(str(path), framework="pt"))
                    files.update(dict.fromkeys(handle.keys(), handle))
                except (OSError, SafetensorError) as error:
                    raise ModelError(
                        f"{path} is damaged or is not a safetensors file ({error}); download it again"
                    ) from error
            yield cls(files, directory, dtype, device)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must have `shape`.

        Raises:
            ModelError: it is missing, has another shape, or is not floating point.
        """
        if name not in self._files:
            raise ModelError(f"the weights in {self._directory} lack the tensor {name}")
        try:
            tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{name} in {self._directory} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} in {self._directory} has shape {tuple(tensor.shape)}; its config says {shape}")
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"{name} in {self._directory} is {tensor.dtype}; quantised weights are not supported")
        return tensor.to(device=self._device, dtype=self._dtype)


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
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read as a weight index: {error}") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, named in {INDEX_FILE}; download it again")
    return [directory / name for name in names]
