"""Compiles the Triton kernels for GPUs that need not be there, and says what each takes of one.

    python compile_triton.py               # a table: usual shapes and dtypes, for five architectures
    python compile_triton.py --unusual 90  # other shapes and dtypes, for one architecture
    python compile_triton.py --only pack   # a table of the kernels whose names begin so
    python compile_triton.py --some        # few variants, with each value of each constant of each kernel

It fails where a kernel spills registers or takes more shared memory than the smallest of these GPUs has. The number of
rows is no part of a kernel: rows are tiles of one size. All figures are those of the assembler (`ptxas -v`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.knobs
from triforce.kernels.quantised import BLOCK_FORMS
from triforce.kernels.triton import attention as triton_attention
from triforce.kernels.triton import blocks as triton_blocks
from triforce.kernels.triton import chunks as triton_chunks
from triforce.kernels.triton import delta as triton_delta
from triforce.kernels.triton import groups as triton_groups
from triforce.kernels.triton import packing as triton_packing
from triforce.kernels.triton import quantised as triton_quantised
from triforce.kernels.triton import rows as triton_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

SHARED_MEMORY = 99 * 1024
"""Bytes a program may take on sm_86, sm_89 and sm_120, the least of the GPUs this is for."""

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
PACKING = "packing", "packing: exceptions", "packing: unpacking"
FLOATS = dict.fromkeys(["parts", "peaks", "totals", "running", "out", "lse", "mass"], "*fp32")


@dataclass(frozen=True)
class Multiprocessor:
    """What programs share ("Compute capabilities" in the CUDA programming guide)."""

    warps: int
    programs: int
    shared_memory: int
    """KiB, of which each program takes one more than it asks for."""


ARCHITECTURES = {
    80: Multiprocessor(64, 32, 164),
    86: Multiprocessor(48, 16, 100),
    89: Multiprocessor(48, 24, 100),
    90: Multiprocessor(64, 32, 228),
    120: Multiprocessor(48, 24, 100),
}
ASSEMBLED_FROM = {86: 80, 89: 80}
"""Architectures for which Triton's PTX is that of another one, except for its first lines, so that only assembling is
left. For the variants of `few_of`, the programs are compared with those that Triton makes."""

REGISTERS = 65536
"""Of a multiprocessor; warps take 256 at a time."""


@dataclass(frozen=True)
class Variant:
    """A kernel with what it is compiled for."""

    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    """Of the arguments that are neither constants nor 32-bit integers, and maybe of others."""
    num_warps: int = 4
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """What a program takes."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread."""
    shared: int
    """Bytes."""

    def occupancy(self, capability: int, num_warps: int) -> float:
        """The share of a multiprocessor's warps that can be there at once."""
        there = ARCHITECTURES[capability]
        of_registers = REGISTERS // (-(-self.registers * 32 // 256) * 256) // num_warps
        of_memory = there.shared_memory * 1024 // (self.shared + 1024)
        return min(of_registers, of_memory, there.programs, there.warps // num_warps) * num_warps / there.warps


@dataclass(frozen=True)
class Program:
    """A compiled variant."""

    ptx: str
    usage: Usage


def compile_variant(variant: Variant, capability: int) -> Program:
    """Compiles it and reads what the assembler says."""
    kernel = variant.kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | variant.types | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if "stride" in name or signature[name].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    with assembler_messages() as log:
        compiled = triton.compile(
            ASTSource(kernel, signature, variant.constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options=options_of(variant),
        )
    return Program(compiled.asm["ptx"], usage_of(log, compiled.metadata.shared))


def assemble(variant: Variant, program: Program, capability: int) -> Program:
    """Assembles the program of another architecture for this one."""
    backend: Any = make_backend(GPUTarget("cuda", capability, 32))
    ptx = re.sub(r"(?<=\.target sm_)\d+", str(capability), program.ptx)
    with assembler_messages() as log:
        backend.make_cubin(ptx, {}, backend.parse_options(options_of(variant)), capability)
    return Program(ptx, usage_of(log, program.usage.shared))


def options_of(variant: Variant) -> dict[str, Any]:
    return {"num_warps": variant.num_warps, "num_stages": 2} | variant.options


@contextlib.contextmanager
def assembler_messages() -> Iterator[io.StringIO]:
    """What the assembler prints, where something is compiled in this context; nothing is taken from Triton's cache."""
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        yield log


def usage_of(log: io.StringIO, shared: int) -> Usage:
    said = log.getvalue()
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))
    return Usage(int(re.findall(r"Used (\d+) registers", said)[-1]), spilled, shared)


def attention_variant(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    *,
    windowed: bool = False,
    on_device: bool = False,
    whole: bool = False,
) -> Variant:
    rows, keys, dims = triton_attention.tile_sizes(group, head_dim, dtype)
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "TILE_ROWS": rows, "TILE_KEYS": keys, "TILE_DIM": dims}
    constants |= {"WINDOWED": windowed, "ON_DEVICE": on_device, "WHOLE": whole}
    types = dict.fromkeys("qkv", POINTERS[dtype]) | FLOATS | {"scale_log2": "fp32"}
    types |= {"diagonal": "*i64"} if on_device else {}
    return Variant(triton_attention._attend_kernel, constants, types, triton_attention.warps_of(rows, keys, dims))


def mass_variant(dtype: torch.dtype, group: int, head_dim: int, **flags: bool) -> Variant:
    like = attention_variant(dtype, group, head_dim, **flags)
    constants = {name: value for name, value in like.constants.items() if name != "WHOLE"} | {"CHUNK": 8}
    return Variant(triton_chunks._mass_kernel, constants, like.types)


def merge_variant(head_dim: int, *, running: bool) -> Variant:
    constants = {"HEAD_DIM": head_dim, "TILE_DIM": triton_attention.power_of_two(head_dim), "RUNNING": running}
    return Variant(triton_attention._merge_kernel, constants, FLOATS, num_warps=1)


def chunk_variants(dtype: torch.dtype, head_dim: int, chunk: int) -> list[Variant]:
    """Gathering and copying chunks."""
    power = triton_attention.power_of_two
    constants = {"CHUNK": chunk, "HEAD_DIM": head_dim, "TILE_CHUNK": power(chunk), "TILE_DIM": power(head_dim)}
    types = dict.fromkeys(["blocks", "block", "out", "k", "v"], POINTERS[dtype]) | {"indices": "*i64"}
    return [
        Variant(kernel, constants, types, 2) for kernel in (triton_chunks._gather_kernel, triton_chunks._copy_kernel)
    ]


def packing_variants(head_dim: int) -> list[Variant]:
    """Packing, the list of exceptions, and unpacking."""
    tile_dim = triton_attention.power_of_two(head_dim)
    constants = {"HEAD_DIM": head_dim, "TILE_DIM": tile_dim}
    types = {"blocks": "*i16", "slots": "*u8", "words": "*i32"}
    kernels = triton_packing._pack_kernel, triton_packing._exceptions_kernel, triton_packing._unpack_kernel
    return [Variant(kernel, constants, types, triton_packing.warps_of(tile_dim)) for kernel in kernels]


def product_variants(dtype: torch.dtype) -> list[Variant]:
    """Products with matrices in four bits, in eight, and in FP8, with zeros and in any order, and without; and their
    numbers; and adding up a product's parts."""
    of = triton_groups
    pairs = "*i32" if dtype.itemsize == 2 else "*i64"
    types = {"values": "*u8", "scales": "*fp16", "zeros": "*u8", "group_of": "*i64", "zero": "fp32", "sums": "*fp32"}
    warps, found = of.NUM_WARPS, []
    small, large = (of.SMALL_OUTPUTS, of.SMALL_BYTES), (of.TILE_OUTPUTS, of.TILE_BYTES)
    tiles = (
        (False, True, large),
        (False, True, (of.TILE_OUTPUTS, of.LEAST_BYTES)),
        (False, False, small),
        (True, False, small),
    )
    for kind, zeros, (ordered, whole, tile) in itertools.product((0, 1, 3), (False, True), tiles):
        constants = {"KIND": kind, "ZEROS": zeros, "ORDERED": ordered, "WHOLE": whole}
        constants |= {"OUTPUTS": tile[0], "INPUTS": tile[1] * (2 if kind == 0 else 1)}
        of_product = constants | {
            "ROWS": triton_quantised.TILE_ROWS,
            "PART": triton_quantised.LEAST_INPUTS,
            "DTYPE": triton_quantised.TYPES[dtype],
            "EACH": 0,
        }
        of_rows = types | {"x": POINTERS[dtype] if kind else pairs}
        options = {"num_stages": of.NUM_STAGES} | ({} if whole else {"maxnreg": of.SMALL_REGISTERS})
        found.append(Variant(triton_groups._product_kernel, of_product, of_rows, warps, options))
        numbers = types | {"out": POINTERS[dtype]}
        found.append(Variant(triton_groups._expand_kernel, constants, numbers, warps, options))
    types |= dict.fromkeys(("bias", "out"), POINTERS[dtype])
    for bias, add in itertools.product((False, True), repeat=2):
        constants = {"BIAS": bias, "ADD": add, "OUTPUTS": triton_quantised.TILE_SUMS}
        found.append(Variant(triton_quantised._finish_kernel, constants, types, warps))
    return found


def block_variants(dtype: torch.dtype) -> Iterator[tuple[str, Variant]]:
    """Products with matrices in blocks of each format, and their numbers, of full tiles and others."""
    of, rows = triton_blocks, triton_quantised
    warps, types = of.NUM_WARPS, {"blocks": "*u8", "sums": "*fp32"}
    for (form, layout), whole in itertools.product(BLOCK_FORMS.items(), (False, True)):
        constants, options = of.constants_of(form, layout, whole=whole), of.options_of(form)
        options.pop("num_warps")
        places = types | {"wide": "*i32" if form in ("Q4_K", "Q5_K") else "*fp16"}
        of_product = constants | {"ROWS": rows.TILE_ROWS, "PART": rows.LEAST_INPUTS, "DTYPE": rows.TYPES[dtype]}
        of_rows = places | {"x": POINTERS[dtype]}
        for name, each, ids in (("products of blocks", 0, {}), ("products of experts", 8, {"ids": "*i64"})):
            yield name, Variant(of._product_kernel, of_product | {"EACH": each}, of_rows | ids, warps, options)
        of_numbers, numbers = constants | {"PART": of.EXPANDED_INPUTS}, places | {"out": POINTERS[dtype]}
        yield "numbers of blocks", Variant(of._expand_kernel, of_numbers, numbers, warps, options)


def delta_variant(dtype: torch.dtype, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Variant:
    constants = {"KERNEL": 4, "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim}
    constants |= {"VALUE_DIM": value_dim, "TILED": False, "TILE_KEYS": triton_attention.power_of_two(key_dim)}
    constants |= {"TILE_VALUES": triton_delta.TILE_VALUES}
    floats = "conv", "decay", "decay_bias", "state", "after_first", "after_second"
    types: dict[str, str] = dict.fromkeys(floats, "*fp32")
    for name in ("inputs", "gates", "out"):
        types[name] = POINTERS[dtype]
    return Variant(triton_delta._steps_kernel, constants, types, triton_delta.NUM_WARPS)


def usual_variants(dtypes: list[torch.dtype], head_dims: list[int], groups: list[int]) -> Iterator[tuple[str, Variant]]:
    """All that runs of usual models use, each with its name. Of attention: steps on the full cache, steps that are
    captured, without a window and with one, and a prefill with a window."""
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        for group in groups:
            yield "attention", attention_variant(dtype, group, head_dim)
            yield "attention", attention_variant(dtype, group, head_dim, on_device=True)
            yield "attention", attention_variant(dtype, group, head_dim, on_device=True, windowed=True)
            yield "attention", attention_variant(dtype, group, head_dim, windowed=True, whole=True)
            yield "mass of chunks", mass_variant(dtype, group, head_dim)
        for variant in chunk_variants(dtype, head_dim, 8):
            yield "copies of chunks", variant
    for name in ("*u8", *(POINTERS[dtype] for dtype in dtypes)):
        types = {"out": name, "matrix": name, "ids": "*i64"}
        yield "rows in host memory", Variant(triton_rows._rows_kernel, {"TILE_WIDTH": triton_rows.TILE_WIDTH}, types)
    for dtype in dtypes:
        yield "delta rule", delta_variant(dtype, 16, 32, 128, 128)
        for variant in product_variants(dtype):
            of_sums = variant.kernel is triton_quantised._finish_kernel
            yield f"products of quantised matrices{': sums' if of_sums else ''}", variant
            if variant.kernel is triton_groups._product_kernel and not variant.constants["ORDERED"]:
                of_experts = variant.constants | {"EACH": 8}
                yield (
                    "products of experts",
                    replace(variant, constants=of_experts, types=variant.types | {"ids": "*i64"}),
                )
        yield from block_variants(dtype)
    for head_dim in head_dims:
        yield "merge", merge_variant(head_dim, running=False)
        yield "merge", merge_variant(head_dim, running=True)
        for name, variant in zip(PACKING, packing_variants(head_dim), strict=True):
            yield name, variant


def unusual_variants() -> Iterator[tuple[str, Variant]]:
    for dtype, group, head_dim in [(torch.bfloat16, 1, 64), (torch.bfloat16, 4, 256), (torch.float32, 8, 128)]:
        flags = {"windowed": head_dim == 64, "on_device": head_dim == 64}
        for whole in (False, True):
            yield "attention", attention_variant(dtype, group, head_dim, whole=whole, **flags)
        yield "mass of chunks", mass_variant(dtype, group, head_dim, **flags)
    for running in (False, True):
        yield "merge", merge_variant(80, running=running)
    for variant in chunk_variants(torch.bfloat16, 80, 12):
        yield "copies of chunks", variant
    for head_dim in (80, 256):
        for name, variant in zip(PACKING, packing_variants(head_dim), strict=True):
            yield name, variant


def programs(name: str, variant: Variant, capabilities: list[int], *, compares: bool = False) -> dict[int, Program]:
    """The program for each architecture. The process ends if one takes too much.

    Args: `compares`: whether Triton also makes those that are assembled from others, and they are compared.
    """
    found: dict[int, Program] = {}
    for capability in capabilities:
        like = found.get(ASSEMBLED_FROM.get(capability, 0))
        found[capability] = program = (
            assemble(variant, like, capability) if like else compile_variant(variant, capability)
        )
        if program.usage.spilled or program.usage.shared > SHARED_MEMORY:
            sys.exit(f"{name} {variant.constants} on sm_{capability}: {program.usage}")
        if like and compares and compile_variant(variant, capability) != program:
            sys.exit(f"{name} {variant.constants}: the program for sm_{capability} differs from what Triton makes")
    return found


def few_of(variants: list[tuple[str, Variant]], capabilities: list[int]) -> set[tuple[int, int]]:
    """Places in `variants`, each with an architecture: so many that each kernel is compiled with each value of each of
    its constants and types. They are always the same, and do not depend on other kernels."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, (name, variant) in enumerate(variants):
        groups.setdefault((name, f"{variant.kernel.__module__}.{variant.kernel.__name__}"), []).append(place)
    chosen = set()
    for group, places in groups.items():
        chance = random.Random(str(group))
        in_turn = itertools.cycle(chance.sample(capabilities, len(capabilities)))
        places = chance.sample(places, len(places))
        values = {place: {*variants[place][1].constants.items(), *variants[place][1].types.items()} for place in places}
        missing = set().union(*values.values())
        while missing:
            place = max(places, key=lambda place: len(values[place] & missing))
            missing -= values[place]
            chosen.add((place, next(in_turn)))
    return chosen


def tabulate(variants: list[tuple[str, Variant]], capabilities: list[int], *, some: bool) -> None:
    """Prints a row for each kernel and tile: the maximum that any variant takes, and the minimum occupancy.

    Args: `some`: few variants, each for one architecture (see `few_of`); else all for all.
    """
    few = few_of(variants, capabilities)
    compared = {place for place, _ in few}
    chosen = few if some else {*itertools.product(range(len(variants)), capabilities)}
    rows: dict[tuple[str, str], dict[int, list[tuple[Usage, float]]]] = {}
    for place, (name, variant) in enumerate(variants):
        wanted = [capability for capability in capabilities if (place, capability) in chosen]
        if not wanted:
            continue
        sizes = [size for key, size in variant.constants.items() if key.startswith("TILE_")]
        tile = " x ".join(map(str, sizes or [variant.constants.get("ROWS", 1), variant.constants["OUTPUTS"]]))
        row = rows.setdefault((name, tile), {capability: [] for capability in capabilities})
        for capability, program in programs(name, variant, wanted, compares=place in compared).items():
            usage = program.usage
            row[capability].append((usage, usage.occupancy(capability, variant.num_warps)))
    print("| kernel | tile |", " | ".join(f"sm_{capability}" for capability in capabilities), "|")
    print("|---" * (2 + len(capabilities)) + "|")
    for (name, tile), row in sorted(rows.items()):
        print("|", " | ".join((name, tile, *map(_cell, row.values()))), "|")


def _cell(found: list[tuple[Usage, float]]) -> str:
    if not found:
        return ""
    registers, shared = max(usage.registers for usage, _ in found), max(usage.shared for usage, _ in found)
    return f"{registers}, {shared / 1024:.0f} KiB, {min(of for _, of in found):.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--unusual", type=int, metavar="90")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--some", action="store_true")
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    gc.freeze()  # what was imported stays: no collection looks through it
    if options.unusual:
        for name, variant in unusual_variants():
            if name.startswith(tuple(options.only)):
                program = programs(name, variant, [options.unusual])[options.unusual]
                print(name, variant.constants, program.usage)
        return
    variants = usual_variants([torch.bfloat16, torch.float16], options.head_dims, options.groups)
    tabulate(
        [one for one in variants if one[0].startswith(tuple(options.only))], options.capabilities, some=options.some
    )


if __name__ == "__main__":
    main()
