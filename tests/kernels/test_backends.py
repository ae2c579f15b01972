"""Which implementation computes a call: by device and call alone, or as chosen by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import error_of, oracle, random_qkv
from tiny import random_tokens, save_llama
from triforce.kernels import attention, layers
from triforce.kernels.attention import FEW_ROWS, attend, attend_blocks, choose_backend, takes_blocks
from triforce.kernels.cpu.library import Level, cpu_level, instructions, supported_level
from triforce.kernels.selection import Backend, Selection, selected, use_kernels
from triforce.offload.caches.full import FullCache
from triforce.tp.model.decoder import Decoder

CPU = {"capability": None}
KERNELS = [level for level in Level if level > Level.NONE]
compiled = pytest.mark.skipif(
    cpu_level() == Level.NONE, reason="the compiled kernels were not built, or this processor cannot run them"
)


@pytest.mark.parametrize(
    ("want", "changes"),
    [
        ("triton", {}),
        ("triton", {"dtype": torch.float32}),
        ("triton", {"few_rows": False, "flash_mask": False}),
        ("triton", {"few_rows": False, "packages": {"triton"}, "head_dim": 100}),
        ("flash_package", {"few_rows": False}),
        ("flash_cuda", {"few_rows": False, "packages": {"triton"}}),
        ("flash_cuda", {"few_rows": False, "packages": set()}),
        ("plain", {"packages": set()}),
        ("plain", {"few_rows": False, "dtype": torch.float32}),
        ("plain", {"dtype": torch.float64}),
        ("plain", {"head_dim": 512}),
        ("plain", {"capability": (7, 5)}),
        ("plain", {"capability": None}),
        ("plain", {"capability": None, "few_rows": False, "flash_mask": False}),
        ("flash_cpu", {"capability": None, "few_rows": False}),
        *(("compiled", CPU | {"level": level}) for level in KERNELS),
        *(("compiled", CPU | {"level": level, "few_rows": False, "flash_mask": False}) for level in KERNELS),
        *(("compiled", CPU | {"level": level, "few_rows": False}) for level in KERNELS),
    ],
)
def test_the_backend_follows_from_device_packages_and_call(want, changes):
    usual = {
        "capability": (8, 9),
        "packages": {"triton", "flash_attn"},
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "few_rows": True,
        "flash_mask": True,
    }
    assert choose_backend(**(usual | changes)) == want


@pytest.mark.parametrize("few_rows", [True, False])
def test_a_choice_by_hand_is_for_steps_prefill_or_both(few_rows):
    assert Selection().backend(few_rows) is None
    assert Selection(attention="plain").backend(few_rows) == "plain"
    assert Selection(attention="plain", prefill="flash_cpu").backend(few_rows) == ("plain" if few_rows else "flash_cpu")


def test_a_choice_by_hand_ends_where_it_should_even_after_an_error():
    with pytest.raises(ZeroDivisionError), use_kernels(attention="plain", layers="plain"):
        with use_kernels(prefill="flash_cpu"):
            assert selected() == Selection(prefill="flash_cpu")
        assert selected() == Selection("plain", layers="plain")
        raise ZeroDivisionError
    assert selected() == Selection()


@pytest.mark.parametrize("wanted", ["plain", "compiled", "flash_cpu"])
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize(("diagonal", "window"), [(230, None), (230, 50), (-20, None), (None, None)])
def test_every_choice_computes_every_call(wanted, n, diagonal, window):
    """Also those that the implementation is not for, which another computes."""
    for dtype, head_dim in [(torch.float32, 64), (torch.float32, 24), (torch.float64, 64)]:
        q, k, v = random_qkv((4, 2, head_dim), n, 300, dtype)
        with use_kernels(attention=wanted):
            got = attend(q, k, v, scale=0.2, diagonal=diagonal, window=window)
        assert error_of(got, oracle(q, k, v, 0.2, diagonal, window)) < 2e-5


@compiled
def test_blocks_are_attended_at_once_where_the_compiled_kernels_are_in_use():
    q, blocks = torch.randn(4, 40, 64), torch.randn(3, 2, 2, 128, 64)
    assert takes_blocks(q, blocks)
    choices: dict[Backend, bool] = {"plain": False, "triton": False, "compiled": True}
    for wanted, taken in choices.items():
        with use_kernels(attention=wanted):
            assert takes_blocks(q, blocks) == taken
    with use_kernels(prefill="flash_cpu"):
        assert takes_blocks(q, blocks)


@compiled
@pytest.mark.parametrize("block_size", [64, 2048])
@pytest.mark.parametrize("n", [FEW_ROWS + 1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.slow(keep=1)
def test_prefill_by_the_flash_kernel_reads_blocks_as_the_compiled_kernels_do(monkeypatch, dtype, n, block_size):
    """What is done where the kernels were not built, here by choice, in segments of a quarter of the usual size."""
    monkeypatch.setattr(attention, "_SEGMENT", 4096)
    g = torch.Generator().manual_seed(1)
    blocks = torch.randn(6144 // block_size, 2, 2, block_size, 64, generator=g).to(dtype)
    q = torch.randn(n, 6, 64, generator=g).to(dtype).transpose(0, 1)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for start, window in [(0, None), (500, None), (4096 - n, None), (5001, 7500), (700, 100)]:
        m = -(-(start + n) // 8) * 8
        hidden = blocks.clone()
        flat = hidden.permute(1, 2, 0, 3, 4).flatten(2, 3)
        hidden[(start + n) // block_size, :, :, (start + n) % block_size :] = 9e9  # what no row sees
        want_mass, mass = torch.empty(6, 8, m // 8), torch.empty(6, 8, m // 8)
        call = {"scale": 0.125, "diagonal": start, "window": window}
        want = attend_blocks(q, hidden, m, **call, mass=want_mass)
        with use_kernels(prefill="flash_cpu"):
            got = attend_blocks(q, hidden, m, **call, mass=mass)
        exact = oracle(q, flat[0, :, :m], flat[1, :, :m], 0.125, start, window)
        assert error_of(want, exact) < rounding
        assert error_of(got, exact) < rounding, f"from {start}, window {window}"
        assert torch.allclose(mass, want_mass, rtol=0.03 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_after_a_prefill_by_the_flash_kernel_stay_with_the_compiled_kernels(dtype, tmp_path):
    save_llama(tmp_path, num_key_value_heads=2, head_dim=32)
    decoder = Decoder.load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    prompt, step = torch.tensor(random_tokens(700)), torch.tensor([5])

    def run(prefill, attention=None):
        cache = FullCache.on_device(
            decoder.config, decoder.rope, dtype=dtype, device=decoder.device, capacity=768, chunk_size=8
        )
        with use_kernels(attention=attention, prefill=prefill):
            logits = decoder.forward(prompt, cache, num_logits=40)
            mass = [cache.recent_mass(layer) for layer in range(decoder.config.num_layers)]
            before = cache.length
            stepped = decoder.forward(step, cache)
        cache.rollback(before)
        return logits, mass, stepped, decoder.forward(step, cache)

    want, got = run("compiled"), run("flash_cpu")
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * want[0].abs().max().item()
    assert (got[0] - want[0]).abs().max() < tolerance
    for mass, want_mass in zip(got[1], want[1], strict=True):
        assert torch.allclose(mass, want_mass, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
    assert torch.equal(got[2], got[3])  # the choice for prefill changes no step


def test_layers_can_be_computed_without_the_compiled_kernels():
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    with use_kernels(layers="plain"):
        assert torch.equal(layers.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_the_level_is_what_the_system_says_of_the_processor():
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), None)
    if flags is None or cpu_level() == Level.NONE:
        pytest.skip("only Linux on x86 lists the processor's features, and the kernels are needed")
    assert {"avx2", "fma"} <= flags
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    assert (supported_level() >= Level.AVX512) == avx512
    assert (supported_level() >= Level.AVX512_BF16) == (avx512 and "avx512_bf16" in flags)
    if supported_level() == Level.AMX:  # the system may refuse it
        assert {"amx_tile", "amx_bf16"} <= flags
    assert instructions()


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_run_on_the_cpu_does_not_import_triton():
    done = run_python(
        "import sys, torch; from triforce.kernels.attention import attend; import triforce.offload\n"
        "x = torch.randn(2, 40, 16); attend(x, x, x, scale=1.0); attend(x[:, :1], x, x, scale=1.0)\n"
        "print('triton' in sys.modules)"
    )
    assert done.stdout.split() == ["False"], done.stderr
