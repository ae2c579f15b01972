"""Mixtures of experts: what a row gets of which, that a row's bits are its own, and what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from quantised import FORMATS, save_quantised
from quantised_matrices import blocks_of, matrix_of
from safetensors.torch import load_file, save_file
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_family
from transformers import MixtralConfig, Qwen3MoeConfig
from triforce.kernels import Level, cpu_level
from triforce.kernels.layers import by_sigmoid, choose_experts, products_are_independent
from triforce.kernels.quantised import QuantisedMatrix, quantised_experts
from triforce.kernels.selection import padded_rows, use_kernels
from triforce.offload import Engine, Sampling
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.matrices import DenseWeight, ExpertMlps, GatedMlp, ModelMatrices, QuantisedWeight, layer_prefix
from triforce.tp.model.config import ModelConfig
from triforce.tp.parallel.ranks import Ranks
from triforce.tp.parallel.split import Split
from triforce.tp.weights.checkpoint import Checkpoint, _SafetensorsFile

CPU = torch.device("cpu")
HIDDEN, WIDTH, COUNT, USED = 24, 40, 7, 3
EPS = 1e-5
PROMPT = random_tokens(120, seed=4)


def experts_of(dtype: torch.dtype, *, normalised: bool = True, seed: int = 0) -> ExpertMlps:
    g = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).to(dtype)

    mlps = (GatedMlp(DenseWeight(matrix(2 * WIDTH, HIDDEN)), DenseWeight(matrix(HIDDEN, WIDTH))) for _ in range(COUNT))
    return ExpertMlps(matrix(COUNT, HIDDEN).float(), tuple(mlps), USED, normalised)


def rows_of(n: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def alone(of: ExpertMlps, row: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """What one row gets, in float64."""
    x = F.rms_norm(row.double(), norm.shape, norm.double(), EPS)
    shares = (x @ of.router.double().T).softmax(-1)
    best = sorted(range(COUNT), key=lambda expert: (-float(shares[expert]), expert))[:USED]
    whole = sum(float(shares[expert]) for expert in best) if of.normalised else 1.0
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert in sorted(best):
        gate_up, down = (next(weight.tensors()).double() for weight in of.experts[expert].weights)
        gate, up = (x @ gate_up.T).chunk(2)
        total += float(shares[expert]) / whole * ((F.silu(gate) * up) @ down.T)
    return total


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("n", [1, 2, 9, 300])
def test_a_row_gets_the_likeliest_experts_by_their_shares(n, normalised):
    of, rows, norm = experts_of(torch.float32, normalised=normalised), rows_of(n, torch.float32), torch.rand(HIDDEN)
    want = torch.stack([alone(of, row, norm) for row in rows])
    found = of.of(rows, norm=norm, eps=EPS)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    onto = rows.clone()
    assert of.of(rows, norm=norm, eps=EPS, onto=onto) is onto
    torch.testing.assert_close(onto, rows + found)


def test_of_equally_likely_experts_the_first_are_taken():
    of, norm = experts_of(torch.float32), torch.ones(HIDDEN)
    of = ExpertMlps(torch.zeros_like(of.router), of.experts, USED, True)
    rows = rows_of(50, torch.float32)
    each = [one.of(rows, norm=norm, eps=EPS) for one in of.experts[:USED]]
    mean = torch.stack(each).mean(dim=0)
    torch.testing.assert_close(of.of(rows, norm=norm, eps=EPS), mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize(("count", "used"), [(7, 3), (16, 16), (128, 8), (130, 1)])
def test_experts_are_chosen_by_the_softmax_of_the_router(count, used, n, dtype, normalised):
    g = torch.Generator().manual_seed(count + n)
    x, router = torch.randn(n, 45, generator=g).to(dtype), torch.randn(count, 45, generator=g)
    likely = (x.double() @ router.double().T).softmax(-1).sort(dim=-1, descending=True)
    want = likely.values[:, :used]
    shares, ids = choose_experts(x, router, used, normalised=normalised)
    assert torch.equal(ids, likely.indices[:, :used])
    torch.testing.assert_close(
        shares.double(), want / want.sum(-1, keepdim=True) if normalised else want, atol=2e-6, rtol=1e-5
    )
    if products_are_independent(CPU, dtype):
        for i in range(n):
            alone = choose_experts(x[i : i + 1], router, used, normalised=normalised)
            assert torch.equal(alone[0][0], shares[i]) and torch.equal(alone[1][0], ids[i])


def test_experts_that_are_next_to_impossible_have_no_share():
    shares, ids = choose_experts(torch.tensor([[0.0, -1000.0, -30.0, -2000.0]]), torch.eye(4), 3, normalised=False)
    assert ids[0, :2].tolist() == [0, 2] and shares[0, 2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 32])
def test_a_row_is_gated_by_a_sigmoid_alone_and_in_company(width, dtype):
    """Also where gates do not lie one after another."""
    g = torch.Generator().manual_seed(1)
    gates = torch.cat([torch.randn(6, 2, width, generator=g) * 4, torch.full((2, 2, width), -float("inf"))]).to(dtype)
    x, gate = torch.randn(8, 32, generator=g).to(dtype), gates.unbind(1)[1]
    found = by_sigmoid(x, gate)
    want = x.double() * gate.double().sigmoid()
    torch.testing.assert_close(found.double(), want, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
    assert (found[6:] == 0).all()
    for i in range(8):
        assert torch.equal(by_sigmoid(x[i : i + 1], gate[i : i + 1])[0], found[i])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_probabilities_has_experts_and_no_share(wrong):
    x, router = torch.ones(3, 8), torch.arange(40.0).reshape(5, 8)
    x[1, 2] = wrong
    shares, ids = choose_experts(x, router, 2, normalised=True)
    assert ids.min() >= 0 and ids.max() < 5 and (ids[:, 0] != ids[:, 1]).all()
    assert shares[1].isnan().all() and not shares[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_company(dtype):
    """Where products have them: of padded rows."""
    of, rows, norm = experts_of(dtype), rows_of(60, dtype), torch.rand(HIDDEN).to(dtype)
    with padded_rows(True):
        together = of.of(rows, norm=norm, eps=EPS)
        for some in (slice(0, 1), slice(3, 8), slice(20, 53)):
            assert torch.equal(of.of(rows[some], norm=norm, eps=EPS), together[some])


@pytest.mark.skipif(cpu_level() < Level.AVX512_BF16, reason="other levels multiply by one expert after another")
@pytest.mark.parametrize("n", [1, 5, 32])
@pytest.mark.parametrize("form", ["awq", "Q4_K", "Q6_K"])
def test_experts_in_few_bits_together_are_what_they_are_one_by_one(form, n):
    """In one compiled call for all rows of a step; and a row has the same bits alone."""
    hidden, width, count, used = 512, 256, 16, 4

    def matrix(outputs: int, inputs: int, seed: int) -> QuantisedMatrix:
        of = matrix_of if form == "awq" else blocks_of
        return of(form, outputs, inputs, seed)[0]

    def expert(seed: int) -> GatedMlp:
        gate_up = matrix(width, hidden, seed), matrix(width, hidden, seed + 1)
        return GatedMlp(QuantisedWeight(gate_up), QuantisedWeight((matrix(hidden, width, seed + 2),)))

    g = torch.Generator().manual_seed(n)
    of = ExpertMlps(torch.randn(count, hidden, generator=g), tuple(expert(3 * i) for i in range(count)), used, True)
    x = torch.randn(n, hidden, generator=g).bfloat16()
    shares, ids = choose_experts(x, of.router, used, normalised=True)
    assert of._described is not None and not of.waits(torch.bfloat16)
    together = quantised_experts(x, of._described, ids, shares)
    assert together is not None and torch.equal(together, of._one_by_one(x, shares, ids).bfloat16())
    assert torch.equal(of._sums(x, shares, ids), together)
    onto = torch.randn(n, hidden, generator=g).bfloat16()
    assert torch.equal(of._sums(x, shares, ids, onto.clone()), onto + together)
    for i in range(n):
        row = slice(i, i + 1)
        assert torch.equal(of._sums(x[row], shares[row], ids[row])[0], together[i])


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "qwen3.5-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [None, "gptq", "fp8"])
def test_a_decoder_holds_what_its_plan_counts(tmp_path, family, dtype, form):
    """All of it, and each of two ranks."""
    if form:
        save_quantised(tmp_path, FORMATS[form], family)
    else:
        save_family(tmp_path, family)
    config = ModelConfig.load(tmp_path)
    decoder = Decoder.load(tmp_path, dtype=dtype, device=CPU)
    held = sum(tensor.nbytes for part, tensor in decoder.held() if part == "weights")
    assert held == decoder.matrices.num_bytes(dtype)
    for rank in range(2):
        matrices, checkpoint = (
            ModelMatrices.of(config, Split.of(config, Ranks(rank, 2, 2))),
            Checkpoint(tmp_path, dtype, CPU),
        )
        for matrix in matrices.of_layer(1):
            weight = matrix.read(checkpoint, layer_prefix(1), config.quantisation)
            of_it = sum(tensor.nbytes for tensor in weight.tensors())
            assert of_it == matrix.num_bytes(dtype, config.quantisation, layer_prefix(1))


def test_a_pass_reads_the_experts_that_its_rows_have(tmp_path):
    """On average, where each row's are any."""
    save_family(tmp_path, "qwen3-moe")
    config = ModelConfig.load(tmp_path)
    matrices, experts = ModelMatrices.of(config), config.experts
    assert experts is not None and (experts.count, experts.used) == (8, 3)
    of_expert = sum(matrix.numbers for matrix in matrices.mlps[0]) * 4 * config.num_layers
    g, whole = torch.Generator().manual_seed(1), matrices.bytes_of_a_pass(torch.float32, 10**6)
    for rows in (1, 2, 5):
        drawn = [len({int(e) for _ in range(rows) for e in torch.randperm(8, generator=g)[:3]}) for _ in range(3000)]
        want = whole - of_expert * (8 - sum(drawn) / len(drawn))
        assert abs(matrices.bytes_of_a_pass(torch.float32, rows) - want) < 0.01 * want
    assert matrices.numbers_of_a_row == matrices.bytes_of_a_pass(torch.float32, 1) // 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ({"num_local_experts": 10**9}, "num_experts_per_tok 3 of 1000000000 experts"),
        ({"num_experts_per_tok": "many"}, "wrong kind"),
        ({"moe_intermediate_size": None}, "wrong kind"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, said):
    save_family(tmp_path, "qwen3-moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=said):
        ModelConfig.load(tmp_path)


def test_experts_that_are_stored_in_different_ways_are_refused(tmp_path):
    save_quantised(tmp_path, FORMATS["awq"], "qwen3-moe")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.mlp.experts.3", "lm_head"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts\.3\."):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


def test_an_expert_that_is_stored_as_usual_beside_others_in_few_bits_is_refused(tmp_path):
    model = save_quantised(tmp_path, FORMATS["awq"], "qwen3-moe")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.3"
    tensors = {key: tensor for key, tensor in load_file(path).items() if not key.startswith(f"{name}.")}
    gate, up = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[3].chunk(2)
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")[3]
    for part, matrix in (("gate", gate), ("up", up), ("down", down)):
        tensors[f"{name}.{part}_proj.weight"] = matrix.detach().contiguous()
    save_file(tensors, path)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    raw["quantization_config"]["modules_to_not_convert"] += [name]
    config.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"the experts of model\.layers\.0 are not all stored alike"):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


ON_TWO_RANKS = [("qwen3-moe", None), ("mixtral", "gptq"), ("qwen3-moe", "fp8")]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Models of these families and formats, each with the texts that two ranks write with it; started once for all."""
    root, models = tmp_path_factory.mktemp("two-ranks"), []
    job = {"draft": None, "device": "cpu", "dtype": "float32", "prompt": PROMPT, "new_tokens": 16, "temperature": 0.0}
    job |= {"seed": 1, "settings": {"tiers": 2, "budget": 64}}
    for family, form in ON_TWO_RANKS:
        at = root / f"{family}-{form}"
        model = save_quantised(at, FORMATS[form], family, seed=1) if form else save_family(at, family, seed=1)
        models.append((model, job | {"model": str(at)}))
    written = zip(models, run_jobs([job for _, job in models], 2), strict=True)
    return [(model, [report["token_ids"] for report in reports]) for (model, _), reports in written]


@pytest.mark.parametrize(("family", "form"), ON_TWO_RANKS)
def test_two_ranks_write_what_transformers_does(two_ranks, family, form):
    model, texts = two_ranks[ON_TWO_RANKS.index((family, form))]
    want = greedy_oracle(model, PROMPT, len(texts[0]), texts[0])
    assert len(want) == 16 and texts == [want] * 2


def test_a_router_is_read_in_float32(tmp_path):
    """Whatever is computed in."""
    model = save_family(tmp_path, "qwen3-moe", seed=1)
    decoder = Decoder.load(tmp_path, dtype=torch.bfloat16, device=CPU)
    mlp = decoder._layers[1].mlp
    assert isinstance(mlp, ExpertMlps)
    assert torch.equal(mlp.router, model.get_parameter("model.layers.1.mlp.gate.weight"))


def test_what_a_config_leaves_out_is_as_for_transformers(tmp_path):
    for kind, family in ((MixtralConfig, "MixtralForCausalLM"), (Qwen3MoeConfig, "Qwen3MoeForCausalLM")):
        theirs, rest = kind(), {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32}
        rest |= {"architectures": [family], "vocab_size": 100, "head_dim": 128}
        ours = ModelConfig.from_json(rest, tmp_path)
        experts = ours.experts
        assert experts is not None and experts.used == theirs.num_experts_per_tok
        assert experts.count == getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert ours.intermediate_size == getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size
        assert (
            ours.rms_norm_eps == theirs.rms_norm_eps and ours.max_position_embeddings == theirs.max_position_embeddings
        )


def test_an_expert_whose_zeros_are_all_the_same_is_one_of_them(tmp_path):
    """Which are held as one number, those of others one by one."""
    model = save_quantised(tmp_path, FORMATS["awq"], "qwen3-moe", seed=3)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.2.down_proj.qzeros"
    tensors[name] = torch.full_like(tensors[name], 0x77777777)
    save_file(tensors, path)
    with use_kernels(as_gpu=()):
        decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    mlp = decoder._layers[0].mlp
    assert isinstance(mlp, ExpertMlps) and mlp.stacked is not None and model is not None
    numbers = next(mlp.experts[2].down.tensors())
    assert numbers.shape[0] == decoder.config.hidden_size


def test_a_large_file_is_not_opened_for_each_tensor(tmp_path, monkeypatch):
    save_family(tmp_path, "qwen3-moe")
    opened, make = [], _SafetensorsFile.__init__

    def noted(self, file):
        opened.append(file)
        make(self, file)

    monkeypatch.setattr(_SafetensorsFile, "__init__", noted)
    Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    assert len(opened) <= 2


def test_shares_that_do_not_sum_to_one_are_left_so(tmp_path):
    for normalised in (True, False):
        model = save_family(tmp_path / str(normalised), "qwen3-moe", seed=2, norm_topk_prob=normalised)
        engine = Engine.load(tmp_path / str(normalised), device="cpu", dtype="float32", tiers=2, budget=64)
        assert engine.generate(PROMPT, Sampling(0.0), 30).token_ids == greedy_oracle(model, PROMPT, 30)
