"""llama.cpp on the GGUF file that we write: transformers' greedy tokens for every family, and the same sampling."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import LLAMA3, greedy_oracle, random_tokens, save_family

pytest.importorskip("gguf", reason="gguf is not installed: pip install llama-cpp-python gguf")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install llama-cpp-python gguf")

from triforce.cli.compare.baselines import llama_cpp_baseline as llama_cpp
from triforce.cli.compare.baselines.protocol import Job
from triforce.offload.speculation.distribution import distribution
from triforce.offload.speculation.sampling import Sampling

PROMPT = random_tokens(150, seed=4)


def job_for(directory, **changes):
    """Greedy, in float32; the file is in `directory` when this returns."""
    job = Job(
        system="llama.cpp", model=str(directory), draft=None, given_model="", given_draft=None, device="cpu",
        dtype="float32", prompt_ids=PROMPT, max_new_tokens=32, sampling=Sampling(temperature=0.0), threads=1,
        folder=str(directory),
    )  # fmt: skip
    job = replace(job, **changes)
    llama_cpp.prepare(job)
    return job


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "mistral", "qwen2", "qwen3", "llama3-rope"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, family):
    changes: dict[str, Any] = {"rope_parameters": LLAMA3} if family == "llama3-rope" else {}
    model = save_family(tmp_path, "llama" if changes else family, **changes)
    system = llama_cpp.load(job_for(tmp_path))
    warm_up, timed = (system.generate(PROMPT, [[]], 32) for _ in range(2))
    want = greedy_oracle(model, PROMPT, 32)
    assert warm_up.token_ids == want
    assert timed.token_ids == want
    assert timed.ttft_s > 0
    assert timed.decode_s > 0


def test_sequences_over_one_text_write_what_each_writes_alone(tmp_path):
    model = save_family(tmp_path, "llama")
    questions = [random_tokens(n, seed=n) for n in (3, 9, 1, 600)]
    system: Any = llama_cpp.load(job_for(tmp_path, questions=questions))
    want = [token for question in questions for token in greedy_oracle(model, PROMPT + question, 32)]
    for _ in range(2):
        timed = system.generate(PROMPT, questions, 32)
        assert timed.token_ids == want
        assert timed.first_tokens == 4
        assert timed.ttft_s > 0 and timed.decode_s > 0


@torch.inference_mode()
def test_draws_follow_temperature_then_top_k_then_top_p_then_min_p(tmp_path):
    model = save_family(tmp_path, "llama", initializer_range=0.1)
    sampling = Sampling(temperature=3.0, top_p=0.8, top_k=12, min_p=0.4)
    prompt, draws = PROMPT[:3], 1500
    job = job_for(tmp_path, prompt_ids=prompt, sampling=sampling)
    system = llama_cpp.load(job)
    system.generate(prompt, [[]], 1)
    counts = torch.zeros(97)
    for seed in range(draws):
        system._job = replace(job, sampling=replace(sampling, seed=seed))
        counts[system.generate(prompt, [[]], 1).token_ids[0]] += 1
    exact = distribution(model(torch.tensor([prompt])).logits[0, -1:], sampling)[0]
    apart = 0.5 * float((counts / draws - exact).abs().sum())
    assert int((exact > 0).sum()) > 4
    assert not counts[exact == 0].any(), "a token that the filters leave out"
    assert apart < 0.06, f"{apart:.3f} in total variation"
