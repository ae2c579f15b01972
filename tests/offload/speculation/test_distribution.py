"""At temperature above 0 the emitted tokens follow the target's own distribution, by chi-square against enumeration."""

import pytest
from joint_distribution import SHAPE, enumerate_joint, p_value, sample_counts
from tiny import save_llama
from triforce.offload import Engine

RUNS = 20_000


@pytest.fixture(scope="module")
def engine_and_oracle(tmp_path_factory):
    root = tmp_path_factory.mktemp("chi")
    target = save_llama(root / "target", seed=2, **SHAPE)
    save_llama(root / "draft", seed=7, **(SHAPE | {"num_hidden_layers": 1}))
    engine = Engine.load(
        root / "target", root / "draft", device="cpu", budget=8, draft_length=2, block_length=3, refresh="round"
    )
    return engine, enumerate_joint(target)


def test_three_tiers_keep_the_joint_distribution_of_three_tokens(engine_and_oracle):
    engine, joint = engine_and_oracle
    counts, rejections = sample_counts(engine, RUNS)
    # The tiers must disagree, or the test would show nothing.
    assert rejections["draft"] > RUNS / 4, rejections
    assert rejections["retrieval"] > RUNS / 10, rejections
    p = p_value(counts, joint)
    assert p > 1e-3, f"chi-square p-value {p:.2e} over {len(counts)} continuations"


def test_the_test_notices_a_draw_that_is_not_from_the_residual(engine_and_oracle, monkeypatch):
    engine, joint = engine_and_oracle
    monkeypatch.setattr("triforce.offload.speculation.acceptance.residual", lambda target, draft: target)
    counts, _ = sample_counts(engine, RUNS // 2)
    p = p_value(counts, joint)
    assert p < 1e-6, f"the wrong rule passed with p-value {p:.2e}"
