"""Answers in Anthropic's form: blocks of what models write, whole and as events, however the text comes."""

import asyncio
import json
import random
from typing import Any

import pytest
from triforce.cli.options import AnsweringOptions
from triforce.cli.serve.answering.jobs import Complete, Job, Piece
from triforce.cli.serve.web.message_stream import MessageStream
from triforce.cli.session.answer_parts import AnswerSyntax
from triforce.cli.session.anthropic import message_body, messages_request
from triforce.cli.session.calls import CallForm, Tool
from triforce.cli.session.prompt import Prompt
from triforce.cli.session.response import AnswerEnd, FinishedAnswer, Timings
from triforce.cli.session.wire import MESSAGES

BODY = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 9, "stop_sequences": ["END"]}
REQUEST = messages_request(BODY, MESSAGES, AnsweringOptions(), ())
SYNTAX = AnswerSyntax(reasoning=False, form=CallForm("json"), tools={"f": Tool("f", "", {})})
TIMINGS = Timings(7, 3, 0.1, 5, 4, 0.2, 0, 0)
FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def call(arguments):
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def whole(text, reason="eos", stop=None):
    return message_body(REQUEST, "tiny", FinishedAnswer(reason, stop, 5, TIMINGS, text, None, SYNTAX))


def blocks(text, **more):
    found = [dict(block) for block in whole(text, **more)["content"]]
    return [{name: one for name, one in block.items() if name not in ("id", "signature")} for block in found]


class Given:
    """Events that have come already, one by one."""

    def __init__(self, events):
        self.events = list(events)

    async def next(self, _=None):
        return self.events.pop(0)


def sent(pieces, reason="eos", *, first_is_there=False):
    """What a stream sends at a time."""
    job = Job("me", lambda _: None, REQUEST, [Prompt([1] * 7, syntax=SYNTAX)])
    events = [*(Piece(0, piece) for piece in pieces), Complete(0, AnswerEnd(reason, None, 5, TIMINGS))]
    first = events.pop(0) if first_is_there else None
    given: Any = Given(events)

    async def read():
        stream = MessageStream(job, "tiny", 1.0, lambda error: {})
        return [some async for some in stream.run(first, given)]

    return asyncio.run(read())


def streamed(pieces, reason="eos"):
    """The blocks of a stream, and its last events but one."""
    each = b"".join(sent(pieces, reason)).split(b"\n\n")[:-1]
    found, blocks = [json.loads(one.split(b"data: ")[1]) for one in each], []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta" and (field := FIELDS.get(event["delta"]["type"])):
            blocks[event["index"]][field] += event["delta"][field]
    return blocks, found[-2]


def test_what_one_event_of_the_engine_makes_is_sent_at_once():
    def types(some):
        return [line.removeprefix(b"event: ").decode() for line in some.splitlines() if line.startswith(b"event: ")]

    begin, text, end = ["message_start"], ["content_block_start", "content_block_delta"], ["content_block_stop"]
    end += ["message_delta", "message_stop"]
    assert [types(some) for some in sent(["So."])] == [begin, text, end]
    assert [types(some) for some in sent(["So.", " Yes."], first_is_there=True)] == [begin + text, text[1:], end]


def test_blocks_stand_in_the_order_in_which_they_were_written():
    text = "<think>Hm.</think>So: " + call("{}") + "\n" + call('{"x": [1, 2]}') + " Done."
    assert blocks(text) == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "name": "f", "input": {}},
        {"type": "tool_use", "name": "f", "input": {"x": [1, 2]}},
        {"type": "text", "text": " \n Done."},
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"x": "two\nlines"}', {"x": "two\nlines"}),
        ('{"x": NaN, "y": 1}', {}),
        ('{"x": 1e999}', {}),
        ('{"x": "\\ud83d"}', {}),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", {}),
        ('{"x": ' + "[" * 700 + "]" * 700 + "}", {}),
        ("{x: 1}", {}),
    ],
    ids=["line end in a text", "no number", "infinite", "half a character", "too deep", "rather deep", "no JSON"],
)
def test_arguments_that_are_no_json_are_none(arguments, wanted):
    (block,) = blocks(call(arguments))
    assert block["input"] == wanted


def test_what_there_is_of_cut_arguments_is_kept():
    cut = call('{"x": 1, "y": {"z": "abc')[: -len("}\n</tool_call>")]
    (block,) = blocks(cut, reason="length")
    assert block["input"] == {"x": 1, "y": {}}


@pytest.mark.parametrize(
    ("text", "reason", "stop", "wanted"),
    [
        ("So.", "eos", None, ("end_turn", None)),
        ("So.", "length", None, ("max_tokens", None)),
        ("So.", "stop", "END", ("stop_sequence", "END")),
        ("So.", "stop", "\nQuestion:", ("end_turn", None)),
        (call("{}"), "eos", None, ("tool_use", None)),
        (call("{}"), "length", None, ("max_tokens", None)),
        (call("{}"), "stop", "END", ("stop_sequence", "END")),
    ],
)
def test_an_answer_says_why_it_ended(text, reason, stop, wanted):
    found = whole(text, reason=reason, stop=stop)
    assert (found["stop_reason"], found["stop_sequence"]) == wanted
    assert found["usage"]["input_tokens"] == 4 and found["usage"]["cache_read_input_tokens"] == 3


def test_a_stream_has_the_same_blocks_however_the_text_comes():
    rng = random.Random(5)
    words = ["<think>", "</think>", "So", "\n", " ", call("{}"), call('{"x": 5}'), "<tool_call>", "</tool", "{"]
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randint(0, 8)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found, last = streamed(pieces)
        want = whole(text)
        assert [block["type"] for block in found] == [block["type"] for block in want["content"]], (text, pieces)
        for block, other in zip(found, want["content"], strict=True):
            said = json.loads(block["partial_json"] or "{}") if block["type"] == "tool_use" else None
            assert said == other.get("input"), (text, pieces)
            assert [block.get(name) for name in ("text", "thinking")] == [
                other.get(name) for name in ("text", "thinking")
            ]
        assert last["delta"]["stop_reason"] == want["stop_reason"] and last["usage"] == want["usage"]
