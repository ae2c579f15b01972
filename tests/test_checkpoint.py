"""A model directory that cannot be used is refused with what is wrong and where; a good one is read once and let go."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_tokens, save_llama
from triforce.offload.full_cache import FullCache
from triforce.tp.config import ModelConfig
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError

CPU = torch.device("cpu")


def load(directory):
    return Decoder.load(directory, dtype=torch.float32, device=CPU)


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (config | changes).items() if v != "absent"}))


def change_weights(directory, change):
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel, which is not supported; supported: Llama",
        ),
        ({"architectures": 5}, "5, which is not supported"),
        ({"architectures": []}, r"\(none\), which is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "does not give 'factor'"),
        ({"rope_parameters": "yarn"}, "RoPE parameters that are not an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu', which is not supported; supported: silu"),
        ({"hidden_size": "absent"}, "does not give 'hidden_size'"),
        ({"hidden_size": "wide"}, "a value of the wrong kind"),
        ({"num_attention_heads": 0, "head_dim": None}, "a value of the wrong kind"),
        ({"eos_token_id": [[1]]}, "a value of the wrong kind"),
        ({"num_key_value_heads": 3}, "describes no possible model"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_an_impossible_config_is_refused(tmp_path, changes, words):
    save_llama(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        ModelConfig.load(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_end_of_sequence_ids_come_as_one_or_several(tmp_path, eos, want):
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    change_config(tmp_path, eos_token_id=eos)
    assert ModelConfig.load(tmp_path).eos_token_ids == want


def test_weights_that_do_not_fit_the_config_are_named(tmp_path):
    save_llama(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    change_weights(tmp_path, lambda w: w.update({name: torch.zeros(3, 4)}))
    with pytest.raises(ModelError, match=rf"{name} in .* has shape \(3, 4\); its config says \(64, 96\)"):
        load(tmp_path)
    change_weights(tmp_path, lambda w: w.pop(name))
    with pytest.raises(ModelError, match=f"lack the tensor {name}"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(tmp_path, dtype):
    save_llama(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(tmp_path, lambda w: w.update({name: w[name].to(dtype)}))
    with pytest.raises(ModelError, match=f"{name} in .* quantised weights are not supported"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", "not json", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_damaged_index_is_refused(tmp_path, index):
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path):
    save_llama(tmp_path)
    decoder = load(tmp_path)
    tokens = torch.tensor(random_tokens(20))

    def logits():
        cache = FullCache(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=32)
        return decoder.forward(tokens, cache)

    before = logits()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(logits(), before)
