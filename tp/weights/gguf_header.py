"""Reads the header of a GGUF file: keys and values, and the places of tensors. The format: ggml's docs/gguf.md.

The package `gguf` reads it too, but takes nine seconds for a vocabulary of 151,000 tokens, and for a hostile file as
long as the file demands. Here, nothing is read beyond the end of the file, and a header may list a limited number of
items.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.quantised import BLOCK_SIZES
from ..errors import ModelError

DENSE_FORMS = {"F32": 4, "F16": 2, "BF16": 2}
"""Formats without blocks, and the number of bytes of a number."""

_FORMS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"}
_FORMS |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_FORMS |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_FORMS |= {29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
"""The names of ggml's types. Those that are not supported are needed for messages."""

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MOST_TENSORS, _MOST_KEYS, _MOST_TEXTS = 2**16, 2**12, 2**20
"""The maximum numbers of tensors, of keys, and of texts of a key that a header may list."""


@dataclass(frozen=True)
class GgufTensor:
    """The place and the format of a tensor."""

    name: str
    form: str
    """One of `DENSE_FORMS` or `BLOCK_SIZES`."""
    shape: tuple[int, ...]
    """In PyTorch's order: numbers along the last dimension are adjacent."""
    offset: int
    """The offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        return form_bytes(self.form, self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file."""

    metadata: dict[str, Any]
    """Values by key: numbers, booleans, texts, and arrays. An array of texts is a list; an array of numbers or booleans
    is a numpy array."""
    tensors: list[GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Reads the header of a file.

        Raises:
            ModelError: the file is not a GGUF file, is truncated or damaged, or has a tensor in an unsupported format.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(content, path).header()
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error


def form_bytes(form: str, shape: tuple[int, ...]) -> int:
    """The size in bytes of a tensor whose last dimension consists of whole blocks."""
    if form in DENSE_FORMS:
        return prod(shape) * DENSE_FORMS[form]
    return prod(shape) // BLOCK_SIZES[form][0] * BLOCK_SIZES[form][1]


class _Reader:
    """Reads a header once, from its beginning to its end."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content, self._path, self._at = content, path, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            raise ModelError(f"{self._path} has version {version} of GGUF; versions 2 and 3 are read (little endian)")
        num_tensors, num_keys = self._number("<u8"), self._number("<u8")
        self._allow(num_tensors, _MOST_TENSORS, "tensors")
        self._allow(num_keys, _MOST_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise ModelError(f"{self._path} is damaged: it has the key {key[:80]!r} twice")
            metadata[key] = self._value(self._number("<u4"), nested=False)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise ModelError(
                f"{self._path} has general.alignment {alignment!r}; it must be a power of two, at most 2^20"
            )
        begin = -(-self._at // alignment) * alignment
        tensors = [self._placed(one, begin, alignment) for one in described]
        if sum(tensor.num_bytes for tensor in tensors) > len(self._content):
            raise ModelError(f"{self._path} is damaged: tensors overlap")
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Reads the name, type, shape and offset of a tensor."""
        name, dims = self._text(), self._number("<u4")
        if not 1 <= dims <= 4:
            raise ModelError(f"{self._path} is damaged: {name[:80]!r} has {dims:,} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dims))[::-1]
        return name, self._number("<u4"), shape, self._number("<u8")

    def _placed(self, described: tuple[str, int, tuple[int, ...], int], begin: int, alignment: int) -> GgufTensor:
        name, kind, shape, offset = described
        form = _FORMS.get(kind, f"of type {kind}")
        if form not in DENSE_FORMS and form not in BLOCK_SIZES:
            raise ModelError(
                f"{self._path} stores {name[:80]!r} as {form}, which is not supported; supported: "
                f"{', '.join((*DENSE_FORMS, *BLOCK_SIZES))}; use a file with another quantisation, such as Q4_K_M"
            )
        block = 1 if form in DENSE_FORMS else BLOCK_SIZES[form][0]
        if min(shape) < 1 or max(shape) >= 2**31 or shape[-1] % block or offset % alignment:
            raise ModelError(
                f"{self._path} is damaged: {name[:80]!r} has the shape {shape} in {form}, {offset:,} bytes behind the "
                "header"
            )
        tensor = GgufTensor(name, form, shape, begin + offset)
        if tensor.offset + tensor.num_bytes > len(self._content):
            raise ModelError(
                f"{self._path} is truncated: {name[:80]!r} ends at byte {tensor.offset + tensor.num_bytes:,}, the file "
                f"at {len(self._content):,}; download it again"
            )
        return tensor

    def _value(self, kind: int, *, nested: bool) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._bytes(1) != b"\0"
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or nested:
            raise ModelError(f"{self._path} is damaged: it has a value of type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            self._allow(count, _MOST_TEXTS, "texts of a key")
            return [self._text() for _ in range(count)]
        if kind != _BOOL and kind not in _NUMBERS:
            raise ModelError(f"{self._path} is damaged: it has an array of type {kind}")
        form = np.dtype("?" if kind == _BOOL else _NUMBERS[kind])
        return np.frombuffer(self._bytes(count * form.itemsize), form)

    def _text(self) -> str:
        return self._bytes(self._number("<u8")).decode("utf-8", "surrogateescape")

    def _number(self, form: str) -> Any:
        """Reads a number in one of numpy's formats."""
        letter = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "f4": "f", "u8": "Q", "i8": "q"}
        return struct.unpack("<" + letter.get(form[1:], "d"), self._bytes(int(form[2:])))[0]

    def _bytes(self, size: int) -> bytes:
        self._has(size)
        self._at += size
        return self._content[self._at - size : self._at]

    def _allow(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise ModelError(f"{self._path} is damaged: its header asks for {count:,} {what}; {most:,} are allowed")

    def _has(self, size: int) -> None:
        """Raises `ModelError` if less than `size` bytes of the file are left."""
        if size > len(self._content) - self._at:
            raise ModelError(
                f"{self._path} is truncated or damaged: its header asks for {size:,} bytes at byte {self._at:,} of "
                f"{len(self._content):,}; download it again"
            )
