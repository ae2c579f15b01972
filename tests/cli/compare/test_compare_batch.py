"""`triforce compare --batch N`: several sequences over one text, in every system the same prompts."""

from importlib.util import find_spec
from itertools import chain

import pytest
from command import TEXT, check_refusal, undocumented
from comparisons import rows_of
from tiny import greedy_oracle
from transformers import LlamaForCausalLM
from triforce.tp import Tokenizer

SEQUENCES, TOKENS = 3, 12
PROMPT_TOKENS = 200
"""With the questions."""

QUESTION_TOKENS = 32
"""Of each question: the last tokens of a prompt."""

OPTIONAL = {"deepspeed": ("deepspeed", "accelerate"), "llama.cpp": ("llama_cpp", "gguf")}
"""Systems that are not always there, and the packages that they need."""


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
    if None in map(find_spec, OPTIONAL[name]):
        pytest.skip(f"{name} is not installed: pip install {' '.join(OPTIONAL[name])}")
    outcome, document = compare_batch(name)
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    assert other["runs"][0]["token_ids"] == ours["runs"][0]["token_ids"]
    assert {"deepspeed": "left-padded", "llama.cpp": "of all sequences"}[name] in other["ran"]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, ("--batch", "'0'")),
        ({"batch": 65}, ("--batch is 65", "at most 64")),
        ({"prompt_tokens": 64}, ("--batch", "prompt of more than 64 tokens", "it has 64")),
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
