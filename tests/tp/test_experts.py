"""Mixtures of experts: what a row gets of which, that a row's bits are its own, and what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from quantised import FORMATS, save_quantised
from tiny import greedy_oracle, random_tokens, save_family
from triforce.kernels.selection import padded_rows
from triforce.offload import Engine, Sampling
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.matrices import DenseWeight, ExpertMlps, GatedMlp, ModelMatrices
from triforce.tp.model.config import ModelConfig
from triforce.tp.parallel.ranks import Ranks
from triforce.tp.parallel.split import Split

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_company(dtype):
    """Where products have them: of padded rows."""
    of, rows, norm = experts_of(dtype), rows_of(60, dtype), torch.rand(HIDDEN).to(dtype)
    with padded_rows(True):
        together = of.of(rows, norm=norm, eps=EPS)
        for some in (slice(0, 1), slice(3, 8), slice(20, 53)):
            assert torch.equal(of.of(rows[some], norm=norm, eps=EPS), together[some])


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
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
    if form is None:
        parts = [ModelMatrices.of(config, Split.of(config, Ranks(rank, 2, 2))) for rank in range(2)]
        mlps = [sum(matrix.numbers for mlp in part.mlps for matrix in mlp) for part in parts]
        assert sum(mlps) == sum(matrix.numbers for mlp in decoder.matrices.mlps for matrix in mlp)


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


def test_shares_that_do_not_sum_to_one_are_left_so(tmp_path):
    for normalised in (True, False):
        model = save_family(tmp_path / str(normalised), "qwen3-moe", seed=2, norm_topk_prob=normalised)
        engine = Engine.load(tmp_path / str(normalised), device="cpu", dtype="float32", tiers=2, budget=64)
        assert engine.generate(PROMPT, Sampling(0.0), 30).token_ids == greedy_oracle(model, PROMPT, 30)
