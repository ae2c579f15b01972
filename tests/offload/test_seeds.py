"""A seed is a text: the tokens do not depend on what drafted them, where keys and values live, or threads.

In float32, and in bfloat16 where a row's bits depend on the row alone: with the compiled kernels, or where rows are
padded.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from mtp import Head
from quantised import FORMATS, save_quantised
from spmd import run_jobs
from tiny import random_tokens, save_families
from triforce.kernels import Level, cpu_level, linear, padded_rows, use_kernels
from triforce.offload import Engine, Sampling

PROMPT = random_tokens(620, seed=3)
NEW_TOKENS = 24

OTHERS = ("qwen2", "qwen3-bias", "qwen3-moe", "mixtral", "gemma3", "qwen3.5", "qwen3-next")
IN_FEW_BITS = {"qwen3-moe": "packed-zeros", "mixtral": "fp8", "gemma3": "gptq-8-bits", "qwen3.5-moe": "gptq"}
"""Families whose matrices are stored in few bits, too, and the format."""

WITH_HEAD = ("qwen3.5-moe",)
"""Of these, those with a multi-token-prediction head."""

FAMILIES = ("llama", "mistral-window", *OTHERS, *(f"{family}-{form}" for family, form in IN_FEW_BITS.items()))
compiled_products = pytest.mark.skipif(
    cpu_level() < Level.AVX512_BF16, reason="the compiled kernels are not installed, or not for this CPU"
)
ARITHMETICS = [
    pytest.param("float32", "auto", False, id="float32"),
    pytest.param("bfloat16", "on", False, id="bfloat16, padded"),
    pytest.param("bfloat16", "on", True, id="bfloat16, padded, plain"),
    pytest.param("bfloat16", "off", False, marks=compiled_products, id="bfloat16, compiled"),
]


KEPT = (
    *("0-llama-float32", "1-mistral-window-bfloat16, padded", "0-qwen3-bias-bfloat16, padded, plain"),
    "0-qwen3.5-moe-gptq-bfloat16, padded",
)
"""Cases of the fast tests: of each arithmetic that any CPU has one, and of each kind of attention."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """For each family a target and a draft that often agrees with it: the target's own first layers."""
    root = save_families(tmp_path_factory.mktemp("families"), ("llama", "mistral-window", *OTHERS))
    for family, form in IN_FEW_BITS.items():
        model = save_quantised(root / f"{family}-{form}", FORMATS[form], family, seed=1, hidden_size=128, head_dim=32)
        if family in WITH_HEAD:
            Head(model, seed=2).save(root / f"{family}-{form}")
    return root


def random_settings(rng: random.Random) -> dict:
    """Anything that must not change the text."""
    return {
        "budget": rng.choice([64, 256]),
        "chunk_size": rng.choice([1, 8, 16, 64]),
        "draft_length": rng.choice([1, 2, 5, 11, None]),
        "block_length": rng.choice([1, 3, 8, 24, 31, 32, 40, 70, 128, None]),
        "refresh": rng.choice(["round", "never", "auto", 3]),
        "resident": rng.choice([None, None, 0.0, 1e-4]),
        "early_end": rng.choice(["auto", "auto", "off", 0.05, 0.5]),
    }


def random_sampling(rng: random.Random) -> Sampling:
    top_p, top_k, min_p = rng.choice(
        [(1.0, 0, 0), (0.9, 0, 0), (0.5, 0, 0), (1.0, 12, 0), (0.8, 40, 0.1), (1.0, 0, 0.05)]
    )
    return Sampling(rng.choice([0.3, 0.6, 1.0, 1.5]), top_p, top_k, rng.randrange(2**40), min_p=min_p)


def texts(checkpoints, family: str, dtype: str, exact: str, plain: bool, seed: int) -> tuple[list[int], list[int]]:
    """What is drawn token by token, and with some settings; both with the same seed, after a follow-up.

    Args: `plain`: with PyTorch's operations alone, whose prefill depends on what is resident: both have the same then.
    """
    rng = random.Random(f"{family} {dtype} {plain} {seed}")
    sampling, settings, tiers = random_sampling(rng), random_settings(rng), rng.choice([2, 3, 3])
    read_before = rng.choice([0, 100, 250, 500])
    heads = ["mtp", "mtp,lookup"] if family.startswith(WITH_HEAD) else []
    pair = checkpoints / family, rng.choice(heads or [checkpoints / "draft"])
    given: dict[str, Any] = {"device": "cpu", "dtype": dtype, "exact": exact}
    alone = {"tiers": 1, "resident": settings["resident"] if plain else None}
    threads, found = torch.get_num_threads(), []
    backends: dict[str, Any] = {"attention": "plain", "layers": "plain"} if plain else {}
    torch.set_num_threads(rng.choice([1, 2]))
    try:
        for engine in (Engine.load(*pair, **given, **settings), Engine.load(*pair, **given, **alone)):
            with use_kernels(**backends):
                if read_before:
                    engine.generate(PROMPT[:read_before], sampling, 1)
                answer = engine.generate(
                    PROMPT, sampling, NEW_TOKENS, ignore_eos=True, tiers=min(tiers, engine.settings.tiers)
                )
            found.append(answer.token_ids)
    finally:
        torch.set_num_threads(threads)
    return found[0], found[1]


@pytest.mark.parametrize(("dtype", "exact", "plain"), ARITHMETICS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow(keep=KEPT)
def test_a_seed_is_one_text(checkpoints, family, dtype, exact, plain, seed):
    got, want = texts(checkpoints, family, dtype, exact, plain, seed)
    assert got == want


def test_without_padded_rows_general_products_round_otherwise_for_more_rows():
    """What the padding is for: where this is skipped, the tests above show nothing about it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((40, 512), (300, 512)))
    for padded in (True, False):
        with use_kernels(layers="plain"), padded_rows(padded):
            together = linear(x, weight)
            same = [torch.equal(together[:n], linear(x[:n], weight)) for n in (1, 2, 5, 17, 32, 33)]
            same += [torch.equal(together[i : i + 1], linear(x[i : i + 1], weight)) for i in range(40)]
        if padded:
            assert all(same)
        elif all(same):
            pytest.skip("PyTorch's products give the same bits for any number of rows on this processor")


def test_a_follow_up_continues_the_text_of_its_seed(checkpoints):
    """Positions are those in the text: reading on after a part of the answer draws the rest of it."""
    engine = Engine.load(checkpoints / "llama", checkpoints / "draft", device="cpu", dtype="float32")
    sampling = Sampling(1.0, 1.0, seed=4)
    whole = engine.generate(PROMPT, sampling, 30, ignore_eos=True).token_ids
    rest = engine.generate(PROMPT + whole[:11], sampling, 19, ignore_eos=True).token_ids
    assert rest == whole[11:]
    assert engine.generate(PROMPT, replace(sampling, seed=5), 30, ignore_eos=True).token_ids != whole


@pytest.mark.slow
def test_on_two_ranks_a_seed_is_one_text(checkpoints):
    job = {"model": str(checkpoints / "mistral-window"), "draft": str(checkpoints / "draft"), "prompt": PROMPT}
    job |= {"new_tokens": 40, "temperature": 1.0, "seed": 6}
    settings = [{"tiers": 1}, {"tiers": 2, "block_length": 9}, {"draft_length": 2, "block_length": 40, "resident": 0.0}]
    jobs = [
        job | {"dtype": dtype, "settings": {"budget": 64, "exact": "on"} | given}
        for dtype in ("float32", "bfloat16")
        for given in settings
    ]
    texts = [[report["token_ids"] for report in reports] for reports in run_jobs(jobs, 2)]
    for of_dtype in (texts[:3], texts[3:]):
        assert all(ids == of_dtype[0][0] for reports in of_dtype for ids in reports)
