"""The compiled CPU kernels: loads them, declares the arguments of their functions, and finds what the processor
supports.

They are optional: built at installation where there is a C compiler, and used where the processor supports them.
Without them, plain PyTorch computes the same, with sums in another order.
"""

from __future__ import annotations

import ctypes
import functools
import os
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ABI = 22
"""`TRIFORCE_ABI` of cpu.h."""


class Level(IntEnum):
    """Instruction sets, each including those before it; the enumeration of cpu.h."""

    NONE = 0
    """Packing and the expansion of quantised matrices, with instructions that every processor has."""
    AVX2 = 1
    """Attention, the delta rule, packing, sampling, and the expansion and products of quantised matrices."""
    AVX512 = 2
    """Attention and packing; everything else as on AVX2."""
    AVX512_BF16 = 3
    """AVX-512 with bfloat16 dot products: attention, projections, MLP, rotation, and the expansion of quantised
    matrices; packing as on AVX512, the delta rule and sampling as on AVX2."""
    AMX = 4
    """Matrix tiles for attention and products in bfloat16; everything else as on AVX512_BF16."""


_DESCRIPTIONS = {
    Level.AVX2: "AVX2: attention and sampling",
    Level.AVX512: "AVX-512: attention and sampling",
    Level.AVX512_BF16: "AVX-512 with bfloat16 products",
    Level.AMX: "AMX: matrix products in bfloat16",
}

_ARITHMETIC = {Level.NONE: 0, Level.AVX2: 1, Level.AVX512: 2, Level.AVX512_BF16: 10, Level.AMX: 11}
"""The number of each level's arithmetic. If a change of the kernels of a level changes how they round, the level gets a
number that no level has ever had. 3 to 9 are used up."""


class AttentionCall(ctypes.Structure):
    """The arguments of one call of `triforce_attend`: `Attention` of attention.h, field by field.

    `q` to `running` and `diagonal_at` are addresses (`mass`, `running` and `diagonal_at` may be 0); names with
    `_block`, `_head` and `_row` are strides in elements; `level` is a `Level`.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "k", "v", "out", "lse", "mass", "running", "running_head")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row")),
        *((name, ctypes.c_int64) for name in ("out_head", "out_row", "rounded")),
        *((name, ctypes.c_int64) for name in ("k_block", "k_head", "k_row")),
        *((name, ctypes.c_int64) for name in ("v_block", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "n", "m", "head_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("diagonal", "window", "diagonal_at")),
        *((name, ctypes.c_int64) for name in ("mass_rows", "chunk_size")),
        *((name, ctypes.c_int64) for name in ("type", "threads", "level")),
        ("scale", ctypes.c_double),
    )


class PackingCall(ctypes.Structure):
    """The arguments of `triforce_pack`, `triforce_unpack` and `triforce_gather`: `Packing` of cpu.h, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("blocks", "slots"),
            *("block_stride", "head_stride", "token_stride", "slot_stride"),
            *("num_blocks", "num_kv_heads", "tokens", "head_dim"),
            *("below", "starts", "exceptions", "largest", "slot_bytes", "capacity"),
            *("threads", "level"),
        )
    )


class QuantisedCall(ctypes.Structure):
    """A quantised matrix: `Quantised` of cpu.h, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("values", "kind", "row_bytes", "outputs", "inputs"),
            *("groups", "group_size", "group_of", "scales", "scales_are", "zeros", "zeros_are", "zero"),
        )
    )


class DeltaCall(ctypes.Structure):
    """The arguments of `triforce_delta_steps`: `Delta` of cpu.h, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("inputs", "gates", "conv", "decay", "bias", "state", "out"),
            *("saved_0", "saved_1", "saved_behind_0", "saved_behind_1"),
            *("n", "wanted", "channels", "kernel", "key_heads", "value_heads", "key_dim", "value_dim"),
            *("tiled", "is_bf16", "threads"),
        )
    )


class MassPartCall(ctypes.Structure):
    """An argument of `triforce_add_mass`: `MassPart` of cpu.h, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("shares", "head", "row", "first", "chunks", "lse", "lse_head", "lse_row")
    )


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The loaded library of kernels; `None` if it was not built, cannot be loaded, or was built from other sources. It
    may contain kernels that this processor does not support.

    PyTorch must be imported first. Then the kernels use the same OpenMP library and its threads.
    """
    folder = Path(__file__).parent
    built = next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_compiled{suffix}").exists()), None)
    return None if built is None else load_library(built)


def load_library(path: Path, abi: int = _ABI, call_size: int = ctypes.sizeof(AttentionCall)) -> ctypes.CDLL | None:
    """Loads a built library and declares the arguments of its functions.

    Returns:
        The library. `None` if it cannot be loaded, or was built from other sources: its version is not `abi`, or its
        structure of arguments does not have `call_size` bytes.
    """
    try:
        kernels = ctypes.CDLL(str(path))
        kernels.triforce_attention_size.restype = ctypes.c_int64
        if (kernels.triforce_abi(), kernels.triforce_attention_size()) != (abi, call_size):
            return None
        _declare(kernels)
    except (OSError, AttributeError):  # no library for this system, or one without these functions
        return None
    return kernels


def _declare(kernels: ctypes.CDLL) -> None:
    """Declares the argument types of the functions in cpu.h."""
    pointer, count, real, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    kernels.triforce_attend.argtypes = [ctypes.POINTER(AttentionCall), count]
    kernels.triforce_take_step.argtypes = [*(pointer, pointer, count, pointer, pointer, pointer, count, pointer, count)]
    quantised = ctypes.POINTER(QuantisedCall)
    weights, rest = [pointer, pointer, quantised], [pointer, flag, count, count, count, flag, flag, flag]
    kernels.triforce_linear.argtypes = [pointer, count, pointer, real, *weights, count, *rest]
    kernels.triforce_gated_mlp.argtypes = [pointer, count, pointer, real, *weights, *rest]
    kernels.triforce_expert_mlps.argtypes = [
        *(pointer, count, count, count, quantised, count, pointer, pointer, count, pointer, flag, flag, flag),
    ]
    kernels.triforce_choose_experts.argtypes = [
        *(pointer, count, count, flag, pointer, count, count, flag, pointer, pointer, flag, flag),
    ]
    kernels.triforce_rms_norm.argtypes = [
        *(pointer, count, count, pointer, flag, real, pointer, count, count, count, flag, flag),
    ]
    kernels.triforce_gated_norm.argtypes = [
        *(pointer, pointer, count, pointer, real, pointer, count, count, count, flag, flag),
    ]
    kernels.triforce_by_sigmoid.argtypes = [pointer, pointer, count, pointer, count, count, flag]
    for kernel in (kernels.triforce_rms_norm, kernels.triforce_gated_norm, kernels.triforce_by_sigmoid):
        kernel.restype = None
    kernels.triforce_rotate.argtypes = [
        *(pointer, count, count, pointer, pointer, count),
        *(pointer, count, count, pointer, count, count, count, flag),
    ]
    kernels.triforce_rotate.restype = None
    for kernel in (kernels.triforce_pack, kernels.triforce_unpack):
        kernel.argtypes = [ctypes.POINTER(PackingCall)]
    kernels.triforce_gather.argtypes = [ctypes.POINTER(PackingCall), pointer, count, count, count]
    kernels.triforce_expand.argtypes = [quantised, pointer, flag, flag, flag]
    kernels.triforce_product.argtypes = [quantised, pointer, count, pointer, flag, flag]
    kernels.triforce_delta_steps.argtypes = [ctypes.POINTER(DeltaCall)]
    double = ctypes.c_double
    kernels.triforce_add_mass.argtypes = [
        *(pointer, count, count, count, count, ctypes.POINTER(MassPartCall), count),
        *(pointer, count, count, count, double),
    ]
    kernels.triforce_distribution.argtypes = [*(pointer, count, count, double, count, double, double, pointer, flag)]
    for kernel in (kernels.triforce_certainties, kernels.triforce_pick, kernels.triforce_race):
        kernel.argtypes, kernel.restype = [pointer, count, count, pointer, pointer], None
    kernels.triforce_likeliest.argtypes, kernels.triforce_likeliest.restype = [pointer, count, count, pointer], None


@functools.cache
def supported_level() -> Level:
    """The highest level that this processor and the built kernels support; `Level.NONE` if the kernels were not
    built."""
    kernels = loaded()
    return Level.NONE if kernels is None else Level(kernels.triforce_cpu_level())


@functools.cache
def cpu_level() -> Level:
    """The level that the kernels use: the highest supported level, or the lower level that `TRIFORCE_CPU_LEVEL` names.

    The variable limits these kernels, not PyTorch's own operations. It is read once in a process.

    Raises:
        ValueError: the variable does not name a level, or names a level that is not supported here.
    """
    asked, supported = os.environ.get("TRIFORCE_CPU_LEVEL", ""), supported_level()
    if not asked:
        return supported
    level = next((one for one in Level if one.name.lower() == asked), None)
    if level is None or level > supported:
        usable = ", ".join(one.name.lower() for one in Level if one <= supported)
        problem = "which is no level" if level is None else "which the processor or the built kernels do not support"
        raise ValueError(f"TRIFORCE_CPU_LEVEL is {asked!r}, {problem}; here it can be: {usable}")
    return level


def instructions() -> str | None:
    """The instruction set that the kernels use here, in words; `None` if the level is `Level.NONE` (see `cpu_level`).

    Raises:
        ValueError: see `cpu_level`.
    """
    return _DESCRIPTIONS.get(cpu_level())


def arithmetic(device: str = "cpu") -> int | None:
    """A number that identifies the arithmetic of a type of device (`cpu`, `cuda`) here.

    With the same number, the compiled kernels round in the same way, but PyTorch's own operations may round differently
    on another processor. With different numbers, bits may differ. 0 is PyTorch without compiled kernels. Devices other
    than a CPU have no number: `None`.

    Raises:
        ValueError: see `cpu_level`.
    """
    return _ARITHMETIC[cpu_level()] if device == "cpu" else None
