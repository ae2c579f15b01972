"""Which implementation computes a call: by device and call alone, or as chosen by hand."""

import pytest
import torch
from tiny import random_tokens, save_llama
from triforce.kernels.attention import choose_backend, takes_blocks
from triforce.kernels.cpu.library import Level, cpu_level
from triforce.kernels.selection import Backend, Selection, selected, use_kernels
from triforce.offload.caches.full import FullCache
from triforce.tp.decoder import Decoder

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
        ("triton", {"is_step": False, "flash_mask": False}),
        ("triton", {"is_step": False, "packages": {"triton"}, "head_dim": 100}),
        ("flash_package", {"is_step": False}),
        ("flash_cuda", {"is_step": False, "packages": {"triton"}}),
        ("flash_cuda", {"is_step": False, "packages": set()}),
        ("plain", {"packages": set()}),
        ("plain", {"is_step": False, "dtype": torch.float32}),
        ("plain", {"dtype": torch.float64}),
        ("plain", {"head_dim": 512}),
        ("plain", {"capability": (7, 5)}),
        ("plain", {"capability": None}),
        ("plain", {"capability": None, "is_step": False, "flash_mask": False}),
        ("flash_cpu", {"capability": None, "is_step": False}),
        *(("compiled", CPU | {"level": level}) for level in KERNELS),
        *(("compiled", CPU | {"level": level, "is_step": False, "flash_mask": False}) for level in KERNELS),
        *(("compiled", CPU | {"level": level, "is_step": False}) for level in KERNELS),
    ],
)
def test_the_backend_follows_from_device_packages_and_call(want, changes):
    usual = {
        "capability": (8, 9),
        "packages": {"triton", "flash_attn"},
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "is_step": True,
        "flash_mask": True,
    }
    assert choose_backend(**(usual | changes)) == want


@pytest.mark.parametrize("step", [True, False])
def test_a_choice_by_hand_is_for_steps_prefill_or_both(step):
    assert Selection().backend(step) is None
    assert Selection(attention="plain").backend(step) == "plain"
    assert Selection(attention="plain", prefill="flash_cpu").backend(step) == ("plain" if step else "flash_cpu")


def test_a_choice_by_hand_ends_where_it_should_even_after_an_error():
    with pytest.raises(ZeroDivisionError), use_kernels(attention="plain", layers="plain"):
        with use_kernels(prefill="flash_cpu"):
            assert selected() == Selection(prefill="flash_cpu")
        assert selected() == Selection("plain", layers="plain")
        raise ZeroDivisionError
    assert selected() == Selection()


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
