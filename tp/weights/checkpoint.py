"""Reads weights in safetensors, GGUF or PyTorch's format, from one file or from shards. It reads tensor by tensor, and
only the part of each tensor that a rank holds."""

from __future__ import annotations

import ctypes
import math
import mmap
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelError
from ..model.families import MOST_EXPERTS, plain_name
from ..pages import lasting, weight_memory
from .gguf_header import DENSE_FORMS, form_bytes
from .weight_files import gguf_index, weight_files

_FORMATS = ("F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64")
"""The supported dtypes, by their names in safetensors and in PyTorch."""

_NOT_COMPUTED = (".input_scale", ".input_zero_point", ".activation_scale", ".input_global_scale")
"""Endings of the names of tensors that are only needed for quantised activations."""

_OF_IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector|visual)\.")
"""Beginnings of the names of tensors that are only needed for images."""

_OF_HEAD = "mtp."
"""The beginning of the names of tensors of a multi-token-prediction head."""

_OF_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Names of tensors that contain a matrix of every expert of a layer: `[experts, outputs, inputs]`."""


_MAPPED_BYTES = 16 * 2**20
"""How many bytes of tensors are read from a safetensors file before it is mapped again. It is not less because opening
a file takes longer the more tensors it has."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: shape and dtype from the header, and a function that reads a part of it."""

    shape: tuple[int, ...]
    dtype: str
    part: Callable[[tuple[slice, ...]], Tensor]
    is_mapped: bool = True
    """Whether a part is memory of a mapped file, so that it must be copied."""

    def of_expert(self, number: int, share: int, shares: int) -> _Stored:
        """The matrix of one expert in a tensor of all experts, or one of `shares` equal parts of its outputs."""
        _, outputs, inputs = self.shape
        first, stop = (i * outputs // shares for i in (share, share + 1))

        def part(wanted: tuple[slice, ...]) -> Tensor:
            rows, columns = wanted
            start, end, _ = rows.indices(stop - first)
            return self.part((slice(number, number + 1), slice(first + start, first + end), columns)).squeeze(0)

        return _Stored((stop - first, inputs), self.dtype, part, self.is_mapped)


class Checkpoint:
    """The tensors of a model directory, by name. Every read checks name, shape and dtype.

    Tensors are copied, so replacing a file later has no effect on tensors that were read. Pages of a mapped file count
    as resident once they were read. Therefore a safetensors file is mapped again after `_MAPPED_BYTES` were read from
    it. The pages of a `.bin` file are given back to the system instead, because mapping it again would mean to read its
    pickle again. So memory contains the parts that were read and, during a read, at most one tensor and `_MAPPED_BYTES`
    more. (A `.bin` file from before PyTorch 1.6 cannot be mapped: all of it is in memory until another file is read.)
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, *, further_tokens: bool = False
    ) -> None:
        """Reads the headers.

        Args:
            directory: the model's directory.
            dtype: the dtype in which `read` returns tensors.
            device: the device for all tensors.
            further_tokens: whether only the tensors of the multi-token-prediction head are read. Otherwise, all except
                these are read.

        Raises:
            ModelError: there are no weights; a file is missing, truncated or in an unknown format; or there is no
                multi-token-prediction head.
        """
        self.device = device
        self._directory, self.dtype = directory, dtype
        self._bin: tuple[Path, dict[str, Tensor]] | None = None  # the file that was read last
        self._safe: tuple[Path, _SafetensorsFile] | None = None  # the file that was read last
        self._gguf = _gguf_tensors(directory)
        self._paths: dict[str, Path] = {}
        self._stored_names: dict[str, str] = {}  # names in the file
        self._experts: dict[str, tuple[int, int, int]] = {}  # see `_Stored.of_expert`
        for path in weight_files(directory):
            with self._opened(path) as stored:
                for name in stored:
                    if name.startswith(_OF_HEAD) is further_tokens and not _OF_IMAGES.match(name):
                        self._add(plain_name(name), path, stored, name)
        if further_tokens and not self._paths:
            raise ModelError(
                f"the weights in {directory} have no multi-token-prediction head (no tensor mtp.fc.weight; some tools "
                "leave it out), which --draft mtp needs; give a small model to --draft, or lookup, or none"
            )
        self._unread = set(self._paths)

    def _add(self, name: str, path: Path, stored: Mapping[str, _Stored], stored_name: str) -> None:
        """Adds a tensor of a file. If it contains all experts, adds each expert's part, under the name that it has in
        files that store experts one by one."""
        names = [name]
        of_experts = _OF_EXPERTS.fullmatch(name)
        if of_experts and len(shape := stored[stored_name].shape) == 3:
            kinds = ("gate", "up") if of_experts[2] == "gate_up_proj" else ("down",)
            parts = {
                f"{of_experts[1]}.{number}.{kind}_proj.weight": (number, share, len(kinds))
                for number in range(min(shape[0], MOST_EXPERTS))
                for share, kind in enumerate(kinds)
            }
            self._experts |= parts
            names = list(parts)
        self._paths |= dict.fromkeys(names, path)
        self._stored_names |= dict.fromkeys(names, stored_name)

    def read(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Reads the tensor `name`, or a part of it. Only this part is read from the file; from a GGUF file, the whole
        tensor.

        Args:
            shape: the shape that the tensor must have in the file.
            rows: a part of the first dimension; `None`: all.
            columns: a part of the second dimension; `None`: all.
            dtype: that of the result; default: that of this object.

        Returns:
            A contiguous copy on the device.

        Raises:
            ModelError: the tensor is missing, has another shape, or is not in a 16-bit or wider floating-point format.
        """
        with self._found(name) as (path, stored):
            if stored.shape != shape:
                raise ModelError(f"{name} in {path} has shape {stored.shape}; its config says {shape}")
            if stored.dtype not in _FORMATS:
                raise ModelError(
                    f"{name} in {path} is {stored.dtype}; quantised weights are not supported where the model's "
                    "config.json does not describe them"
                )
            wanted = (rows or slice(None), columns or slice(None))[: len(shape)]
            tensor = lasting(stored.part(wanted), self.device, dtype or self.dtype)
        self._unread.discard(name)
        return tensor

    @contextmanager
    def _found(self, name: str) -> Iterator[tuple[Path, _Stored]]:
        """The file that contains a tensor, and the tensor, for use within the context."""
        if name not in self._paths:
            raise ModelError(f"the weights in {self._directory} lack the tensor {name}")
        path = self._paths[name]
        with self._opened(path) as file:
            found = file[self._stored_names[name]]
            yield path, found.of_expert(*self._experts[name]) if name in self._experts else found

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._paths

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that exists."""
        with self._found(name) as (_, found):
            return found.shape

    def stored(self, name: str, *shape: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """A copy of the tensor `name` on the device, in the dtype in which it is stored.

        Raises:
            ModelError: the tensor is missing, has another shape, or has none of the `dtypes`.
        """
        with self._found(name) as (path, found):
            if found.shape != shape:
                raise ModelError(f"{name} in {path} has shape {found.shape}; its config says {shape}")
            tensor = found.part(tuple(slice(None) for _ in shape) or (...,))  # pyright: ignore[reportArgumentType]
            if tensor.dtype not in dtypes:
                wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise ModelError(f"{name} in {path} is {found.dtype}; its config asks for {wanted}")
            tensor = lasting(tensor, self.device) if found.is_mapped else tensor.to(self.device)
        self._unread.discard(name)
        return tensor

    def unread(self) -> list[str]:
        """The names of tensors that have not been read, except those that a model does not need: RoPE's tables, the
        output head of a model that uses its embedding instead, tensors for quantised activations, and biases of zeros,
        which some tools write beside quantised matrices."""
        left = (name for name in self._unread if not name.endswith(_NOT_COMPUTED) and ".rotary_emb." not in name)
        return sorted(name for name in left if name != "lm_head.weight" and not self._is_bias_of_zeros(name))

    def _is_bias_of_zeros(self, name: str) -> bool:
        if not name.endswith(".bias") or not self.has(name.removesuffix("bias") + "qweight"):
            return False
        with self._found(name) as (_, found):
            return not found.part((slice(None),)).any()

    def check_all_read(self) -> None:
        """Checks that no tensors are left, after a model has read all its weights.

        Raises:
            ModelError: tensors are left that the model does not have. So they belong to another model.
        """
        unread = self.unread()
        if unread:
            more = f" and {len(unread) - 3:,} more" if len(unread) > 3 else ""
            raise ModelError(
                f"{self._paths[unread[0]]} holds tensors that the model described by {self._directory / 'config.json'} "
                f"does not have: {', '.join(unread[:3])}{more}; config and weights are not of the same model"
            )

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Mapping[str, _Stored]]:
        """The tensors in a file, for use within the context."""
        if path in self._gguf:
            yield self._gguf[path]
        elif path.suffix == ".safetensors":
            try:
                if self._safe is None or self._safe[0] != path or self._safe[1].bytes_read > _MAPPED_BYTES:
                    self._safe = None  # before another one is mapped
                    self._safe = path, _SafetensorsFile(safe_open(str(path), framework="pt"))
                yield self._safe[1]
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path} is damaged or is not a safetensors file ({error}); download it again"
                ) from error
        else:
            tensors = self._bin_tensors(path)
            yield {
                name: _Stored(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.__getitem__)
                for name, tensor in tensors.items()
            }
            if _is_zip(path):
                _give_back_pages(tensors.values())

    def _bin_tensors(self, path: Path) -> dict[str, Tensor]:
        if self._bin and self._bin[0] == path:
            return self._bin[1]
        self._bin = None
        try:
            mapped = _is_zip(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            asked = re.search(r"GLOBAL ([\w.]+)", str(error))
            if not asked:
                raise ModelError(f"{path} is damaged or is not a PyTorch file; download it again") from error
            raise ModelError(
                f"{path} holds more than tensors (it asks for {asked[1]}): loading it could run code that came with "
                "it, so it is not loaded; use the same weights as safetensors"
            ) from error
        except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} is damaged or is not a PyTorch file ({_first_line(error)}); download it again"
            ) from error
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ModelError(f"{path} holds something else than tensors by name; it is not the weights of a model")
        self._bin = path, loaded
        return loaded


class _SafetensorsFile(Mapping[str, _Stored]):
    def __init__(self, file: safe_open) -> None:
        self._file = file
        self.bytes_read = 0

    def __getitem__(self, name: str) -> _Stored:
        stored = self._file.get_slice(name)

        shape = tuple(stored.get_shape())

        def part(wanted: tuple[slice, ...]) -> Tensor:
            found = stored[wanted]
            of_first = len(range(*wanted[0].indices(shape[0]))) if shape else 1
            # Counts all columns of the rows that are read: a part of the columns is on as many pages as all columns.
            self.bytes_read += of_first * math.prod(shape[1:]) * found.itemsize
            return found

        return _Stored(shape, stored.get_dtype(), part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def _gguf_tensors(directory: Path) -> dict[Path, dict[str, _Stored]]:
    """The tensors of a GGUF model, by file and name; empty for another kind of directory."""
    index = gguf_index(directory)
    if index is None:
        return {}
    files = [Path(file) for file in index["files"]]
    found: dict[Path, dict[str, _Stored]] = {path: {} for path in files}
    for name, one in index["tensors"].items():
        path = files[one["file"]]
        found[path][name] = _gguf_tensor(path, one["offset"], one["form"], one["shape"], one["heads"])
    return found


def _gguf_tensor(path: Path, offset: int, form: str, shape: list[int], heads: int) -> _Stored:
    """A tensor of a GGUF file, as an index of `gguf_model` describes it. If it is in blocks, its rows are bytes.

    Args:
        offset: that of its first byte in the file.
        form: its format, see `GgufTensor.form`.
        shape: its shape in numbers.
        heads: see `_Configuration.interleaved_heads` of `gguf_model`.
    """
    num_bytes = form_bytes(form, tuple(shape))

    def part(wanted: tuple[slice, ...]) -> Tensor:
        stored = weight_memory((num_bytes,), torch.uint8, torch.device("cpu"))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                found = file.readinto(stored.numpy().data)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if found != num_bytes:
            raise ModelError(f"{path} is shorter than it was; download it again")
        if form in DENSE_FORMS:
            stored = stored.view(_GGUF_DTYPES[form])
        stored = stored.view(rows)
        if heads:  # the two rows of a rotated pair are neighbours; in the result, they are half a head apart
            stored = stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return stored[wanted]

    rows = tuple(shape) if form in DENSE_FORMS else (*shape[:-1], form_bytes(form, (shape[-1],)))
    return _Stored(rows, form, part, is_mapped=False)


_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _is_zip(path: Path) -> bool:
    """Whether this is PyTorch's format since 1.6. Only files in this format can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _give_back_pages(mapped: Iterable[Tensor]) -> None:
    """Lets the system free the memory of mapped tensors, where it can. It reads them again when they are used."""
    storages = [tensor.untyped_storage() for tensor in mapped if tensor.numel()]
    if not storages or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = min(storage.data_ptr() for storage in storages)
    stop = max(storage.data_ptr() + storage.nbytes() for storage in storages)
    first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE  # only whole pages of this mapping
    if stop - first >= mmap.PAGESIZE:
        size = (stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
