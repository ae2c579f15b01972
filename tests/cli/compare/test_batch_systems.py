"""Systems that answer several questions over one text, from within."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from command import TEXT, VOCABULARY
from comparisons import rows_of
from strange_systems import FLIPPED_AT
from tiny import greedy_oracle, random_tokens, save_family
from transformers import LlamaForCausalLM
from triforce.cli.compare.baselines.catalogue import BASELINES, Entry
from triforce.cli.compare.baselines.protocol import Job, Measurement
from triforce.cli.compare.baselines.transformers_baseline import CopiedPrefix, Transformers
from triforce.cli.measurement import QUESTION_TOKENS
from triforce.offload.speculation.sampling import Sampling
from triforce.tp.weights.tokenizer import Tokenizer

SEQUENCES, TOKENS = 3, 12
PROMPT_TOKENS = 200
"""With the questions."""


@pytest.fixture
def prompts(pair):
    """What every system is to be given."""
    ids = Tokenizer.load(pair[0]).encode(TEXT * 2, True)[: PROMPT_TOKENS - QUESTION_TOKENS]
    places = [0, (len(ids) - QUESTION_TOKENS) // 3, 2 * (len(ids) - QUESTION_TOKENS) // 3]
    return [ids + ids[place : place + QUESTION_TOKENS] for place in places]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_each_sequence_that_differs_is_named_with_the_targets_logits(compare, pair, prompts, tmp_path, monkeypatch):
    import triforce.cli.commands  # noqa: F401 - its help lists the baselines that are there when it is imported

    monkeypatch.setitem(BASELINES, "flips", Entry("flips", "", "strange_systems"))
    options = {"batch": SEQUENCES, "prompt_tokens": PROMPT_TOKENS, "max_new_tokens": TOKENS, "prompt": TEXT * 2}
    outcome, document = compare("flips", json_path=tmp_path / "runs.json", **options)
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    answer, model = ours["runs"][0]["token_ids"], LlamaForCausalLM.from_pretrained(pair[0])
    assert other["first_difference"] == other["differences"][0]
    assert [found["sequence"] for found in other["differences"]] == [1, 2]
    for found in other["differences"]:
        start = found["sequence"] * TOKENS
        with torch.inference_mode():
            written = prompts[found["sequence"]] + answer[start : start + FLIPPED_AT]
            logits = model(torch.tensor([written])).logits[0, -1]
        assert found["index"] == FLIPPED_AT
        assert found["triforce_token"] == answer[start + FLIPPED_AT] == int(logits.argmax())
        assert found["token"] == (found["triforce_token"] + 1) % VOCABULARY
        assert found["triforce_logit"] == pytest.approx(float(logits[found["triforce_token"]]), abs=1e-4)
        assert found["logit"] == pytest.approx(float(logits[found["token"]]), abs=1e-4)
    assert f"2 of 3 differ, sequence 1 from token {FLIPPED_AT} on" in rows_of(outcome)[1]


PLAIN = {
    "system": "", "model": "", "draft": None, "given_model": "", "given_draft": None, "device": "cpu",
    "dtype": "float32", "prompt_ids": [5, 6], "max_new_tokens": 6, "sampling": Sampling(temperature=0.0),
    "threads": 1, "folder": "",
}  # fmt: skip


def test_a_job_knows_each_prompt(tmp_path):
    job = Job(**PLAIN)
    assert (job.prompts, job.sequences, job.prompt_tokens) == ([[5, 6]], 1, 2)
    job = replace(job, questions=[[7], [8, 9]])
    job.save(tmp_path / "job.json")
    again = Job.load(tmp_path / "job.json")
    assert again == job
    assert (again.prompts, again.sequences, again.prompt_tokens) == ([[5, 6, 7], [5, 6, 8, 9]], 2, 4)


def test_time_between_tokens_is_that_of_each_sequence():
    measured = Measurement("", list(range(12)), 1.0, 6.0, 4, 0.0, 0, 0, sequences=4)
    assert measured.tbt_s == 3.0
    assert replace(measured, first_tokens=12).tbt_s == 0.0


@pytest.mark.parametrize("system", [Transformers, CopiedPrefix])
def test_questions_of_any_lengths_are_padded_on_the_left(tmp_path, system):
    model = save_family(tmp_path, "llama")
    name = "transformers" if system is Transformers else "transformers-prefix"
    text, questions = random_tokens(40, seed=1), [random_tokens(n, seed=n) for n in (3, 9, 1)]
    job = Job(**{**PLAIN, "system": name, "model": str(tmp_path), "prompt_ids": text, "questions": questions})
    timed = system(job).generate(text, questions, 6)
    want = [greedy_oracle(model, text + question, 6) for question in questions]
    assert timed.token_ids == [*chain(*want)]
    assert timed.first_tokens == 3
    assert timed.ttft_s > 0 and timed.decode_s > 0
