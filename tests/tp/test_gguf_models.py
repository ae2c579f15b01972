"""GGUF files as models: texts are transformers' with the file's numbers; damaged files are refused in one line."""

import json
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from profiles import share
from spmd import run_jobs
from tiny import LLAMA3, greedy_oracle, save_llama

gguf = pytest.importorskip("gguf", reason="the package gguf writes the files")

from gguf import GGMLQuantizationType as Form  # noqa: E402
from gguf_files import HYBRIDS, save_gguf, vocabulary  # noqa: E402
from triforce.kernels import use_kernels  # noqa: E402
from triforce.offload import ContextRequest, ContextStore, Engine, Request, Sampling  # noqa: E402
from triforce.offload.caches.full import FullCache  # noqa: E402
from triforce.tp.decoder import Decoder  # noqa: E402
from triforce.tp.errors import ModelError  # noqa: E402
from triforce.tp.matrices import ModelMatrices, QuantisedWeight  # noqa: E402
from triforce.tp.model.config import ModelConfig  # noqa: E402
from triforce.tp.weights.checkpoint import Checkpoint  # noqa: E402
from triforce.tp.weights.gguf_header import GgufHeader  # noqa: E402
from triforce.tp.weights.registry import find_model  # noqa: E402
from triforce.tp.weights.tokenizer import Tokenizer  # noqa: E402
from triforce.tp.weights.weight_files import GGUF_INDEX  # noqa: E402

CPU = torch.device("cpu")
PROMPT = torch.randint(290, (300,), generator=torch.Generator().manual_seed(3)).tolist()
FORMS = [Form.Q8_0, Form.Q4_0, Form.Q4_1, Form.Q5_0, Form.Q5_1, Form.Q4_K, Form.Q5_K, Form.Q6_K, Form.F16, Form.BF16]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))


def mixed(name: str) -> Form:
    """As files of the kind Q4_K_M are: another format for some matrices, the embedding and the head in few bits."""
    if name == "lm_head.weight" or "down_proj" in name:
        return Form.Q6_K
    return Form.Q5_K if "v_proj" in name else Form.Q4_K


def all_in(form: Form):
    return lambda name: form


@pytest.mark.parametrize(
    ("family", "form_of"),
    [("llama", all_in(form)) for form in FORMS]
    + [("llama", mixed), ("llama-tied", mixed), ("mistral", mixed), ("qwen2", mixed), ("qwen3", mixed)]
    + [("llama-bias", all_in(Form.Q8_0)), ("llama", all_in(Form.F32))]
    + [("qwen3-moe", mixed), ("mixtral", mixed), ("qwen3-moe", all_in(Form.F32))]
    + [("gemma3", mixed), ("gemma3", all_in(Form.Q8_0)), ("gemma3", all_in(Form.F32))],
)
def test_greedy_text_is_that_of_transformers_with_the_numbers(tmp_path, family, form_of):
    """Of one to three tiers, in memory and streamed."""
    wide: dict[str, Any] = {"moe_intermediate_size": 256} if family == "qwen3-moe" else {}
    model = save_gguf(tmp_path / "target", family, form_of, seed=1, **wide)
    save_llama(tmp_path / "draft", seed=9, num_hidden_layers=1, hidden_size=32, vocab_size=300)
    target, found = find_model(tmp_path / "target.gguf"), []
    for tiers, resident in ((1, None), (2, 0.0), (3, None)):
        engine = Engine.load(
            target, tmp_path / "draft", device="cpu", dtype="float32", tiers=tiers, resident=resident, budget=64
        )
        found.append(engine.generate(PROMPT, Sampling(0.0), 16).token_ids)
    want = greedy_oracle(model, PROMPT, len(found[0]), found[0])
    assert len(want) == 16 and found == [want] * 3


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gemma3", *HYBRIDS])
@pytest.mark.slow(keep=1)
def test_texts_together_and_of_a_saved_context_are_those_of_transformers(tmp_path, family):
    model = save_gguf(tmp_path / "target", family, all_in(Form.Q8_0), seed=1, predicting=family in HYBRIDS)
    target, store = find_model(tmp_path / "target.gguf"), ContextStore(tmp_path / "contexts", segment_tokens=64)
    draft = "mtp,lookup" if family in HYBRIDS else "lookup"
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "store": store, "budget": 64}
    Engine.load(target, draft, **given).read(PROMPT[:250], "book")
    prompts = [PROMPT, PROMPT[:180], [*PROMPT[:64], *PROMPT[:30]], PROMPT[:1]]
    for resident in (None, 0.0):
        engine = Engine.load(target, draft, resident=resident, **given)
        batch = engine.batch(
            [Request(prompt, Sampling(0.0), 12, ignore_eos=True) for prompt in prompts], contexts=ContextRequest("book")
        )
        for _ in batch:
            pass
        found = [sequence.statistics for sequence in batch.sequences]
        assert [one.token_ids for one in found] == [greedy_oracle(model, prompt, 12) for prompt in prompts]
        assert found[0].reused_tokens == 250
        turn = [*PROMPT, *found[0].token_ids, *PROMPT[30:50]]
        assert engine.generate(turn, Sampling(0.0), 12, ignore_eos=True).token_ids == greedy_oracle(model, turn, 12)
        engine.close()


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
        {"rope_type": "default", "rope_theta": 5e5},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_scaled_as_the_file_says(tmp_path, rope):
    keys: dict = {}
    if rope["rope_type"] in ("linear", "yarn"):
        keys = {"{arch}.rope.scaling.type": rope["rope_type"], "{arch}.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    model = save_gguf(
        tmp_path / "target", "llama", mixed, keys=keys, rope_parameters=rope, rope_freqs=rope["rope_type"] == "llama3"
    )
    config = ModelConfig.load(find_model(tmp_path / "target.gguf"))
    twin = ModelConfig.load(tmp_path / "target")
    assert config.rope == twin.rope and config.max_position_embeddings == twin.max_position_embeddings
    engine = Engine.load(find_model(tmp_path / "target.gguf"), device="cpu", dtype="float32", tiers=1)
    assert engine.generate(PROMPT, Sampling(0.0), 20).token_ids == greedy_oracle(model, PROMPT, 20)


def test_a_model_is_all_that_its_checkpoint_is(tmp_path):
    """Configuration, ends of generation, tokenizer and template, and weights within 5 % of the file's bytes."""
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    keys = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 290}
    save_gguf(tmp_path / "some-model", "qwen3", mixed, keys=keys)
    directory = find_model(tmp_path / "some-model.gguf")
    assert directory == find_model(tmp_path / "some-model.gguf") and directory.name == "some-model"
    config, twin = ModelConfig.load(directory), ModelConfig.load(tmp_path / "some-model")
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope", "qk_norm"):
        assert getattr(config, name) == getattr(twin, name), name
    assert config.eos_token_ids == (290, 298, 299)  # of a sequence, of a turn, and <|im_end|>
    assert config.quantisation is not None and config.quantisation.name == "GGUF (Q4_K, Q5_K, Q6_K)"
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode("the other hour, 12", True)) == "the other hour, 12"
    assert tokenizer.chat is not None and tokenizer.chat("hi", None) == "<|im_start|>user\nhi<|im_end|>\n"
    held = sum(tensor.nbytes for part, tensor in Decoder.load(directory, dtype=torch.bfloat16, device=CPU).held()
               if part == "weights")  # fmt: skip
    in_file = sum(tensor.num_bytes for tensor in GgufHeader.read(tmp_path / "some-model.gguf").tensors)
    assert held == ModelMatrices.of(config).num_bytes(torch.bfloat16) <= 1.05 * in_file


def kinds_of_layers(layers: int, every: int) -> list[str]:
    """Each `every`th without a window."""
    return ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({}, {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
        ({"{arch}.attention.sliding_window_pattern": 3}, {"layer_types": kinds_of_layers(7, 3)}),
        ({}, {"layer_types": ["full_attention"] * 7}),
        ({"{arch}.attention.sliding_window": 0}, {"layer_types": ["full_attention"] * 7}),
        ({}, {"num_hidden_layers": 62, "head_dim": 32}),
    ],
    ids=["usual", "tied", "rope-of-windows", "pattern", "no-windows", "window-of-0", "27B"],
)  # fmt: skip
def test_gemma3_is_all_that_its_checkpoint_is(tmp_path, keys, changes):
    """The model of 62 layers divides scores by the root of its width by its heads, which no key says."""
    form_of = all_in(Form.Q8_0) if "head_dim" in changes else mixed
    model = save_gguf(tmp_path / "m", "gemma3", form_of, keys=keys, **changes)
    config, twin = ModelConfig.load(find_model(tmp_path / "m.gguf")), ModelConfig.load(tmp_path / "m")
    for name in (
        "sliding_windows", "ropes", "attention_scale", "activation", "float32_norms", "norms_behind",
        "scaled_embedding", "qk_norm", "tie_word_embeddings", "max_position_embeddings", "eos_token_ids",
    ):  # fmt: skip
        theirs = (298, 299) if name == "eos_token_ids" else getattr(twin, name)  # and <|im_end|>
        assert getattr(config, name) == theirs, name
    assert twin.zero_centred_norms and not config.zero_centred_norms
    decoder = Decoder.load(find_model(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)
    held = {tensor.data_ptr(): tensor.nbytes for part, tensor in decoder.held() if part == "weights"}
    assert sum(held.values()) == ModelMatrices.of(config).num_bytes(torch.float32)
    cache = FullCache.on_device(config, decoder.rope, dtype=torch.float32, device=CPU, capacity=len(PROMPT))
    found = decoder.forward(torch.tensor(PROMPT), cache, num_logits=len(PROMPT))
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    error = float((found - want).abs().max() / want.std())
    assert error < 1e-4, f"logits differ by {error} of their standard deviation"


def test_a_turn_of_gemma_ends_whatever_its_token_is_marked_as(tmp_path):
    tokens = [*vocabulary()["tokenizer.ggml.tokens"][:-1], "<end_of_turn>"]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 300}
    save_gguf(tmp_path / "m", "gemma3", mixed, keys=keys)
    assert ModelConfig.load(find_model(tmp_path / "m.gguf")).eos_token_ids == (298, 299)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("final_logit_softcapping", 30.0, "30, which is not supported"),
        ("attention.sliding_window", -1.0, "a whole number above 0"),
        ("attention.sliding_window", [50, 60], "a whole number above 0"),
        ("attention.sliding_window_pattern", 0, "a whole number above 0"),
        ("rope.freq_base_swa", "x", "a number belongs there"),
    ],
)
def test_keys_of_gemma3_that_are_not_read_are_named(tmp_path, key, value, message):
    save_gguf(tmp_path / "m", "gemma3", mixed, keys={f"{{arch}}.{key}": value})
    with pytest.raises(ModelError, match=f"gives gemma3.{key} as .*{message}"):
        find_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("form", [*FORMS, Form.F32, mixed], ids=lambda form: getattr(form, "name", "mixed"))
def test_number_formats_of_files_in_few_bits_are_bfloat16(tmp_path, form):
    save_gguf(tmp_path / "m", "llama", mixed if form is mixed else all_in(form), num_hidden_layers=1)
    want = {Form.F32: torch.float32, Form.F16: torch.float16}.get(form, torch.bfloat16)
    assert ModelConfig.load(find_model(tmp_path / "m.gguf")).dtype == want


def test_a_file_whose_embedding_is_wide_and_head_in_few_bits(tmp_path):
    """And biases of queries and keys, in the order of pairs."""
    model = save_gguf(tmp_path / "m", "llama-bias", lambda name: Form.F16 if "embed" in name else mixed(name))
    engine = Engine.load(find_model(tmp_path / "m.gguf"), device="cpu", dtype="float32", tiers=1)
    assert engine.generate(PROMPT, Sampling(0.0), 20).token_ids == greedy_oracle(model, PROMPT, 20)


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"scaling.factor": 4.0}, ("linear", 4.0)),
        ({"scale_linear": 4.0}, ("linear", 4.0)),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, ("default", 1.0)),
        ({"scaling.type": "none", "scaling.factor": 4.0}, ("default", 1.0)),
    ],
)
def test_a_scaling_without_a_type_is_linear(tmp_path, keys, want):
    """As llama.cpp reads it."""
    keys = {f"{{arch}}.rope.{name}": value for name, value in keys.items()}
    save_gguf(tmp_path / "m", "llama", mixed, keys=keys, num_hidden_layers=1)
    rope = ModelConfig.load(find_model(tmp_path / "m.gguf")).rope
    assert (rope.type, rope.factor) == want


def test_a_directory_that_lacks_a_file_is_made_anew(tmp_path):
    save_gguf(tmp_path / "m", "llama", mixed, num_hidden_layers=1)
    directory = find_model(tmp_path / "m.gguf")
    (directory / "tokenizer.json").unlink()
    assert find_model(tmp_path / "m.gguf") == directory
    Tokenizer.load(directory)
    (directory / GGUF_INDEX).write_text('{"files": 3}')
    with pytest.raises(ModelError, match="cannot be read"):
        Checkpoint(directory, torch.float32, CPU)


def test_a_home_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    save_gguf(tmp_path / "m", "llama", mixed, num_hidden_layers=1)
    monkeypatch.setenv("TRIFORCE_HOME", "/proc/nothing")
    with pytest.raises(ModelError, match="cannot be written"):
        find_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(("count", "used"), [(10**9, 3), (8, 9)])
def test_a_number_of_experts_that_no_model_has_is_refused(tmp_path, count, used):
    keys = {"{arch}.expert_count": count, "{arch}.expert_used_count": used}
    save_gguf(tmp_path / "m", "qwen3-moe", mixed, keys=keys, moe_intermediate_size=256)
    with pytest.raises(ModelError, match=r"gives qwen3moe\.expert_used_count as .* experts; from 1 to all of them"):
        find_model(tmp_path / "m.gguf")


def test_projections_of_one_format_are_one_matrix_on_gpus(tmp_path):
    save_gguf(tmp_path / "m", "llama", mixed)
    directory = find_model(tmp_path / "m.gguf")
    config, checkpoint = ModelConfig.load(directory), Checkpoint(directory, torch.float32, CPU)
    matrices = ModelMatrices.of(config)
    for matrix, parts in ((matrices.mlps[0][0], 1), (matrices.qkv, 3)):
        with use_kernels(as_gpu=()):
            weight = matrix.read(checkpoint, "model.layers.0.", config.quantisation)
        assert isinstance(weight, QuantisedWeight) and len(weight.parts) == parts
        one_by_one = [one.read(checkpoint, "model.layers.0.", config.quantisation) for one in matrix.projections]
        found = torch.cat([part.expand(torch.float32) for part in weight.parts if not isinstance(part, torch.Tensor)])
        want = [part.expand(torch.float32) for part in one_by_one if not isinstance(part, torch.Tensor)]
        assert torch.equal(found, torch.cat(want))


def test_a_model_in_shards(tmp_path):
    model = save_gguf(tmp_path / "whole", "llama", mixed)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    for number, tensors in enumerate((reader.tensors[:5], reader.tensors[5:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number:05}-of-00002.gguf", "llama")
        if number == 1:
            for key, value in vocabulary().items():
                add = writer.add_array if isinstance(value, list) else writer.add_uint32
                (writer.add_string if isinstance(value, str) else add)(key, value)
            for key in reader.fields:
                if key.startswith("llama."):
                    value = reader.fields[key].contents()
                    (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    target = find_model(tmp_path / "m-00001-of-00002.gguf")
    assert target.name == "m"
    engine = Engine.load(target, device="cpu", dtype="float32", tiers=1)
    assert engine.generate(PROMPT, Sampling(0.0), 10).token_ids == greedy_oracle(model, PROMPT, 10)
    with pytest.raises(ModelError, match="later part"):
        find_model(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match="lacks m-00002-of-00002"):
        find_model(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelError, match="no longer exists"):
        Checkpoint(target, torch.float32, CPU)


def test_two_ranks(tmp_path):
    """The rows of heads and the blocks of inputs are split. Two models, one after the other."""
    models, jobs = [], []
    families: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {"query_pre_attn_scalar": 128}}
    for family, scores in families.items():
        models.append(save_gguf(tmp_path / family, family, mixed, head_dim=128, **scores))
        job = {"model": str(find_model(tmp_path / f"{family}.gguf")), "draft": None, "device": "cpu"}
        job |= {"dtype": "float32", "prompt": PROMPT, "new_tokens": 16, "settings": {"tiers": 2, "budget": 64}}
        jobs.append(job)
    for model, reports in zip(models, run_jobs(jobs, 2), strict=True):
        texts = [report["token_ids"] for report in reports]
        want = greedy_oracle(model, PROMPT, len(texts[0]), texts[0])
        assert len(want) == 16 and texts == [want] * 2


def test_ranks_that_would_split_a_block_are_refused(tmp_path):
    save_gguf(tmp_path / "target", "llama", mixed)
    directory = find_model(tmp_path / "target.gguf")
    config = ModelConfig.load(directory)
    from triforce.tp.parallel.ranks import Ranks
    from triforce.tp.parallel.split import Split

    matrices = ModelMatrices.of(config, Split.of(config, Ranks(0, 2, 2)))
    with pytest.raises(ModelError, match="no whole blocks of 256"):
        matrices.o.read(Checkpoint(directory, torch.float32, CPU), "model.layers.0.", config.quantisation)
    with pytest.raises(ModelError, match=r"o_proj is in Q4_K, in blocks of 256 inputs, .* another number of --gpus"):
        matrices.num_bytes(torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2', which is not supported; supported: llama"),
        ({"llama.rope.scaling.type": "longrope"}, "none, linear and yarn"),
        ({"llama.rope.dimension_count": 8}, "the size of a head, is supported"),
        ({"llama.block_count": "three"}, "a whole number above 0"),
        ({"llama.block_count": 2**31 - 1}, "there are tensors of 3 layers"),
        ({"llama.attention.sliding_window": 4096}, "sliding windows are not supported"),
        ({"llama.rope.scaling.factor": -1.0}, "a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": True}, "a number belongs there"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
    ],
)
def test_keys_that_are_not_read_are_named(tmp_path, changed, message):
    save_gguf(tmp_path / "m", "llama", all_in(Form.Q8_0))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", str(changed.get("general.architecture", "llama")))
    for key, value in ((keys | changed) | vocabulary() | {k: v for k, v in changed.items() if "ggml" in k}).items():
        if key != "general.architecture":
            kinds = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32, list: writer.add_array}
            kinds.get(type(value), writer.add_uint32)(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path / "n.gguf")


@pytest.mark.parametrize(("name", "form", "message"), [
    ("blk.0.attn_sinks.weight", Form.F32, "attn_sinks.weight' .F32., which supported models do not have"),
    ("blk.0.ffn_down.scale", Form.F32, "ffn_down.scale"),
    ("mtp.weight", Form.Q8_0, "mtp.weight' .Q8_0."),
    ("blk.0.attn_q.weight", Form.IQ4_NL, "as IQ4_NL, which is not supported; supported: F32"),
])  # fmt: skip
def test_tensors_that_are_not_read_are_named(tmp_path, name, form, message):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    rows = np.zeros((2, gguf.GGML_QUANT_SIZES[form][1] * 4), np.uint8) if form != Form.F32 else np.zeros((2, 32), "f4")
    writer.add_tensor(name, rows, raw_dtype=form)
    for key in ("head_count", "head_count_kv"):
        writer.add_uint32(f"llama.attention.{key}", 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path / "m.gguf")


def test_damaged_files_are_refused_in_one_line(tmp_path):
    """Cut off anywhere, with bytes changed, and with lengths of 2^63."""
    save_gguf(tmp_path / "m", "llama", mixed, num_hidden_layers=1)
    whole = (tmp_path / "m.gguf").read_bytes()
    header = len(whole) - sum(tensor.num_bytes for tensor in GgufHeader.read(tmp_path / "m.gguf").tensors)
    rng, count, refused = random.Random(1), share(1000), 0
    for case in range(count):
        damaged = bytearray(whole)
        at = rng.randrange(header)
        if case % 4 == 0:
            damaged = damaged[: rng.randrange(len(whole))]
        elif case % 4 == 1:
            damaged[at : at + 8] = struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 2**40, 0, 2**31]))
        else:
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(header)] = rng.randrange(256)
        path = tmp_path / f"damaged-{case}.gguf"
        path.write_bytes(damaged)
        try:
            directory = find_model(path)
            config = ModelConfig.load(directory)
            Tokenizer.load(directory)
            decoder = Decoder.load(directory, config, dtype=torch.float32, device=CPU)
            held = sum(tensor.nbytes for part, tensor in decoder.held() if part == "weights")
            assert held <= ModelMatrices.of(config).num_bytes(torch.float32)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 700
        path.unlink()
    assert refused > 0.4 * count


def test_a_file_that_is_none_is_refused(tmp_path):
    for content in (b"", b"GGUF", b"GGML" + bytes(100), b"GGUF" + struct.pack("<I", 9) + bytes(100)):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"GGUF|truncated"):
            find_model(tmp_path / "m.gguf")


def test_the_index_says_where_tensors_are(tmp_path):
    save_gguf(tmp_path / "m", "llama", mixed)
    directory = find_model(tmp_path / "m.gguf")
    index = json.loads((directory / GGUF_INDEX).read_text())
    assert index["files"] == [str(tmp_path / "m.gguf")]
    assert index["tensors"]["model.layers.0.self_attn.q_proj.weight"]["heads"] == 4
