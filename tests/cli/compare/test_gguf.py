"""The GGUF file for llama.cpp holds the same model: transformers, which reads such files too, computes the same."""

import pytest
import torch
from tiny import LLAMA3, SHAPES, random_tokens, save_family, save_llama
from transformers import LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")

from triforce.tp.errors import ModelError  # noqa: E402
from triforce.tp.weights.gguf_file import write_gguf  # noqa: E402


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("shape", ["mha", "gqa", "tied", "wide-heads"])
def test_rows_of_queries_and_keys_pair_up_as_interleaved_rope_wants_them(tmp_path, shape):
    """The definition of both rotations: rotating the file's rows in neighbouring pairs gives what rotating halves of
    the checkpoint's does, up to the order of rows, which a dot product of query and key does not see."""
    model = save_llama(tmp_path, **SHAPES[shape])
    write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
    tensors, config = tensors_of(tmp_path / "model.gguf"), model.config
    weights, before = model.state_dict(), "model.layers.1."
    dim = weights[f"{before}self_attn.q_proj.weight"].shape[0] // config.num_attention_heads
    angles = 0.3 * torch.arange(1, dim // 2 + 1)
    x = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(0))

    def halves(rows):
        a, b = rows.unflatten(0, (-1, 2, dim // 2)).unbind(1)
        return a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()

    def neighbours(rows):
        a, b = rows.unflatten(0, (-1, dim // 2, 2)).unbind(2)
        return a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()

    for part in "qk":
        written = torch.from_numpy(tensors[f"blk.1.attn_{part}.weight"].data.copy())
        weight = weights[f"{before}self_attn.{part}_proj.weight"]
        for ours, theirs in zip(neighbours(written @ x), halves(weight @ x), strict=True):
            torch.testing.assert_close(ours, theirs)
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_v.weight": f"{before}self_attn.v_proj.weight",
        "blk.1.attn_output.weight": f"{before}self_attn.o_proj.weight",
        "blk.1.ffn_down.weight": f"{before}mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for name, theirs in same.items():
        assert torch.equal(torch.from_numpy(tensors[name].data.copy()), weights[theirs]), name
    assert ("output.weight" in tensors) is not config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrices_are_in_the_format_asked_for_and_vectors_in_float32(tmp_path, dtype):
    model = save_llama(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", dtype)
    tensors = tensors_of(tmp_path / "model.gguf")
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    assert {t.tensor_type.name for t in tensors.values() if len(t.shape) == 2} == {kind}
    assert {t.tensor_type.name for t in tensors.values() if len(t.shape) == 1} == {"F32"}
    raw = torch.from_numpy(tensors["blk.0.ffn_up.weight"].data.copy())
    want = model.state_dict()["model.layers.0.mlp.up_proj.weight"].to(getattr(torch, dtype))
    assert torch.equal(raw.view(getattr(torch, dtype)), want)


def test_divisors_of_frequencies_are_those_of_transformers(tmp_path):
    model = save_llama(tmp_path, rope_parameters=LLAMA3)
    write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
    divisors = torch.from_numpy(tensors_of(tmp_path / "model.gguf")["rope_freqs.weight"].data.copy())
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / divisors, model.get_buffer("model.rotary_emb.inv_freq"))
    assert divisors.min() == 1.0
    assert divisors.max() == 8.0


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path):
    save_family(tmp_path / "window", "mistral-window")
    save_family(tmp_path / "hybrid", "qwen3.5")
    with pytest.raises(ModelError, match="hybrid is a Qwen3_5ForCausalLM, which cannot be converted"):
        write_gguf(tmp_path / "hybrid", tmp_path / "a.gguf", "float32")
    with pytest.raises(ModelError, match="sliding windows"):
        write_gguf(tmp_path / "window", tmp_path / "a.gguf", "float32")
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save_llama(tmp_path / "dynamic", rope_parameters=dynamic)
    with pytest.raises(ModelError, match="RoPE scaling 'dynamic'"):
        write_gguf(tmp_path / "dynamic", tmp_path / "b.gguf", "float32")
    for family, words in (
        ("qwen3-next", "mixtures of experts"),
        ("qwen3.5", "is a Qwen3_5ForCausalLM, which cannot be converted for llama.cpp"),
        ("gemma3", "is a Gemma3ForCausalLM, which cannot be converted for llama.cpp"),
    ):
        save_family(tmp_path / family, family)
        with pytest.raises(ModelError, match=words):
            write_gguf(tmp_path / family, tmp_path / "c.gguf", "float32")


@torch.inference_mode()
def test_transformers_reads_the_same_model_from_the_file(tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    model = save_llama(tmp_path, num_key_value_heads=2)
    write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
    again = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([random_tokens(50)])
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
