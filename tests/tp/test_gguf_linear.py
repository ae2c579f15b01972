"""GGUF files of models with linear attention: texts are transformers' with the file's numbers; the configuration is the
checkpoint's; what is not read is refused in one line."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mtp import Head, hidden_states
from spmd import run_jobs
from tiny import greedy_oracle, save_llama

gguf = pytest.importorskip("gguf", reason="the package gguf writes the files")

from gguf import GGMLQuantizationType as Form  # noqa: E402
from gguf_files import HYBRIDS, save_gguf  # noqa: E402
from triforce.offload import Engine, Sampling  # noqa: E402
from triforce.offload.caches.full import FullCache  # noqa: E402
from triforce.offload.caches.hidden_states import HiddenStates  # noqa: E402
from triforce.offload.caches.streaming import StreamingCache  # noqa: E402
from triforce.tp.decoder import Decoder  # noqa: E402
from triforce.tp.errors import ModelError  # noqa: E402
from triforce.tp.matrices import ModelMatrices  # noqa: E402
from triforce.tp.model.config import ModelConfig  # noqa: E402
from triforce.tp.weights.checkpoint import Checkpoint  # noqa: E402
from triforce.tp.weights.registry import find_model  # noqa: E402

CPU = torch.device("cpu")
PROMPT = torch.randint(290, (200,), generator=torch.Generator().manual_seed(3)).tolist()
WHOLE = {"whole_inputs": True}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))


def mixed(name: str) -> Form:
    """As files of the kind Q4_K_M are: small matrices wide, some in more bits than others."""
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")):
        return Form.F32
    return Form.Q6_K if name == "lm_head.weight" or "down_proj" in name else Form.Q4_K


@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        ("qwen3.5", mixed, {}),
        ("qwen3.5", Form.F32, {"linear_num_value_heads": 2}),
        ("qwen3.5-moe", Form.Q8_0, {"predicting": True, "fused_experts": True}),
        ("qwen3-next", Form.F32, {}),
        pytest.param("qwen3-next", Form.F32, WHOLE, marks=pytest.mark.slow),
        pytest.param("qwen3-next", mixed, {}, marks=pytest.mark.slow),
        pytest.param("qwen3.5", Form.F16, {"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", Form.F32, {}, marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", mixed, {}, marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_transformers_with_the_numbers(tmp_path, family, form, changes):
    """In memory, and streamed with a draft."""
    model = save_gguf(tmp_path / "target", family, form if form is mixed else lambda name: form, seed=1, **changes)
    save_llama(tmp_path / "draft", seed=9, num_hidden_layers=1, hidden_size=32, vocab_size=300)
    found = []
    for tiers, resident in ((1, None), (2, 0.0)):
        kind = {"device": "cpu", "dtype": "float32", "tiers": tiers, "resident": resident, "budget": 64}
        engine = Engine.load(find_model(tmp_path / "target.gguf"), tmp_path / "draft", **kind)
        found.append(engine.generate(PROMPT, Sampling(0.0), 16).token_ids)
    want = greedy_oracle(model, PROMPT, len(found[0]), found[0])
    assert len(want) == 16 and found == [want] * 2


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in HYBRIDS), ("qwen3-next", WHOLE)], ids=str)
def test_a_model_is_all_that_its_checkpoint_is(tmp_path, family, changes):
    """Its configuration, the bytes that a plan counts, and its logits."""
    model = save_gguf(tmp_path / "m", family, mixed, keys={"tokenizer.ggml.pre": "qwen35"}, **changes)
    config, twin = ModelConfig.load(find_model(tmp_path / "m.gguf")), ModelConfig.load(tmp_path / "m")
    names = "num_layers", "kv_layers", "rope", "rotary_dim", "qk_norm", "output_gate", "float32_norms", "head_dim"
    for name in (*names, "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(twin, name), name
    linear, theirs = config.linear, twin.linear
    assert linear and theirs
    for name in ("layers", "key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
        assert getattr(linear, name) == getattr(theirs, name), name
    assert linear.tiled == (family != "qwen3-next") and linear.plain_decay and not config.zero_centred_norms
    if config.experts and twin.experts:
        for name in ("count", "used", "normalised", "shared_width"):
            assert getattr(config.experts, name) == getattr(twin.experts, name), name
        assert config.intermediate_size == twin.intermediate_size
    decoder = Decoder.load(find_model(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)
    held = {tensor.data_ptr(): tensor.nbytes for part, tensor in decoder.held() if part == "weights"}
    assert sum(held.values()) == ModelMatrices.of(config).num_bytes(torch.float32)
    cache = FullCache.on_device(config, decoder.rope, dtype=torch.float32, device=CPU, capacity=len(PROMPT))
    found = decoder.forward(torch.tensor(PROMPT), cache, num_logits=len(PROMPT))
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    errors = (found - want).abs().amax(dim=1) / want.std()
    # What is read from a state is normed, so that a few rows are as exact as sums that cancel.
    largest = float(errors.max())
    assert errors.median() < 1e-4 and largest < 0.03, f"logits differ by {largest} of their standard deviation"


@pytest.mark.parametrize("form", [Form.F32, Form.F16, Form.BF16, Form.Q8_0], ids=lambda form: form.name)
def test_vectors_and_convolutions_do_not_decide_the_number_format(tmp_path, form):
    save_gguf(tmp_path / "m", "qwen3.5-moe", lambda name: form)
    want = {Form.F32: torch.float32, Form.F16: torch.float16}.get(form, torch.bfloat16)
    assert ModelConfig.load(find_model(tmp_path / "m.gguf")).dtype == want


@pytest.mark.parametrize("family", HYBRIDS)
def test_its_multi_token_prediction_head_is_read(tmp_path, family):
    """Its logits are the reference's; and a text that it drafts for is the target's."""
    model = save_gguf(tmp_path / "m", family, lambda name: Form.F32, predicting=True)
    directory = find_model(tmp_path / "m.gguf")
    target = Decoder.load(directory, dtype=torch.float32, device=CPU)
    head = Decoder.mtp_head(Checkpoint(directory, torch.float32, CPU, further_tokens=True), target)
    states = hidden_states(model, PROMPT)
    known = HiddenStates(target)
    known._rows[: len(states)], known.known = states, range(len(states))
    cache = StreamingCache(head, hidden_states=known)
    cache.skip(1)
    found = head.forward(torch.tensor(PROMPT[1:]), cache, num_logits=len(PROMPT) - 1)
    assert (found - Head(model, 2)(PROMPT[1:], states[:-1])[1]).abs().max() < 1e-3
    engine = Engine.load(directory, "mtp", device="cpu", dtype="float32", budget=64)
    assert engine.generate(PROMPT, Sampling(0.0), 20).token_ids == greedy_oracle(model, PROMPT, 20)


def test_a_file_without_a_head_has_none(tmp_path):
    save_gguf(tmp_path / "m", "qwen3.5", mixed)
    with pytest.raises(ModelError, match="is not there, or not of this kind; --draft mtp needs a head"):
        Engine.load(find_model(tmp_path / "m.gguf"), "mtp", device="cpu")


def test_layers_may_be_listed(tmp_path):
    kinds = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    keys = {"{arch}.attention.recurrent_layers": [True, True, False, False, False]}
    save_gguf(tmp_path / "m", "qwen3.5", mixed, keys=keys, layer_types=kinds, predicting=True)
    config = ModelConfig.load(find_model(tmp_path / "m.gguf"))
    assert config.linear and config.linear.layers == (0, 1) and config.num_layers == 4
    Decoder.load(find_model(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.inner_size", 100, "100, which 6 heads cannot share"),
        ("ssm.state_size", "x", "a whole number above 0"),
        ("ssm.group_count", 0, "a whole number above 0"),
        ("rope.dimension_count", 66, "an even number up to 64"),
        ("rope.dimension_count", 15, "an even number up to 64"),
        ("nextn_predict_layers", 4, "'4' of 4 blocks"),
        ("attention.recurrent_layers", [True, False], "no list of 4 truth values"),
        ("attention.sliding_window", 4096, "sliding windows are not supported"),
    ],
)
def test_keys_that_are_not_read_are_named(tmp_path, key, value, message):
    save_gguf(tmp_path / "m", "qwen3.5", mixed, keys={f"{{arch}}.{key}": value})
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path / "m.gguf")


def test_value_heads_of_key_heads_are_runs_of_neighbours(tmp_path):
    save_gguf(tmp_path / "m", "qwen3.5", mixed)
    linear = ModelConfig.load(find_model(tmp_path / "m.gguf")).linear
    assert linear and linear.tiled
    assert linear.value_heads_of(slice(1, 2)) == (slice(1, 2), slice(3, 4), slice(5, 6))
    assert linear.value_heads_of(slice(0, 2)) == (slice(0, 6),)
    assert replace(linear, tiled=False).value_heads_of(slice(1, 2)) == (slice(3, 6),)


@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        ("qwen3.5", Form.Q8_0, {}),
        pytest.param("qwen3.5", Form.Q4_K, {"linear_value_head_dim": 256}, marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", Form.F32, {}, marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", Form.Q4_1, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next", Form.Q8_0, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next", Form.Q8_0, WHOLE, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(tmp_path, family, form, changes):
    model = save_gguf(tmp_path / "target", family, lambda name: form, head_dim=128, **changes)
    job: dict[str, Any] = {"model": str(find_model(tmp_path / "target.gguf")), "draft": None, "device": "cpu"}
    job |= {"dtype": "float32", "prompt": PROMPT, "new_tokens": 20, "settings": {"tiers": 2, "budget": 64}}
    (reports,) = run_jobs([job], 2)
    assert all(report["token_ids"] == greedy_oracle(model, PROMPT, 20) for report in reports)
