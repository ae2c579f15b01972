"""Finds the files with a model directory's weights. Does not import PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ModelError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LAYOUTS = ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX))
"""Pairs of the name of a single file and the name of the index of shards, in the order in which they are looked for."""

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a GGUF file that is a part of a model."""

GGUF_INDEX = "model.gguf.index.json"
"""A file in the directory of a GGUF model. It says where the GGUF files are, and what they contain (`gguf_model`)."""


def weight_files(directory: Path) -> list[Path]:
    """The files with the weights of a model directory. They are GGUF files, otherwise safetensors, otherwise files in
    PyTorch's format.

    Raises:
        ModelError: there are no weights, or the index cannot be read or names a file that does not exist.
    """
    gguf = gguf_index(directory)
    if gguf is not None:
        files = [Path(file) for file in gguf["files"]]
        gone = [str(file) for file in files if not file.is_file()]
        if gone:
            raise ModelError(f"{gone[0]} no longer exists; give the present path of the GGUF file")
        return files
    for single, index in LAYOUTS:
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return [directory / name for name in _present(directory, index)]
    others = sorted(p.name for p in directory.glob("*") if p.suffix in (".gguf", ".bin", ".safetensors", ".pt", ".pth"))
    hint = f" ({others[0]} is there, but that is not a name under which weights are looked for)" if others else ""
    raise ModelError(
        f"{directory} has no weights: none of {', '.join(name for layout in LAYOUTS for name in layout)}{hint}"
    )


def gguf_index(directory: Path) -> dict[str, Any] | None:
    """The index of a GGUF model's directory: the GGUF files (`files`), and the places of tensors in them (`tensors`).
    `None` for another kind of directory.

    Raises:
        ModelError: the index cannot be read.
    """
    path = directory / GGUF_INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(file, str) for file in index["files"]):
            raise TypeError("files")
        for tensor in index["tensors"].values():
            numbers = tensor["file"], tensor["offset"], tensor["heads"], *tensor["shape"]
            is_whole = all(type(number) is int and number >= 0 for number in numbers)
            if not is_whole or not isinstance(tensor["form"], str) or tensor["file"] >= len(index["files"]):
                raise TypeError("tensors")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); remove its directory, which is then made again") from error
    return index


def shard_names(index: Path) -> list[str]:
    """The files that are listed in an index of shards.

    Raises:
        ModelError: the file cannot be read as an index.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"it names {names or 'no file'}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read as a weight index: {error}") from error
    return names


def _present(directory: Path, index: str) -> list[str]:
    names = shard_names(directory / index)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, named in {index}; download it again")
    return names
