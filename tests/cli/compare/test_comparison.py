"""A comparison from within: its order, what differs, and when a difference is an error."""

from dataclasses import replace

import pytest
import torch
from command import TEXT, VOCABULARY
from comparisons import PROMPT_TOKENS, TOKENS, rows_of
from strange_systems import FLIPPED_AT
from transformers import LlamaForCausalLM
from triforce.cli.compare import comparison
from triforce.cli.compare.baselines.catalogue import BASELINES, Entry
from triforce.cli.compare.baselines.catalogue import TRIFORCE as OURS
from triforce.cli.compare.baselines.protocol import Job, Measurement
from triforce.cli.compare.report import as_document
from triforce.offload.speculation.sampling import Sampling
from triforce.tp.weights.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def strange_systems(monkeypatch):
    """Further baselines, by name."""
    import triforce.cli.commands  # noqa: F401 - its help lists the baselines that are there when it is imported

    for name in ("stops early", "flips"):
        monkeypatch.setitem(BASELINES, name, Entry(name, "", "strange_systems"))


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_an_answer_of_another_length_is_a_failure(compare, tmp_path):
    outcome, document = compare("stops early", json_path=tmp_path / "runs.json")
    why = f"it wrote {TOKENS - 1} tokens instead of {TOKENS}"
    assert outcome.code == 1 and why in document["systems"][1]["failure"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_the_first_token_that_differs_is_shown_with_the_targets_logits(compare, pair, tmp_path):
    outcome, document = compare("flips", json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    answer, found = ours["runs"][0]["token_ids"], other["first_difference"]
    model = LlamaForCausalLM.from_pretrained(pair[0])
    prompt = Tokenizer.load(pair[0]).encode(TEXT, True)[:PROMPT_TOKENS]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:FLIPPED_AT]])).logits[0, -1]
    assert found["index"] == FLIPPED_AT
    assert found["triforce_token"] == answer[FLIPPED_AT] == int(logits.argmax())
    assert found["token"] == (answer[FLIPPED_AT] + 1) % VOCABULARY
    assert found["triforce_logit"] == pytest.approx(float(logits[found["triforce_token"]]), abs=1e-4)
    assert found["logit"] == pytest.approx(float(logits[found["token"]]), abs=1e-4)
    assert f"differs from token {FLIPPED_AT} on: {found['token']} (logit {found['logit']:.4f})" in rows_of(outcome)[1]
    assert "flips computed something else" in outcome.out


@pytest.mark.parametrize("exact", [True, False])
def test_what_must_not_differ_is_an_error_where_rounding_is_no_excuse(job, exact):
    def measured(name, tokens):
        run = Measurement("", tokens, 1.0, 1.0, 1, 0.0, 1, 0, {"settings": {"exact": exact}})
        return comparison.Row(Entry(name, "", OURS.module), [run])

    seeded = replace(job, sampling=Sampling(temperature=1.0, seed=4))
    found = comparison.Comparison(seeded, 1, [measured("triforce", [1, 2, 3]), measured("autoregressive", [1, 2, 3])])
    comparison.find_differences(found, 1.0)
    assert found.error is None
    found.audit = comparison.Audit(3, 2, 1)
    assert found.error == ("the audit disagrees from token 1 on; all tokens must be the same" if exact else None)
    found.audit = comparison.Audit(3, failure="no memory")
    assert found.error == "the audit failed: no memory"
    found.audit = None
    found.rows[0].runs.append(replace(found.rows[0].runs[0], token_ids=[1, 2, 4]))
    assert found.error == ("two runs of triforce differ; all tokens must be the same" if exact else None)
    found.rows[0].runs.pop()
    found.rows[1].differences = [comparison.Difference(2, 5, 3)]
    assert found.error == (
        "triforce and autoregressive differ from token 2 on; all tokens must be the same" if exact else None
    )


@pytest.fixture
def job(tmp_path):
    """A job that no model is needed for."""
    return Job(
        system="", model="", draft=None, given_model="", given_draft=None, device="cpu", dtype="float32",
        prompt_ids=[1, 1, 2], max_new_tokens=3, sampling=Sampling(temperature=0.0), threads=1, folder=str(tmp_path),
    )  # fmt: skip


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_the_order_rotates_and_a_system_that_failed_is_not_run_again(job, pair):
    order = []
    entries = [OURS, Entry("steady", "", "strange_systems"), Entry("breaks", "", "strange_systems")]
    job = replace(job, model=str(pair[0]), given_model=str(pair[0]))
    found = comparison.Comparison(job, 3, [comparison.Row(entry) for entry in entries])
    comparison.compare(
        found, limit_s=100, settings={},
        on_start=lambda _number, _count, name: order.append(name), on_end=lambda _: None,
    )  # fmt: skip
    assert order == ["triforce", "steady", "breaks", "steady", "breaks", "triforce", "triforce", "steady"], found.rows
    assert [len(row.runs) for row in found.rows] == [3, 3, 1]
    assert found.rows[2].failure == "RuntimeError: it broke"


def test_times_of_a_system_are_medians(job):
    runs = [
        Measurement("", [7, 8, 9], seconds, 2 * seconds, 1, 0.0, size, 0)
        for seconds, size in ((5.0, 7), (1.0, 9), (2.0, 8))
    ]
    row = comparison.Row(Entry("a", "", ""), runs)
    (system,) = as_document(comparison.Comparison(job, 3, [row]), "", False)["systems"]
    assert (system["ttft_s"], system["tbt_ms"], system["tokens_per_s"], system["total_s"]) == (2.0, 2000.0, 0.5, 6.0)
    assert system["memory"]["host_peak_bytes"] == 9
    assert system["speedup_of_triforce"] == {"tbt": 1.0, "total": 1.0}


def test_tokens_that_come_with_the_first_one_do_not_count_as_decoded():
    measured = Measurement("", [1, 2, 3, 4, 5], 1.0, 6.0, 2, 0.0, 0, 0)
    assert measured.tbt_s == 2.0
    assert replace(measured, first_tokens=5).tbt_s == 0.0
