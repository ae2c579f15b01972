"""Weights in four and eight bits: their numbers are the format's formula, bit for bit, and texts are transformers'."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from quantised import FORMATS, fp8, save_quantised
from quantised_matrices import Tensors, matrix_of, quantisation
from safetensors.torch import load_file, save_file
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.kernels import Level, cpu_level, use_kernels
from triforce.kernels.layers import linear
from triforce.kernels.quantised import FLOAT32_NUMBERS, STEP_NUMBERS, GroupedMatrix, quantised_linear
from triforce.offload import Engine, Sampling
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.matrices import ModelMatrices, QuantisedWeight, layer_prefix
from triforce.tp.model.config import ModelConfig
from triforce.tp.model.quantisation import part_of, quantisation_of
from triforce.tp.parallel.ranks import Ranks
from triforce.tp.parallel.split import Split
from triforce.tp.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
PROMPT = random_tokens(300, seed=3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(48, 96), (64, 192)])
def test_numbers_are_the_formula_in_float32_rounded_once(name, shape):
    matrix, want = matrix_of(name, *shape)
    assert matrix.shape == shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(matrix.expand(dtype), want.to(dtype))
    assert torch.equal(matrix.outputs(slice(5, 19)).expand(torch.bfloat16), want[5:19].bfloat16())


@pytest.mark.parametrize("level", [level for level in Level if level <= cpu_level()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_kernels_give_the_same_bits(name, dtype, level):
    """Also where scales are none that a model would have."""
    matrix, want = matrix_of(name, 40, 192)
    out = torch.empty(33, 192, dtype=dtype)
    matrix.outputs(slice(5, 38)).expand_compiled(out, level)
    assert torch.equal(out, want[5:38].to(dtype))
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8, 3e4]).to(matrix.scales.dtype)
    matrix = replace(matrix, scales=odd.repeat(matrix.scales.numel())[: matrix.scales.numel()].view_as(matrix.scales))
    with use_kernels(layers="plain"):
        want = matrix.expand(dtype)
    out = torch.empty_like(want)
    matrix.expand_compiled(out, level)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(cpu_level() < Level.AVX2, reason="the compiled products need AVX2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_products_are_those_with_the_numbers(name, dtype):
    """Of a number of outputs that is no multiple of what is expanded together; a row's bits are its own."""
    matrix, numbers = matrix_of(name, 48, 1248)
    matrix, numbers = matrix.outputs(slice(3, 41)), numbers[3:41].to(dtype).double()
    x = torch.randn(5, 1248, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = matrix.product_compiled(x)
    want, size = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    assert ((found - want).abs() <= 1e-6 * size).all()
    for n in (1, 3):
        assert torch.equal(matrix.product_compiled(x[:n]), found[:n])
    assert torch.equal(matrix.product_compiled(x[4:]), found[4:])


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_takes_what_is_planned_and_little_more_than_in_the_file(name):
    form = fp8((128, 128)) if name == "fp8" else FORMATS[name]
    stored = form.store(np.random.default_rng(1), 256, 1024)
    found = quantisation_of({"quantization_config": form.config}, "config.json")
    assert found is not None
    matrix = found.read(Tensors(stored.tensors), "it", 256, 1024)
    assert isinstance(matrix, GroupedMatrix)
    held = sum(tensor.nbytes for tensor in matrix.tensors())
    in_file = sum(tensor.nbytes for end, tensor in stored.tensors.items() if end not in ("g_idx", "weight_shape"))
    assert held == found.num_bytes("it", 256, 1024)
    order = 8 * 1024 if matrix.group_of is not None else 0  # the group of each input
    assert held - order <= 1.05 * in_file + 4 * 256


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [None, slice(0, 32), slice(32, 96), slice(24, 72), slice(10, 38)])
def test_a_rank_has_the_numbers_of_its_part(name, columns):
    matrix, want = matrix_of(name)
    part = part_of(matrix, slice(16, 32), columns)
    assert torch.equal(part.expand(torch.float32), want[16:32, columns or slice(None)])
    assert isinstance(part, GroupedMatrix)
    for tensor in (part.values, part.scales):  # the rest of the matrix does not stay in memory with it
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_part_that_begins_within_a_byte_is_refused():
    with pytest.raises(ModelError, match="whole bytes"):
        part_of(matrix_of("gptq")[0], None, slice(33, 96))


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8"])
def test_products_are_those_with_the_numbers(name, rows):
    """Whatever is expanded at a time."""
    outputs, inputs = 4 * STEP_NUMBERS // 2**12 // 4 + 40, 4096
    assert outputs * inputs > max(STEP_NUMBERS, 2 * FLOAT32_NUMBERS)
    matrix, numbers = matrix_of(name, outputs, inputs)
    g = torch.Generator().manual_seed(1)
    x, norm, bias = (torch.randn(*shape, generator=g) for shape in ((rows, inputs), (inputs,), (outputs,)))
    for more in ({}, {"norm": norm, "eps": 1e-5}):
        want = linear(x, numbers, bias, **more)
        torch.testing.assert_close(quantised_linear(x, matrix, bias, **more), want, atol=1e-3, rtol=1e-4)
        onto = torch.ones(rows, outputs)
        assert quantised_linear(x, matrix, bias, onto=onto, **more) is onto
        torch.testing.assert_close(onto, want + 1, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, "llama") for name in FORMATS] + [("awq", "qwen2"), ("gptq", "qwen3"), ("packed", "llama-tied")]
    + [("fp8", "qwen3-bias"), ("gptq-act-order", "mistral-window")]
    + [("awq", "qwen3-moe"), ("gptq", "mixtral"), ("packed", "qwen3-moe"), ("fp8", "mixtral")],
)  # fmt: skip
def test_greedy_text_is_that_of_transformers_with_the_numbers(tmp_path, name, family):
    """Of one to three tiers, in memory and streamed."""
    model = save_quantised(tmp_path / "target", FORMATS[name], family, seed=1)
    save_llama(tmp_path / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    found = []
    for tiers, resident in ((1, None), (2, 0.0), (3, None)):
        engine = Engine.load(
            tmp_path / "target", tmp_path / "draft", device="cpu", dtype="float32", tiers=tiers, resident=resident,
            budget=64,
        )  # fmt: skip
        found.append(engine.generate(PROMPT, Sampling(0.0), 16).token_ids)
    want = greedy_oracle(model, PROMPT, len(found[0]), found[0])
    assert len(want) == 16 and found == [want] * 3


ON_TWO_RANKS = ["gptq", "gptq-act-order", "awq", "packed-zeros", "fp8"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Models of these formats, each with the texts that two ranks write with it; started once for all."""
    root, settings = tmp_path_factory.mktemp("two-ranks"), {"tiers": 2, "budget": 64}
    models = [save_quantised(root / name, FORMATS[name], seed=1) for name in ON_TWO_RANKS]
    job = {"draft": None, "device": "cpu", "dtype": "float32", "prompt": PROMPT, "new_tokens": 16, "temperature": 0.0}
    job |= {"seed": 1, "settings": settings}
    written = run_jobs([job | {"model": str(root / name)} for name in ON_TWO_RANKS], 2)
    texts = [[report["token_ids"] for report in reports] for reports in written]
    return dict(zip(ON_TWO_RANKS, zip(models, texts, strict=True), strict=True))


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_write_what_transformers_does(two_ranks, name):
    model, texts = two_ranks[name]
    want = greedy_oracle(model, PROMPT, len(texts[0]), texts[0])
    assert len(want) == 16 and texts == [want] * 2


def test_a_quantised_draft_drafts_for_any_target(tmp_path):
    model = save_llama(tmp_path / "target", seed=1)
    save_quantised(tmp_path / "draft", FORMATS["awq"], seed=9)
    engine = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", dtype="float32", tiers=3, budget=64)
    assert engine.generate(PROMPT, Sampling(0.0), 30).token_ids == greedy_oracle(model, PROMPT, 30)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_holds_what_its_plan_counts(tmp_path, name, dtype):
    save_quantised(tmp_path, FORMATS[name])
    decoder = Decoder.load(tmp_path, dtype=dtype, device=CPU)
    held = sum(tensor.nbytes for part, tensor in decoder.held() if part == "weights")
    matrices = ModelMatrices.of(decoder.config)
    assert held == matrices.num_bytes(dtype) < 0.9 * matrices.numbers * dtype.itemsize


def test_biases_of_zeros_beside_quantised_matrices_are_let_pass_and_others_are_not(tmp_path):
    save_quantised(tmp_path, FORMATS["gptq"])
    path, bias = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.bias"
    tensors = load_file(path)
    save_file(tensors | {bias: torch.zeros(96)}, path)
    Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    save_file(tensors | {bias: torch.ones(96)}, path)
    with pytest.raises(ModelError, match=rf"holds tensors that .* does not have: {bias}"):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


GPTQ, AWQ, FP8 = (FORMATS[name].config for name in ("gptq", "awq", "fp8"))
PACKED = FORMATS["packed"].config


def scheme(**changes):
    (group,) = PACKED["config_groups"].values()
    weights = group["weights"] | changes.pop("weights", {})
    return PACKED | {"config_groups": {"group_0": group | {"weights": weights} | changes}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQ | {"bits": 3}, "GPTQ with 3 bits, which is not supported; supported: .*AWQ"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"lm_head": True}, "a quantised output head"),
        (GPTQ | {"group_size": 0}, "cannot be read: .*group_size 0 is not"),
        ({"quant_method": "gptq"}, "cannot be read: it lacks 'bits'"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 8}, "AWQ with 8 bits"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (FP8 | {"fmt": "e5m2"}, "FP8 in the format 'e5m2'"),
        (FP8 | {"weight_block_size": 128}, "cannot be read"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"transform_config": {"a": 1}}, "transform_config"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (PACKED | {"config_groups": {}}, "several config_groups"),
        (scheme(weights={"strategy": "tensor_group"}), "strategy 'tensor_group'"),
        (scheme(weights={"num_bits": 3}), "int3"),
        (scheme(input_activations={"num_bits": 4}), "4-bit activations"),
        (scheme(targets=["re:.*mlp.*"]), "for re:.*mlp.* alone"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"bits": 4}, "'unknown'"),
        ([4], "not an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config, words):
    with pytest.raises(ModelError, match=words) as caught:
        quantisation_of({"quantization_config": config}, "config.json")
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 16}, r"qzeros in .* has shape \(2, 8\); its config says \(4, 8\)"),
        ({"bits": 8}, r"qweight in .* has shape \(8, 64\); its config says \(16, 64\)"),
        ({"quant_method": "awq"}, "qweight in .* has shape"),
        ({"quant_method": "fp8"}, "lack the tensor model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_file_that_is_not_as_its_config_says_is_refused(tmp_path, changes, words):
    save_quantised(tmp_path, FORMATS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


def test_groups_that_do_not_exist_are_refused(tmp_path):
    save_quantised(tmp_path, FORMATS["gptq-act-order"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.g_idx"][3] = 2
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"k_proj.g_idx has groups from 0 to 2; the configuration says 2 groups"):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


ODD: list[Any] = [0, -1, 2**63, 10**30, 1.5, 1e308, True, None, "", "x", "4", [], {}, [0, 128], [-1, 128], ["re:("]]
ODD += [["re:(a+)+$"], ["re:.*.*.*.*.*x"], [128], [2**45, 128], {"a": {}}, float("inf"), float("nan")]


def mutated(chance: random.Random, value: Any) -> Any:
    """A configuration with something odd in one place of it."""
    if not isinstance(value, dict) or not value or chance.random() < 0.2:
        return chance.choice(ODD)
    key = chance.choice(sorted(value))
    return value | {key: mutated(chance, value[key])}


@pytest.mark.parametrize("name", FORMATS)
def test_any_configuration_is_refused_in_a_line_or_gives_a_plan(name):
    chance = random.Random(name)
    for _ in range(200):
        try:
            found = quantisation_of({"quantization_config": mutated(chance, FORMATS[name].config)}, "config.json")
        except ModelError as error:
            assert "config.json" in str(error) and "\n" not in str(error)
            continue
        if found is not None:
            assert found.covers("model.layers.0.self_attn.q_proj") in (False, True)
            assert 0 < found.num_bytes("it", 4096, 14336) < 4096 * 14336 * 16


@pytest.mark.parametrize("name", FORMATS)
def test_any_tensors_are_refused_in_a_line_or_read(tmp_path, name):
    """Other shapes, number formats and contents than a configuration says, and tensors that are not there."""
    chance, form = random.Random(name), FORMATS[name]
    for trial in range(60):
        outputs, inputs = chance.choice([(48, 96), (12, 64), (40, 60), (4, 32), (8, 63), (1, 1)])
        try:
            tensors = dict(form.store(np.random.default_rng(trial), 48, 96).tensors)
        except ValueError:
            continue
        end = chance.choice(sorted(tensors))
        kind = chance.choice(["gone", "shape", "dtype", "numbers", "sizes"])
        if kind == "gone":
            del tensors[end]
        elif kind == "shape":
            tensors[end] = tensors[end].flatten()[: chance.randint(0, 9)]
        elif kind == "dtype":
            tensors[end] = tensors[end].to(chance.choice([torch.float64, torch.int16, torch.uint8]))
        elif kind == "numbers":
            random_bytes = np.random.default_rng(trial).integers(0, 256, tensors[end].nbytes, dtype=np.uint8)
            tensors[end] = torch.from_numpy(random_bytes).view(tensors[end].dtype).view(tensors[end].shape)
        save_file({f"it.{one}": tensor.contiguous() for one, tensor in tensors.items()}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint(tmp_path, torch.float32, CPU)
        given = (outputs, inputs) if kind == "sizes" else (48, 96)
        try:
            matrix = quantisation(name).read(checkpoint, "it", *given)
        except ModelError as error:
            assert "it" in str(error) and "\n" not in str(error)
        else:
            assert matrix.expand(torch.float32).shape == given


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "packed-zeros", "fp8", "int8-zeros"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_holds_what_its_plan_counts(tmp_path, name, rank):
    save_quantised(tmp_path, FORMATS[name])
    config = ModelConfig.load(tmp_path)
    split = Split.of(config, Ranks(rank, 2, 2))
    matrices, checkpoint = ModelMatrices.of(config, split), Checkpoint(tmp_path, torch.bfloat16, CPU)
    for matrix in matrices.of_layer(0):
        weight = matrix.read(checkpoint, layer_prefix(0), config.quantisation)
        held = sum(tensor.nbytes for tensor in weight.tensors())
        assert held == matrix.num_bytes(torch.bfloat16, config.quantisation, layer_prefix(0))


@pytest.mark.parametrize(("name", "parts"), [("awq", 1), ("int8", 1), ("gptq-act-order", 3), ("fp8", 3)])
def test_projections_with_groups_of_neighbours_are_one_matrix_on_gpus(tmp_path, name, parts):
    save_quantised(tmp_path, FORMATS[name])
    config, checkpoint = ModelConfig.load(tmp_path), Checkpoint(tmp_path, torch.float32, CPU)
    matrix = ModelMatrices.of(config).qkv
    with use_kernels(as_gpu=()):
        weight = matrix.read(checkpoint, layer_prefix(0), config.quantisation)
    assert isinstance(weight, QuantisedWeight) and len(weight.parts) == parts
    one_by_one = [part.read(checkpoint, layer_prefix(0), config.quantisation) for part in matrix.projections]
    for form in (torch.float32, torch.bfloat16):
        want = torch.cat([part.expand(form) for part in one_by_one if isinstance(part, GroupedMatrix)])
        found = [part.expand(form) for part in weight.parts if isinstance(part, GroupedMatrix)]
        assert torch.equal(torch.cat(found), want)


def test_a_quantised_output_head_is_refused(tmp_path):
    save_quantised(tmp_path, FORMATS["packed"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight_scale": torch.ones(97, 1)}, path)
    with pytest.raises(ModelError, match="lm_head is stored in few bits"):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
