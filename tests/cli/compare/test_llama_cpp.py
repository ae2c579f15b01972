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
from triforce.offload import Engine
from triforce.offload.speculation.distribution import distribution
from triforce.offload.speculation.sampling import Sampling
from triforce.tp.weights.registry import find_model

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


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3.5", {}), ("qwen3.5-moe", {}), ("qwen3-next", {}), ("qwen3-next", {"whole_inputs": True})],
    ids=["qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen3-next-whole"],
)
def test_it_reads_files_with_linear_attention_as_we_do(tmp_path, monkeypatch, family, changes):
    """In which value heads are tiled, or projections split."""
    from gguf import GGMLQuantizationType as Form
    from gguf_files import save_gguf

    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    model = save_gguf(tmp_path / "m", family, lambda name: Form.F32, seed=1, **changes)
    prompt = random_tokens(150, vocab_size=290, seed=4)
    directory, want = find_model(tmp_path / "m.gguf"), greedy_oracle(model, prompt, 24)
    system = llama_cpp.load(job_for(directory, prompt_ids=prompt, max_new_tokens=24))
    assert system.generate(prompt, [[]], 24).token_ids == want
    engine = Engine.load(directory, device="cpu", dtype="float32", tiers=1)
    assert engine.generate(prompt, Sampling(0.0), 24, ignore_eos=True).token_ids == want


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
