"""Answers are read as reasoning, content and calls, the same however their text arrives."""

import json
import random
import time

import pytest
from triforce.cli.session.answer_parts import PLAIN, AnswerParts, AnswerSyntax
from triforce.cli.session.calls import CallForm, Tool

TOOLS = {
    "find": Tool(
        "find", "", {"type": "object", "properties": {"text": {"type": "string"}, "most": {"type": "integer"}}}
    ),
    "now": Tool("now", "", {}),
}
HARD = 'a } " </tool_call> \\ { é'
BAD_ESCAPE = '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>'
UNMARKED = HARD.replace("</tool_call>", "")
FIND = json.dumps({"text": HARD, "most": [1, {"x": 2}]}, ensure_ascii=False)


def read(syntax, pieces):
    """Reasoning, content, and the calls with their arguments, as they come together."""
    reader, texts, calls, ids = AnswerParts(syntax), {"reasoning": [], "content": []}, {}, {}
    for part in [*(part for piece in pieces for part in reader.add(piece)), *reader.finish()]:
        if part.call:
            assert ids.setdefault(part.call.index, part.call.id) == part.call.id and len(part.call.id) == 9
            calls.setdefault((part.call.index, part.call.name), []).append(part.text)
        else:
            texts[part.kind].append(part.text)
    assert [index for index, _ in calls] == list(range(reader.num_calls))
    return (
        "".join(texts["reasoning"]),
        "".join(texts["content"]),
        [(name, "".join(said)) for (_, name), said in calls.items()],
    )


def in_pieces(text, chance):
    while text:
        size = chance.choice([1, 1, 2, 3, 5, 9, 30])
        yield text[:size]
        text = text[size:]


CASES = {
    "json": [
        (
            f'So.\n<tool_call>\n{{"name": "find", "arguments": {FIND}}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"most": 1}, "name": "now"}\n</tool_call> Then.',
            ("So.\n\n Then.", [("find", FIND), ("now", '{"most": 1}')]),
        ),
        ("<tool_call>no</tool_call> and <tool", ("<tool_call>no</tool_call> and <tool", [])),
        ('A <tool_call>\n{"name": "find", "arguments": {"text": "cut', ("A", [("find", '{"text": "cut')])),
        ('<tool_call>{"nam', ('<tool_call>{"nam', [])),
        ("1 < 2 <tool_x>", ("1 < 2 <tool_x>", [])),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("now", '{"a": 1}')])),
        ('<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
        (
            '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>',
            ('<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>', []),
        ),
        (
            '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"a": 1}}</tool_call>.',
            (".", [("now", "{}"), ("now", '{"a": 1}')]),
        ),
        (
            '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {"a": 1}}',
            ("", [("now", "{}"), ("now", '{"a": 1}')]),
        ),
        ('<tool_call>{"name": "now", "arguments": {}}\nThe rest.', ("The rest.", [("now", "{}")])),
        ('<tool_call>{"arguments": null, "name": "now"}</tool_call>', ("", [("now", "{}")])),
        ('<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_call>.', (".", [("now", "{}")])),
    ],
    "xml": [
        (
            f"So.\n<tool_call>\n<function=find>\n<parameter=text>\n{UNMARKED}\n12\n</parameter>\n"
            "<parameter=most>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
            "</tool_call>",
            (
                "So.",
                [
                    (
                        "find",
                        json.dumps({"text": UNMARKED + "\n12", "most": 12}, ensure_ascii=False),
                    ),
                    ("now", "{}"),
                ],
            ),
        ),
        (
            '<tool_call>\n<function=other>\n<parameter=a>\n{"b": 1}\n</parameter>\n<parameter=c>\nTrue\n</parameter>\n'
            "<parameter=d>\nwords\n</parameter>\n</function>\n</tool_call>",
            ("", [("other", '{"a": {"b": 1}, "c": true, "d": "words"}')]),
        ),
        ("<tool_call> no </tool_call>.", ("<tool_call> no </tool_call>.", [])),
        ("<tool_call>\n<function=find>\n<parameter=text>\ncut", ("", [("find", "")])),
        (
            "<tool_call>\n<function=find>\n<parameter=text>\n</tool_call> </parameter>\n</parameter>\n<parameter=most>",
            ("<parameter=most>", [("find", '{"text": "</tool_call> </parameter>"')]),
        ),
        (
            "<tool_call><function=find><parameter=text>a\n</parameter></function></tool_call>",
            ("", [("find", '{"text": "a\\n"}')]),
        ),
        ("<tool_call>\n<function=find>\n<parameter=text>\n</parameter>\n</function>", ("", [("find", '{"text": ""}')])),
        (
            "<tool_call>\n<function=find>\n<parameter=most>\nNaN\n</parameter>\n</function>",
            ("", [("find", '{"most": "NaN"}')]),
        ),
    ],
    "bare": [
        (f'{{"name": "find", "parameters": {FIND}}}', ("", [("find", FIND)])),
        (
            ' {"name": "now", "parameters": {}}; {"name": "now", "parameters": {"most": 1}}',
            ('; {"name": "now", "parameters": {"most": 1}}', [("now", "{}")]),
        ),
        ('{"a": 1} is JSON', ('{"a": 1} is JSON', [])),
        ('{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', [])),
        ('It is {"name": "now", "parameters": {}}', ('It is {"name": "now", "parameters": {}}', [])),
        ('{"name": "now", "param', ('{"name": "now", "param', [])),
        ('{"type": "function", "name": "now", "parameters": {"most": 2}}', ("", [("now", '{"most": 2}')])),
    ],
    "list": [
        (
            f'[TOOL_CALLS] [{{"name": "find", "arguments": {FIND}}}, {{"name": "now", "arguments": {{}}}}]',
            ("", [("find", FIND), ("now", "{}")]),
        ),
        (
            'So. [TOOL_CALLS][{"name": "now", "arguments": {"most": 1}, "id": "123456789"}]',
            ("So.", [("now", '{"most": 1}')]),
        ),
        ("[TOOL_CALLS] no", ("[TOOL_CALLS] no", [])),
        ("[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
        ('[TOOL_CALLS][{"name": "now", "arguments": {', ("", [("now", "{")])),
    ],
    "named": [
        (f"[TOOL_CALLS]find[ARGS]{FIND}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", ("", [("find", FIND), ("now", "{}")])),
        ('So.[TOOL_CALLS]now{"most": 1}', ("So.", [("now", '{"most": 1}')])),
        ("[TOOL_CALLS]now[AR", ("[TOOL_CALLS]now[AR", [])),
    ],
}


@pytest.mark.parametrize(("style", "text", "wanted"), [(style, *case) for style in CASES for case in CASES[style]])
def test_calls_are_those_of_the_form_however_the_text_arrives(style, text, wanted):
    thoughts = {None: "", False: "<think>\nHm <tool_call> {}\n</think>\n\n", True: "Hm <tool_call> {} \n</think>\n"}
    for begun, before in thoughts.items():
        syntax = AnswerSyntax(begun, CallForm(style), TOOLS)
        for seed in range(40):
            reasoning, *rest = read(syntax, in_pieces(before + text, random.Random(seed)))
            assert reasoning == ("Hm <tool_call> {}" if before else "") and tuple(rest) == wanted, seed


def test_reasoning_that_never_ends_is_no_content():
    assert read(AnswerSyntax(True), ["Hm. ", "So? \n"]) == ("Hm. So?", "", [])
    assert read(AnswerSyntax(False), ["<thi", "nk>Hm."]) == ("Hm.", "", [])
    assert read(AnswerSyntax(False), ["<thi", "ng>"]) == ("", "<thing>", [])
    assert read(AnswerSyntax(False), [" So <think> is a word"]) == ("", "So <think> is a word", [])


def test_an_answer_without_either_is_shown_as_it_is():
    assert read(PLAIN, [" <think> ", "<tool_call> "]) == ("", " <think> <tool_call> ", [])


def test_half_a_character_is_sent_to_nobody():
    for text in (
        '<tool_call>{"name": "a\\ud83d", "arguments": {"b": "\\ud83d"}}</tool_call>',
        '<tool_call>{"arguments": {"b": "\\ud83d"}, "name": "a\\ud83d"}</tool_call>',
        '<tool_call>{"arguments": "\\ud83d", "name": "a"}</tool_call>',
    ):
        _, _, [(name, arguments)] = read(AnswerSyntax(None, CallForm("json")), [text])
        assert name.encode() in (b"a?", b"a") and arguments.encode()


def test_arguments_are_streamed():
    reader = AnswerParts(AnswerSyntax(None, CallForm("json"), TOOLS))
    first = reader.add('<tool_call>{"name": "find", "arguments": {"text": "ab')
    assert [(part.call and part.call.name, part.text) for part in first] == [("find", '{"text": "ab')]
    assert [part.text for part in reader.add("cd")] == ["cd"]


def test_long_calls_take_time_by_their_length():
    """Each letter is looked at once: a text of a million letters in pieces of four is read in seconds."""
    reader = AnswerParts(AnswerSyntax(None, CallForm("json"), TOOLS))
    reader.add('<tool_call>{"name": "find", "arguments": {"text": "')
    said = sum(len(part.text) for _ in range(100_000) for part in reader.add("ab\\n"))
    assert said == 400_000


@pytest.mark.parametrize(
    ("style", "begin", "more"),
    [
        ("json", '<tool_call>{"name": "find", "arguments": {"text": "', "ab"),
        ("json", "<tool_call>", " "),
        ("xml", "<tool_call><function=find>", "<parameter=a>\n"),
        ("xml", "<tool_call><function=find><parameter=a>\n", "</parameter>"),
        ("named", "[TOOL_CALLS]f", " "),
        ("bare", "", " "),
    ],
)
def test_what_a_model_repeats_takes_time_by_its_length(style, begin, more):
    for pieces in ([begin + more * 200_000], [begin, *[more * 20] * 10_000]):
        began = time.thread_time()  # what this thread computes: others may have the processor for seconds
        read(AnswerSyntax(False, CallForm(style), TOOLS), pieces)
        assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "10115", "10115"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "10115", "10115"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "10115", 10115),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"type": "boolean"}, "True", True),
        ({}, "5", 5),
        (True, "words", "words"),
    ],
)
def test_a_value_is_what_its_schema_can_have(schema, text, wanted):
    tools = {"find": Tool("find", "", {"type": "object", "properties": {"x": schema}})}
    call = f"<tool_call><function=find><parameter=x>\n{text}\n</parameter></function></tool_call>"
    _, _, [(_, arguments)] = read(AnswerSyntax(None, CallForm("xml"), tools), [call])
    assert json.loads(arguments) == {"x": wanted}
