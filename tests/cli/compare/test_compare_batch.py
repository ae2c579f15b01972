"""`triforce compare --batch N`: several sequences over one text, in every system the same prompts."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from command import TEXT, VOCABULARY, check_refusal, undocumented
from strange_systems import FLIPPED_AT, rows_of
from tiny import greedy_oracle, random_tokens, save_family
from transformers import LlamaForCausalLM
from triforce.cli.bench.request import QUESTION_TOKENS
from triforce.cli.compare.baselines.catalogue import BASELINES
from triforce.cli.compare.baselines.protocol import Job, Measurement
from triforce.cli.compare.baselines.transformers_baseline import CopiedPrefix, Transformers
from triforce.tp.weights.tokenizer import Tokenizer

SEQUENCES, TOKENS = 3, 12
PROMPT_TOKENS = 200
"""With the questions."""


@pytest.fixture
def compare_batch(compare, tmp_path):
    def run(*names, **changes):
        options = {"batch": SEQUENCES, "prompt_tokens": PROMPT_TOKENS, "max_new_tokens": TOKENS, "prompt": TEXT * 2}
        return compare(*names, json_path=tmp_path / "runs.json", **{**options, **changes})

    return run


@pytest.fixture
def prompts(pair):
    """What every system is to be given."""
    ids = Tokenizer.load(pair[0]).encode(TEXT * 2, True)[: PROMPT_TOKENS - QUESTION_TOKENS]
    places = [0, (len(ids) - QUESTION_TOKENS) // 3, 2 * (len(ids) - QUESTION_TOKENS) // 3]
    return [ids + ids[place : place + QUESTION_TOKENS] for place in places]


@pytest.mark.slow
def test_every_system_answers_all_questions_as_transformers_does_one_by_one(compare_batch, pair, prompts):
    names = ["triforce", "autoregressive", "transformers", "transformers-prefix"]
    outcome, document = compare_batch(*names[1:])
    assert outcome.code == 0, outcome
    model = LlamaForCausalLM.from_pretrained(pair[0])
    model.generation_config.eos_token_id = None
    want = [greedy_oracle(model, prompt, TOKENS) for prompt in prompts]
    assert len(set(map(tuple, want))) == SEQUENCES, "the test is to show whose answer is whose"

    assert not undocumented(document, "json.md", "bench.md", but="details")
    assert (document["batch"], document["prompt_tokens"], document["new_tokens"]) == (SEQUENCES, PROMPT_TOKENS, TOKENS)
    assert [system["name"] for system in document["systems"]] == names
    ours = document["systems"][0]
    for system in document["systems"]:
        assert system["failure"] is None
        (run,) = system["runs"]
        assert run["token_ids"] == [*chain(*want)], system["name"]
        assert run["first_tokens"] == run["sequences"] == SEQUENCES
        assert 0 < run["ttft_s"] == system["ttft_s"]
        after_first = SEQUENCES * (TOKENS - 1)
        assert system["tokens_per_s"] == pytest.approx(after_first / run["decode_s"])
        assert system["tbt_ms"] == pytest.approx(1e3 * SEQUENCES / system["tokens_per_s"])
        assert system["speedup_of_triforce"]["tbt"] == pytest.approx(ours["tokens_per_s"] / system["tokens_per_s"])
        assert system["first_difference"] is None and system["differences"] == []
    details = ours["runs"][0]["details"]
    assert len(details["sequences"]) == SEQUENCES and details["reused_tokens"] == 0
    assert all(one["acceptance"]["draft"] is not None for one in details["sequences"]), "it speculates"
    assert [part in system["ran"] for part, system in zip(
        ("all sequences together", "all sequences together", "left-padded batch", "copied for each sequence"),
        document["systems"], strict=True,
    )] == [True] * 4  # fmt: skip

    rows = rows_of(outcome)
    assert [row.split()[0] for row in rows] == names
    assert all("the same tokens" in row for row in rows[1:])
    assert f"{SEQUENCES} sequences together, each with {PROMPT_TOKENS} tokens of prompt" in outcome.out
    assert "tokens/s: of all sequences together" in outcome.out


@pytest.mark.parametrize("name", ["deepspeed", "llama.cpp"])
def test_optional_systems_answer_all_questions(compare_batch, name):
    missing = BASELINES[name].missing()
    if missing:
        pytest.skip(f"{name} is {missing}")
    outcome, document = compare_batch(name)
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    assert other["runs"][0]["token_ids"] == ours["runs"][0]["token_ids"]
    assert {"deepspeed": "left-padded", "llama.cpp": "of all sequences"}[name] in other["ran"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_each_sequence_that_differs_is_named_with_the_targets_logits(compare_batch, pair, prompts):
    outcome, document = compare_batch("flips")
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


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_one_seed_gives_each_sequence_its_text_whatever_drafts(compare_batch):
    outcome, document = compare_batch("autoregressive", "transformers-assisted", temperature=1.2, seed=5)
    assert outcome.code == 0, outcome
    ours, plain, assisted = document["systems"]
    assert ours["runs"][0]["token_ids"] == plain["runs"][0]["token_ids"]
    assert "runs" not in assisted and assisted["failure"] == "assisted generation takes one sequence"
    rows = rows_of(outcome)
    assert "the same tokens" in rows[1] and "assisted generation takes one sequence" in rows[2]


PLAIN = {
    "system": "", "model": "", "draft": None, "asked_model": "", "asked_draft": None, "device": "cpu",
    "dtype": "float32", "prompt_ids": [5, 6], "max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
    "seed": None, "threads": 1, "folder": "",
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
    timed = system(job).generate_batch(text, questions, 6)
    want = [greedy_oracle(model, text + question, 6) for question in questions]
    assert timed.token_ids == [*chain(*want)]
    assert timed.first_tokens == 3
    assert timed.ttft_s > 0 and timed.decode_s > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, ("--batch", "'0'")),
        ({"batch": 65}, ("--batch is 65", "at most 64")),
        ({"prompt_tokens": 64}, ("--batch", "question of 32 tokens", "64 tokens")),
        ({"audit": True}, ("--audit and --batch",)),
        ({"ask": "Who?"}, ("--ask and --batch",)),
    ],
)
def test_impossible_batches_are_refused_before_anything_runs(compare_batch, options, words):
    flags = ["--audit"] if options.pop("audit", False) else []
    outcome, _ = compare_batch("transformers", *flags, **options)
    check_refusal(outcome, 2, *words)


def test_the_copied_prefix_is_refused_without_a_batch(compare):
    check_refusal(compare("transformers-prefix")[0], 2, "--baseline transformers-prefix", "--batch N")
