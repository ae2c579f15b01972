"""Pure functions on tensors: attention with log-sum-exp, merging of partial results, chunks of keys, packing, and the
other operations of a decoder.

Nothing here imports another part of triforce. A function may have faster implementations under the same name, which are
tested against the plain implementation. The device and the call, or `use_kernels`, determine which one is used.

The names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import attend, attend_blocks, takes_blocks
    from .chunks import chunk_mass, chunk_scores, copy_chunks, gather_chunks, select_chunks
    from .cpu.library import Level, arithmetic, cpu_level, instructions
    from .layers import gated_mlp, linear, put, rms_norm, rotate, rows_are_independent
    from .packing import gather_packed, is_packed, pack, unpack
    from .partials import merge_partials, new_running
    from .plain_attention import Scratch
    from .selection import STEP_ROWS, Backend, padded_rows, use_kernels
    from .slots import Layout

__all__ = [
    "STEP_ROWS",
    "Backend",
    "Layout",
    "Level",
    "Scratch",
    "arithmetic",
    "attend",
    "attend_blocks",
    "chunk_mass",
    "chunk_scores",
    "copy_chunks",
    "cpu_level",
    "gated_mlp",
    "gather_chunks",
    "gather_packed",
    "instructions",
    "is_packed",
    "linear",
    "merge_partials",
    "new_running",
    "pack",
    "padded_rows",
    "put",
    "rms_norm",
    "rotate",
    "rows_are_independent",
    "select_chunks",
    "takes_blocks",
    "unpack",
    "use_kernels",
]

_NAMES = {
    ".attention": ("attend", "attend_blocks", "takes_blocks"),
    ".chunks": ("chunk_mass", "chunk_scores", "copy_chunks", "gather_chunks", "select_chunks"),
    ".cpu.library": ("Level", "arithmetic", "cpu_level", "instructions"),
    ".layers": ("gated_mlp", "linear", "put", "rms_norm", "rotate", "rows_are_independent"),
    ".packing": ("gather_packed", "is_packed", "pack", "unpack"),
    ".partials": ("merge_partials", "new_running"),
    ".plain_attention": ("Scratch",),
    ".selection": ("STEP_ROWS", "Backend", "padded_rows", "use_kernels"),
    ".slots": ("Layout",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
