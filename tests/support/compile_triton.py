"""Compiles the Triton kernels for a GPU that need not be there: `python compile_triton.py 90`. One line a variant."""

import sys

import torch
import triton
from triforce.kernels.triton import attention as triton_attention
from triforce.kernels.triton import chunks as triton_chunks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY = 99 * 1024
"""Bytes a program may take on sm_86 and sm_89, the least of the GPUs this is for."""

FLOATS = ["parts", "peaks", "totals", "running", "out", "lse"]
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def compile_kernel(kernel, capability, types, constants, num_warps):
    """Args: `types` of the arguments, as far as the kernel has them, that are neither constants nor 32-bit integers."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if "stride" in name or signature[name].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": 2},
    )
    used = compiled.metadata.shared
    print(kernel.__name__, constants, f"{used} bytes of shared memory")
    if used > SHARED_MEMORY:
        sys.exit(f"{used} bytes of shared memory are more than {SHARED_MEMORY}")


def main(capability):
    for dtype, group, head_dim in [(torch.bfloat16, 1, 64), (torch.bfloat16, 4, 256), (torch.float32, 8, 128)]:
        rows, keys, dims = triton_attention.tile_sizes(group, head_dim, dtype)
        windowed = on_device = head_dim == 64
        types = dict.fromkeys("qkv", POINTERS[dtype]) | dict.fromkeys(FLOATS, "*fp32") | {"scale_log2": "fp32"}
        constants = {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "TILE_ROWS": rows,
            "TILE_KEYS": keys,
            "TILE_DIM": dims,
            "WINDOWED": windowed,
            "ON_DEVICE": on_device,
        }
        if on_device:
            types["diagonal"] = "*i64"
        for whole in (False, True):
            compile_kernel(triton_attention._attend_kernel, capability, types, constants | {"WHOLE": whole}, 4)
        constants["CHUNK"] = 8
        compile_kernel(triton_chunks._mass_kernel, capability, types | {"lse": "*fp32", "mass": "*fp32"}, constants, 4)
    for running in (False, True):
        constants = {"HEAD_DIM": 80, "TILE_DIM": 128, "RUNNING": running}
        compile_kernel(triton_attention._merge_kernel, capability, dict.fromkeys(FLOATS, "*fp32"), constants, 1)
    pointers = {"blocks": "*bf16", "indices": "*i64", "out": "*bf16"}
    constants = {"CHUNK": 12, "HEAD_DIM": 80, "TILE_CHUNK": 16, "TILE_DIM": 128}
    compile_kernel(triton_chunks._gather_kernel, capability, pointers, constants, 2)
    pointers = {"block": "*bf16", "indices": "*i64", "k": "*bf16", "v": "*bf16"}
    compile_kernel(triton_chunks._copy_kernel, capability, pointers, constants, 2)


if __name__ == "__main__":
    main(int(sys.argv[1]))
