"""Prompts of requests: by the chat template, as plain questions and answers, and after a saved context."""

from array import array
from dataclasses import replace

import pytest
from command import TEXT, run_here
from templates import with_template
from transformers import AutoTokenizer
from triforce.cli.session.request_prompt import request_prompts
from triforce.cli.session.wire import CHAT, COMPLETION, AnswerRequest, BodyError, Message
from triforce.offload import Sampling
from triforce.tp.errors import TriforceError
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.tokenizer import Tokenizer


def said(*messages):
    return tuple(Message.model_construct(role=role, content=(text,)) for role, text in messages)


REQUEST = AnswerRequest(CHAT, said(("user", "Why?")), (), None, 16, Sampling(), ("END",), 1)
TURNS = said(("user", "Why?"), ("assistant", "So."), ("user", "How?"))


def prompt_of(model, request):
    (found,) = request_prompts(request, Tokenizer.load(model), ModelConfig.load(model))
    assert isinstance(found.token_ids, array) and found.token_ids.itemsize == 4, "many may wait"
    return replace(found, token_ids=list(found.token_ids))


@pytest.fixture(scope="module")
def chatty(pair, tmp_path_factory):
    return with_template(pair[0], tmp_path_factory.mktemp("chatty"))


@pytest.fixture
def book(chatty, capfd, tmp_path, monkeypatch):
    """A text that is saved inside the frame of the chat template, and once without it."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)
    for more in ((), ("--raw", "--as", "raw")):
        read = ("read", tmp_path / "book.txt", "--model", chatty, "--device", "cpu", "--dtype", "float32", *more)
        assert run_here(capfd, *read).code == 0
    return TEXT


def test_messages_go_through_the_chat_template(chatty):
    oracle = AutoTokenizer.from_pretrained(chatty)
    for messages in (TURNS, said(("system", "Be brief."), ("user", "Why?")), said(("user", "a"), ("user", "b"))):
        found = prompt_of(chatty, replace(REQUEST, messages=messages))
        given = [{"role": role, "content": content} for role, content in ((one.role, one.text) for one in messages)]
        assert found.token_ids == oracle.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
        assert (found.stops, found.answers) == (("END",), True)


def test_a_model_without_a_template_gets_questions_and_answers_as_plain_text(pair):
    tokenizer = Tokenizer.load(pair[0])
    found = prompt_of(pair[0], replace(REQUEST, messages=TURNS))
    assert tokenizer.decode(found.token_ids) == "Question: Why?\nAnswer:So.\n\nQuestion: How?\nAnswer:"
    assert found.stops == ("END", "\nQuestion:") and found.answers


@pytest.mark.parametrize(
    "messages",
    [
        TURNS[:2],
        TURNS[1:],
        (*TURNS, *TURNS[:1]),
        said(("system", "x")),
        said(("user", "a"), ("system", "b"), ("user", "c")),
    ],
)
def test_messages_in_an_order_without_a_form_are_refused(pair, messages):
    with pytest.raises(BodyError, match="in turn"):
        prompt_of(pair[0], replace(REQUEST, messages=messages))


def test_a_system_message_that_has_no_place_is_refused(pair, chatty, book):
    messages = said(("system", "Be brief."), ("user", "Why?"))
    with pytest.raises(BodyError, match="no chat template"):
        prompt_of(pair[0], replace(REQUEST, messages=messages))
    with pytest.raises(BodyError, match="is given when it is saved"):
        prompt_of(chatty, replace(REQUEST, messages=messages, context="book"))


def test_a_completion_is_its_text_or_its_tokens(pair):
    tokenizer = Tokenizer.load(pair[0])
    asked = replace(REQUEST, endpoint=COMPLETION, messages=(), prompts=("It was",))
    found = prompt_of(pair[0], asked)
    assert found.token_ids == tokenizer.encode("It was", True) and not found.answers
    assert prompt_of(pair[0], replace(asked, prompts=([5, 6, 7],))).token_ids == [5, 6, 7]
    with pytest.raises(BodyError, match="the token 999; the model knows 0 to 319"):
        prompt_of(pair[0], replace(asked, prompts=([5, 999],)))
    with pytest.raises(BodyError, match="has no tokens"):
        prompt_of(pair[0], replace(asked, prompts=("",)))


def test_a_context_comes_before_the_messages_as_it_was_saved(chatty, book):
    tokenizer = Tokenizer.load(chatty)
    found = prompt_of(chatty, replace(REQUEST, messages=TURNS, context="book"))
    asked = "".join(f"<{one.role}>{one.text}" + ("</s>" if one.role == "assistant" else "") for one in TURNS[1:])
    whole = tokenizer.decode(found.token_ids)
    assert whole == tokenizer.decode(tokenizer.encode(f"<user>{book}Why?{asked}<assistant>", False))
    fresh = tokenizer.encode(f"<user>{book}", False)
    assert found.token_ids[: len(fresh)] == fresh


def test_a_completion_goes_on_from_a_context(chatty, book):
    tokenizer = Tokenizer.load(chatty)
    asked = replace(REQUEST, endpoint=COMPLETION, messages=(), prompts=("And then",), context="raw")
    found = prompt_of(chatty, asked)
    assert tokenizer.decode(found.token_ids) == book + "And then"


def test_what_does_not_fit_names_field_and_numbers(pair):
    with pytest.raises(BodyError, match=r"messages has [\d,]+ tokens and 16 more .* 1,024 positions") as raised:
        prompt_of(pair[0], replace(REQUEST, messages=said(("user", "why " * 900))))
    assert raised.value.code == "context_length_exceeded"


def test_a_context_that_is_not_there_is_refused(pair, book):
    with pytest.raises(BodyError, match="there is no context 'nope'") as raised:
        prompt_of(pair[0], replace(REQUEST, context="nope"))
    assert raised.value.param == "context"
    with pytest.raises(TriforceError, match="cannot be the name of a context"):
        prompt_of(pair[0], replace(REQUEST, context="../x"))
