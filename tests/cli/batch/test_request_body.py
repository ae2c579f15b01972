"""Bodies of requests: what is honoured is taken over, what would change the answer and is not is refused by name."""

import random

import pytest
from triforce.cli.options import AnsweringOptions
from triforce.cli.session.prompt import Prompt
from triforce.cli.session.text import AnswerText, StopTexts
from triforce.cli.session.wire import CHAT, COMPLETION, BodyError, request_from_body
from triforce.offload import Sampling
from triforce.tp.weights.tokenizer import Tokenizer

OPTIONS = AnsweringOptions()
ASKED = {"messages": [{"role": "user", "content": "Why?"}]}


def check(endpoint=CHAT, options=OPTIONS, **fields):
    body = (ASKED if endpoint == CHAT else {"prompt": "It was"}) | fields
    return request_from_body(body, endpoint, options, {"tiny", "/models/tiny"})


def refusal(endpoint=CHAT, **fields):
    with pytest.raises(BodyError) as raised:
        check(endpoint, **fields)
    return raised.value


def test_absent_fields_are_the_defaults_of_the_command():
    found = check()
    assert (found.max_new_tokens, found.sampling) == (256, Sampling(temperature=0.6, top_p=0.9, top_k=0))
    assert (found.stops, found.answers, found.context) == ((), 1, None)
    other = check(options=AnsweringOptions(max_new_tokens=9, sampling=Sampling(0.0, 1.0, 5, 7), context="book"))
    assert (other.max_new_tokens, other.sampling, other.context) == (9, Sampling(0.0, 1.0, 5, 7), "book")


def test_honoured_fields_are_taken_over():
    found = check(
        max_tokens=5, temperature=1, top_p=0.5, top_k=3, min_p=0.1, seed=9, stop="\n", n=2, context="book", model="tiny"
    )
    assert found.sampling == Sampling(temperature=1, top_p=0.5, top_k=3, min_p=0.1, seed=9)
    assert (found.max_new_tokens, found.stops, found.answers, found.context) == (5, ("\n",), 2, "book")
    assert check(max_completion_tokens=5).max_new_tokens == check(max_tokens=5, max_completion_tokens=5).max_new_tokens
    assert check(stop=["a", "b"]).stops == ("a", "b") and check(stop=[]).stops == ()
    assert check(COMPLETION).prompts == ("It was",) and check(COMPLETION, prompt=[1, 2]).prompts == ([1, 2],)
    assert check(seed=-5).sampling.seed == -5
    assert check(seed=2.0).sampling.seed == 2, "whole numbers may be written with a point"


def test_messages_are_roles_and_texts():
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
        {"role": "assistant", "content": "So.", "tool_calls": [], "refusal": None},
        {"role": "user", "content": ""},
    ]
    found = check(messages=said).messages
    roles_and_texts = [(message.role, message.text) for message in found]
    assert roles_and_texts == [("system", "Be brief."), ("user", "Why?"), ("assistant", "So."), ("user", "")]
    assert found[1].content == ("Wh", "y?")


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
        {"stream": False, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": None, "n": None, "stop": None, "reasoning_effort": None, "anything": None},
    ],
)
def test_what_changes_no_answer_is_accepted(fields):
    assert check(**fields) == check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("functions", [{"name": "f"}]),
        ("prediction", {"type": "content", "content": "So."}),
        ("reasoning_effort", "low"),
        ("temprature", 0.1),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name, value):
    error = refusal(**{name: value})
    assert error.param == name and name in str(error) and error.status == 400
    assert error.code == "unsupported_field"


def test_a_field_of_the_other_endpoint_names_it():
    assert "field of /v1/completions, not of /v1/chat/completions" in str(refusal(prompt="It was"))
    assert "field of /v1/chat/completions" in str(refusal(COMPLETION, max_completion_tokens=4))


def test_another_model_is_refused():
    error = refusal(model="gpt-4o")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'gpt-4o'" in str(error) and "'tiny'" in str(error)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": ["Why?"]}, "messages[0]", "object with role and content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", "'1'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
        (
            {"messages": [{"role": "user", "content": "x", "name": "A"}]},
            "messages[0].name",
            "supported only in messages of",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content", "half a character"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"temperature": True}, "temperature", "a number"),
        ({"temperature": -1}, "temperature", "0 (greedy) or more"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"top_k": -1}, "top_k", "0 or more"),
        ({"min_p": 1.5}, "min_p", "from 0 (off) to 1"),
        ({"min_p": float("nan")}, "min_p", "nan"),
        ({"min_p": "0.1"}, "min_p", "a number"),
        ({"seed": 2**63}, "seed", "2^63"),
        ({"seed": 0.5}, "seed", "whole number"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "129"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "give one of them"),
        ({"stop": ["a", ""]}, "stop", "empty text"),
        ({"stop": 5}, "stop", "list of texts"),
        ({"context": 5}, "context", "a text"),
    ],
)
def test_impossible_values_name_field_and_value(fields, param, words):
    error = refusal(**fields)
    assert error.param == param and words in str(error)


@pytest.mark.parametrize("prompt", [None, [], ["a", [1]], [[1], []], [[1], [True]], [True], ["a", None], ["\ud83d"], 5])
def test_a_completion_has_texts_or_token_ids(prompt):
    assert refusal(COMPLETION, prompt=prompt).param == "prompt"


def test_a_completion_may_have_several_prompts():
    found = check(COMPLETION, prompt=["a", "b", "a"], n=2)
    assert (found.prompts, found.n, found.answers) == (("a", "b", "a"), 2, 6)
    assert check(COMPLETION, prompt=[[1, 2], [3]]).prompts == ([1, 2], [3])
    assert check(COMPLETION, prompt=["a"] * 128).answers == check(COMPLETION, prompt=["a"] * 64, n=2).answers == 128
    for prompt, n in ((["a"] * 129, 1), (["a"] * 65, 2), ([[1]] * 2, 65)):
        error = refusal(COMPLETION, prompt=prompt, n=n)
        assert error.param == "prompt" and "128" in str(error)


def test_stops_are_found_however_the_text_comes():
    text, stops = "one two END three", ("END", "three", " E")
    for size in (1, 2, 5, 20):
        finder, grown, found = StopTexts(stops), "", None
        for start in range(0, len(text), size):
            before, grown = len(grown), grown + text[start : start + size]
            found = finder.first(grown, before)
            if found is not None:
                break
        assert found == text.index(" E"), "the first in the text, not in the list"
    assert StopTexts(stops).undecided("one two EN") == 2 and StopTexts(()).undecided("one") == 0


def test_the_pieces_of_an_answer_are_its_text_whatever_its_stops_begin_with(pair):
    tokenizer = Tokenizer.load(pair[0])
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice(" \nabQ:") for _ in range(rng.randint(1, 30)))
        stops = tuple("".join(rng.choice(" \nabQ:") for _ in range(rng.randint(1, 4))) for _ in range(3))
        token_ids = tokenizer.encode(text, False)
        for answers in (True, False):
            answer = AnswerText(tokenizer, Prompt([2], answers, stops), ())
            pieces = [answer.update(token_ids[: n + 1]) for n in range(len(token_ids))]
            assert "".join([*pieces, answer.finish()]) == answer.text, (text, stops, answers)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_an_answer_ends_before_a_stop_and_counts_no_token_after_it(pair, size):
    tokenizer = Tokenizer.load(pair[0])
    token_ids = tokenizer.encode("It was the best of times, it was the worst of times", False)
    answer = AnswerText(tokenizer, Prompt([2], False, (", it", "worst")), ())
    shown = "".join(answer.update(token_ids[: n + size]) for n in range(0, len(token_ids), size)) + answer.finish()
    assert shown == answer.text == "It was the best of times" and answer.stopped
    until = next(n for n in range(len(token_ids)) if ", it" in tokenizer.decode(token_ids[:n]))
    assert answer.num_tokens == until


def test_an_answer_without_a_stop_is_the_text_of_its_tokens_but_for_the_end(pair):
    tokenizer = Tokenizer.load(pair[0])
    token_ids = [*tokenizer.encode("  naïve 🙂 times, ", False), 1]
    for answers, want in ((False, "  naïve 🙂 times, "), (True, "naïve 🙂 times,")):
        answer = AnswerText(tokenizer, Prompt([2], answers, ("times!",)), (1,))
        shown = "".join(answer.update(token_ids[: n + 1]) for n in range(len(token_ids))) + answer.finish()
        assert shown.rstrip() == answer.text.rstrip() == want.rstrip() and answer.text == want
        assert not answer.stopped and answer.num_tokens == len(token_ids)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_a_chat_are_asked_for_with_two_fields(fields, wanted):
    assert check(**fields).top_logprobs == wanted


@pytest.mark.parametrize(("name", "value"), [("logprobs", "yes"), ("logprobs", 0), ("top_logprobs", 2)])
def test_half_a_wish_for_logprobs_is_refused_by_name(name, value):
    error = refusal(**{name: value})
    assert error.param == name and name in str(error) and error.status == 400


def test_more_logprobs_than_there_can_be_are_refused():
    with pytest.raises(BodyError, match="top_logprobs is 21; it must be from 0 to 20"):
        check(logprobs=True, top_logprobs=21)
