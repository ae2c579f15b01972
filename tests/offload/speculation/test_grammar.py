"""Answers with a grammar: drawn exactly from the target's distribution under it, whatever drafts, and in the form."""

import itertools
import json
import math
import random
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from checkpoints import change_config
from command import TEXT, save_tokenizer
from joint_distribution import NUM_TOKENS, PROMPT, SHAPE, TWO_TOKENS, VOCAB, exact_probabilities
from random_schemas import random_schema
from spmd import run_jobs
from tiny import save_llama
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, LogitsProcessor
from triforce.offload import Engine, Grammar, Request, Sampling
from triforce.offload.speculation.distribution import distribution
from triforce.offload.speculation.grammar import KEPT_BYTES, Grammars, Reasoning
from triforce.tp import UsageError
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.registry import PRESETS

GREEDY = Sampling(0.0)
END = 1
"""The token `</s>`."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMS: dict[Any, str] = {
    "json_schema": json.dumps(PERSON),
    "regex": r"(it|was) the (best|worst) of [a-z]{3,9}, [0-9]{2}",
    "lark": 'start: "yes" | "no" (" " start)+',
}


class Steps:
    """A grammar of numbers in the place of one of texts: what may follow a token depends on that."""

    def allowed(self, context, proposed, *, decides):
        rows = np.zeros((len(proposed) + 1, VOCAB), bool)
        for row, last in zip(rows, [context[-1], *proposed], strict=True):
            row[self.after(last)] = True
        return rows

    @staticmethod
    def after(token):
        return [(3 * token + step) % VOCAB for step in (0, 1, 4)]

    def forced(self, context, most):
        return []


class Stepwise:
    """Gives it to every sequence."""

    def matcher(self, grammar, start):
        return Steps()


@torch.inference_mode()
def enumerate_masked(model, sampling):
    """The exact probability of every continuation of `NUM_TOKENS` tokens, by transformers' logits."""
    prefixes = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    logits = model(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, len(PROMPT) - 1 : -1]
    joint = {}
    for prefix, rows in zip(prefixes, logits, strict=True):
        for row, last in zip(rows, [PROMPT[-1], *prefix], strict=False):
            forbidden = torch.ones(VOCAB, dtype=torch.bool)
            forbidden[Steps.after(last)] = False
            row[forbidden] = float("-inf")
        steps = distribution(rows.contiguous(), sampling)
        joint[prefix] = math.prod(float(steps[i, token]) for i, token in enumerate(prefix))
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-4)
    return joint


@pytest.mark.parametrize("draft", [pytest.param("draft", marks=pytest.mark.slow), "lookup", "none"])
def test_every_outcome_adds_up_to_the_distribution_under_the_grammar(tmp_path, draft):
    model = save_llama(tmp_path / "target", seed=1, **SHAPE)
    save_llama(tmp_path / "draft", seed=2, **SHAPE)
    given = {"draft_length": 1, "block_length": 2, "budget": 16, "chunk_size": 4, "dtype": "float32", "device": "cpu"}
    tiers = 2 if draft == "none" else 3
    engine = Engine.load(tmp_path / "target", tmp_path / draft if draft == "draft" else draft, tiers=tiers, **given)
    engine.grammars = cast(Grammars, Stepwise())
    engine.stream = partial(engine.stream, grammar=Grammar("regex", "x"))
    got, rejections, left_out = exact_probabilities(engine, TWO_TOKENS, 0.0)
    assert rejections["retrieval"] > 0 and left_out < 1e-5, rejections
    for tokens, probability in enumerate_masked(model, TWO_TOKENS).items():
        assert abs(got[tokens] - probability) < left_out + 1e-5


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A target and a draft with texts for their tokens, and transformers' target."""
    root = tmp_path_factory.mktemp("texts")
    for name, seed, layers in (("target", 0, 2), ("draft", 1, 1)):
        save_tokenizer(root / name)
        shape = {"vocab_size": 330, "num_hidden_layers": layers, "eos_token_id": END, "max_position_embeddings": 1024}
        save_llama(root / name, seed=seed, **shape)
    return root, LlamaForCausalLM.from_pretrained(root / "target").eval()


class Masked(LogitsProcessor):
    """The same mask for transformers' `generate`, from the beginning of the answer on."""

    def __init__(self, directory, grammar, start):
        self._grammars, self._grammar, self._start = Grammars(directory, ModelConfig.load(directory)), grammar, start

    def __call__(self, input_ids, scores):
        (row,) = input_ids.tolist()
        (allowed,) = self._grammars.matcher(self._grammar, self._start).allowed(row, [])
        return scores.masked_fill(~torch.from_numpy(allowed), float("-inf"))


def prompt_of(root, words=40):
    return Tokenizer.from_file(str(root / "target/tokenizer.json")).encode(TEXT).ids[: 5 * words]


def reference(texts, grammar, prompt, new=60):
    root, model = texts
    given = {
        "max_new_tokens": new,
        "do_sample": False,
        "logits_processor": [Masked(root / "target", grammar, len(prompt))],
    }
    return model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("draft", ["none", "draft", "lookup"])
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.slow(keep=4)
def test_greedy_text_is_that_of_transformers_with_the_same_mask(texts, kind, draft, resident):
    root, grammar = texts[0], Grammar(kind, FORMS[kind])
    prompt = prompt_of(root)
    want = reference(texts, grammar, prompt)
    settings = {"budget": 32, "resident": resident, "draft_length": 3, "block_length": 8, "dtype": "float32"}
    engine = Engine.load(root / "target", root / draft if draft == "draft" else draft, device="cpu", **settings)
    for tiers in range(1, engine.settings.tiers + 1):
        assert engine.stream(prompt, GREEDY, 60, grammar=grammar, tiers=tiers, reuse=0) is not None
        run = engine.stream(prompt, GREEDY, 60, grammar=grammar, tiers=tiers, reuse=0)
        for _ in run:
            pass
        assert run.statistics.token_ids == want, tiers
    engine.close()


def text_of(root, tokens):
    return Tokenizer.from_file(str(root / "target/tokenizer.json")).decode(tokens)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow(keep=2)
def test_answers_together_are_in_their_forms_and_a_seed_is_a_text(texts, seed):
    """Of several sequences, some of them without a grammar, with drafts and without."""
    root, chance = texts[0], random.Random(seed)
    wanted: list[Grammar | None] = [None, *(Grammar(kind, source) for kind, source in FORMS.items())]
    chance.shuffle(wanted)
    sampling = Sampling(chance.choice([0.7, 1.0, 1.5]), chance.choice([1.0, 0.9]), chance.choice([0, 20]), seed=seed)
    draft = chance.choice([root / "draft", "lookup", "none"])
    engine = Engine.load(root / "target", draft, device="cpu", dtype="float32", budget=32, block_length=6)
    requests = [Request(prompt_of(root, 20 + i), sampling, 300, grammar=one) for i, one in enumerate(wanted)]
    batch = engine.batch(requests)
    for _ in batch:
        pass
    for request, sequence, grammar in zip(requests, batch.sequences, wanted, strict=True):
        assert sequence.error is None
        run = engine.stream(request.prompt_ids, sampling, 300, grammar=grammar, tiers=1)
        for _ in run:
            pass
        found = sequence.statistics
        assert found.token_ids == run.statistics.token_ids
        if grammar and found.finish_reason == "eos":
            assert found.token_ids[-1] == END
            check_form(grammar, text_of(root, found.token_ids[:-1]))
    engine.close()


def check_form(grammar, text):
    if grammar.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(grammar.source))
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.source, text), text
    else:
        assert text == "yes" or re.fullmatch(r"no( no| yes)* yes", text), text


@pytest.mark.slow
def test_ranks_follow_it_alike(texts):
    root = texts[0]
    grammar = Grammar("json_schema", FORMS["json_schema"])
    prompt = prompt_of(root)
    job = {"model": str(root / "target"), "draft": str(root / "draft"), "device": "cpu", "dtype": "float32"}
    job |= {"prompt": prompt, "new_tokens": 60, "temperature": 0.0, "seed": 1, "settings": {"budget": 32}}
    (reports,) = run_jobs([job | {"grammar": grammar}], 2)
    assert all(report["token_ids"] == reference(texts, grammar, prompt) for report in reports)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow(keep=6)
def test_complete_answers_validate_against_random_schemas(texts, seed):
    """What is not supported is refused before the first token."""
    root, schema = texts[0], random_schema(random.Random(seed))
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", budget=32)
    grammar = Grammar("json_schema", json.dumps(schema))
    run = engine.stream(prompt_of(root), Sampling(1.0, 1.0, seed=seed), 400, grammar=grammar)
    for _ in run:
        pass
    if run.statistics.finish_reason == "eos":
        jsonschema.validate(json.loads(text_of(root, run.statistics.token_ids[:-1])), schema)
    engine.close()


def test_the_form_begins_behind_the_reasoning(texts):
    """Which is opened by the prompt, or by the model, or not at all."""
    root = texts[0]
    grammars = Grammars(root / "target", ModelConfig.load(root / "target"))
    source = FORMS["regex"]
    opens, closes = 300, 301
    first = grammars.matcher(Grammar("regex", source), 0).allowed([], [])[0]
    assert 0 < first.sum() < 20 and not first[opens]
    by_model = grammars.matcher(Grammar("regex", source, Reasoning(opens, closes, is_open=False)), 0)
    rows = by_model.allowed([], [opens, 7, closes, int(first.nonzero()[0][0])])
    assert rows[0].sum() == first.sum() + 1 and rows[0, opens]
    assert rows[1].sum() == rows[2].sum() == 329 and not rows[1, END], "anything but an end"
    assert (rows[3] == first).all() and 0 < rows[4].sum() < 60
    opened = grammars.matcher(Grammar("regex", source, Reasoning(opens, closes, is_open=True)), 0)
    assert opened.allowed([], [])[0].sum() == 329 and (opened.allowed([5, closes], [])[0] == first).all()
    assert opened.allowed([5, 6], [])[0].sum() == 329, "gone back"


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "the JSON schema cannot be read: "),
        ("json_schema", "true", "it must be a JSON object"),
        ("json_schema", '{"type": "wrong"}', "the JSON schema cannot be followed: .*wrong"),
        ("json_schema", '{"properties": {"a": {"not": {"type": "null"}}}}', "not"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "example.com"),
        ("regex", "(", "the regular expression cannot be followed: "),
        ("lark", "start: missing", "the grammar cannot be followed: .*missing"),
        ("regex", "x" * 2**14 + "y", "has more than 16,384 bytes"),
        ("lark", "start: a\na[max_tokens=5]: /b+/", "max_tokens is not supported"),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_the_first_token(texts, kind, source, message):
    engine = Engine.load(texts[0] / "target", "none", device="cpu")
    with pytest.raises(UsageError, match=message):
        engine.stream([1, 2], GREEDY, 5, grammar=Grammar(kind, source))


def test_a_text_that_is_taken_back_and_goes_on_otherwise_is_followed(texts):
    """As a matcher that knows nothing else says, whatever was tried before."""
    root, chance = texts[0], random.Random(3)
    grammars = Grammars(root / "target", ModelConfig.load(root / "target"))
    for kind, source in FORMS.items():
        grammar = Grammar(kind, source)
        matcher, text = grammars.matcher(grammar, 0), []
        for _ in range(200):
            del text[chance.randint(0, len(text)) :]
            (now,) = grammars.matcher(grammar, 0).allowed(text, [])
            tried = [*chance.sample(range(330), 2), *chance.choices(now.nonzero()[0].tolist(), k=2)]
            assert (matcher.allowed(text, tried)[0] == now).all()
            assert (matcher.allowed([*text, tried[0]], [], decides=False)[0]).any()
            token = chance.choice(now.nonzero()[0].tolist())
            text += [] if token == END else [token]


def test_a_draft_that_lacks_the_only_token_that_may_come_drafts_another(texts, tmp_path):
    """The end, say, where the target has it among further tokens."""
    root, _ = texts
    save_tokenizer(tmp_path / "draft")
    save_llama(tmp_path / "draft", seed=1, vocab_size=320)
    save_tokenizer(tmp_path / "target")
    path = str(tmp_path / "target/tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(path)
    save_llama(tmp_path / "target", seed=0, vocab_size=330, eos_token_id=tokenizer.token_to_id("<end>"))
    engine = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", dtype="float32", draft_length=3)
    found = engine.generate(prompt_of(root), Sampling(1.0, seed=2), 40, grammar=Grammar("regex", "[ab]{9}")).token_ids
    assert found[-1] == tokenizer.token_to_id("<end>") == 320
    engine.close()


def test_a_model_without_an_end_cannot_have_one(texts, tmp_path):
    save_tokenizer(tmp_path)
    save_llama(tmp_path, vocab_size=330)
    change_config(tmp_path, eos_token_id=None)
    engine = Engine.load(tmp_path, "none", device="cpu")
    with pytest.raises(UsageError, match="has no end-of-sequence token"):
        engine.stream([1, 2], GREEDY, 5, grammar=Grammar("regex", "a"))
    with pytest.raises(UsageError, match="ignore_eos"):
        engine.stream([1, 2], GREEDY, 5, grammar=Grammar("regex", "a"), ignore_eos=True)


def test_compiled_grammars_are_kept_by_the_bytes_of_their_sources(texts):
    root = texts[0]
    grammars = Grammars(root / "target", ModelConfig.load(root / "target"))
    names = [f"a{number}" * 500 for number in range(40)]  # some 60 KiB
    some = [Grammar("json_schema", json.dumps({"enum": names, "title": title})) for title in "abcdefghijkl"]
    most = KEPT_BYTES // len(some[0].source)
    assert 2 <= most < len(some)
    for grammar in some:
        grammars.prepare(grammar)
    assert len(grammars._compiled) == most and some[-1].source in [source for _, source in grammars._compiled]
    for number in range(60):
        grammars.prepare(Grammar("regex", f"a{{{number}}}b"))
    assert len(grammars._compiled) == 32


LIMITED = "([a-z ,.])*a[a-z ,.]{450}"
"""What needs many states of the lexer."""

WITH_OTHERS = {"a": {"type": "string", "pattern": f"^{LIMITED}$"}} | {f"p{at}": {"type": "string"} for at in range(100)}


@pytest.mark.parametrize(
    ("kind", "source"),
    [("regex", LIMITED), ("json_schema", json.dumps({"type": "object", "properties": WITH_OTHERS, "required": ["a"]}))],
)
def test_an_answer_uses_up_no_limit_of_another_in_the_same_form(kind, source):
    """The states of the lexer: three such answers have more than one may have, with a vocabulary of some thousand
    words."""
    directory = Path(PRESETS["embedded"].target)
    config, grammar = ModelConfig.load(directory), Grammar(kind, source)
    grammars, other = Grammars(directory, config), Grammars(directory, config)
    matchers = [grammars.matcher(grammar, 0) for _ in range(4)]
    forms, texts, chance = {id(one._form) for one in matchers}, [[] for _ in matchers], random.Random(5)
    assert len(forms) == 1
    for _ in range(200):
        for matcher, text in zip(matchers, texts, strict=True):
            (now,) = matcher.allowed(text, [])
            text.append(chance.choice(now.nonzero()[0].tolist()))
    assert len({id(one._form) for one in matchers} - forms) == 4, "each has one of its own by now"
    for matcher, text in zip(matchers, texts, strict=True):
        for stop in (200, 120, 3):
            alone = other.matcher(grammar, 0)
            want = [alone.allowed(text[:part], [])[0] for part in range(stop)]
            assert (matcher.allowed(text[: stop - 1], [])[0] == want[-1]).all()


def test_a_form_that_was_used_much_is_not_kept(texts):
    root = texts[0]
    grammars = Grammars(root / "target", ModelConfig.load(root / "target"))
    some = [Grammar("regex", f"[{letter}b]*") for letter in "acde"]
    matchers = [grammars.matcher(grammar, 0) for grammar in some]
    for _ in range(100):
        matchers[0].allowed([], [])
    assert len(grammars._compiled) == 4
    for _ in range(100):
        matchers[1].allowed([], [])
    assert [source for _, source in grammars._compiled] == [one.source for one in some[1:]], "the oldest has gone"
    for _ in range(1900):
        matchers[1].allowed([], [])
    assert not any(source == some[1].source for _, source in grammars._compiled)


def test_a_grammar_is_compiled_beside_who_asks_and_one_at_a_time(texts, monkeypatch):
    root = texts[0]
    grammars, go_on = Grammars(root / "target", ModelConfig.load(root / "target")), threading.Event()
    first, second, wrong = Grammar("regex", "a+"), Grammar("regex", "b+"), Grammar("regex", "(")
    compile_now = grammars.compile
    monkeypatch.setattr(grammars, "compile", lambda *key: (go_on.wait(60), compile_now(*key))[1])
    done = grammars.compile_beside(first)
    assert done is not None and not done.is_set() and grammars.compile_beside(second) is None
    go_on.set()
    assert done.wait(60)
    again = grammars.compile_beside(first)
    assert again is not None and again.is_set()
    for grammar in (wrong, second):
        beside = grammars.compile_beside(grammar)
        assert beside is not None and beside.wait(60), grammar
    with pytest.raises(UsageError, match="cannot be followed"):
        grammars.matcher(wrong, 0)
