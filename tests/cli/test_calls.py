"""Grammars of calls: what an answer with tools may be, in each family's form."""

import contextlib
import json

import numpy as np
import pytest
from checkpoints import change_config
from tokenizers import Tokenizer as Backend
from tool_models import tool_model
from triforce.cli.session.calls import AllowedCalls, CallForm, Tool, call_grammar
from triforce.offload.speculation.grammar import GrammarError, Grammars
from triforce.tp import Tokenizer
from triforce.tp.model.config import ModelConfig

END = 1
FIND = Tool(
    "find",
    "",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "most": {"$ref": "#/$defs/most"}},
        "required": ["most"],
        "additionalProperties": False,
        "$defs": {"most": {"type": "integer", "maximum": 99}},
    },
)
NOW = Tool("now", "", {})
STRICT = Tool("find", "", FIND.parameters, strict=True)
ANY = AllowedCalls((FIND, NOW), needed=True)
ONE = AllowedCalls((FIND, NOW), several=False)
SCHEMA = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})

FIRST = {
    "json": '<tool_call>\n{"name": "find", "arguments": {"most": 5}}\n</tool_call>',
    "xml": "<tool_call>\n<function=find>\n<parameter=most>\n5\n</parameter>\n</function>\n</tool_call>",
    "bare": '{"name": "find", "parameters": {"most": 5}}',
    "list": '[TOOL_CALLS] [{"name": "find", "arguments": {"most": 5}}]',
    "named": '[TOOL_CALLS]find[ARGS]{"most": 5}',
}
BOTH = {
    "json": FIRST["json"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "xml": FIRST["xml"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "list": '[TOOL_CALLS][{"name": "find", "arguments": {"most": 5}}, {"name": "now", "arguments": {}}]',
    "named": FIRST["named"] + "[TOOL_CALLS]now[ARGS]{}",
}


@pytest.fixture(scope="module", params=[("json", None), ("json", False), ("xml", False), ("xml", None), ("bare", None),
                                        ("list", True), ("list", None), ("named", True)], ids=str)  # fmt: skip
def family(request, pair, tmp_path_factory):
    """A style, and whether a whole text is one that a grammar allows."""
    style, special = request.param
    model = tool_model(pair[0], tmp_path_factory.mktemp(style), style, special=special)
    change_config(model, eos_token_id=END)
    tokenizer, grammars = Tokenizer.load(model), Grammars(model, ModelConfig.load(model))
    assert CallForm.of(tokenizer) == CallForm(style)
    backend = Backend.from_file(str(model / "tokenizer.json"))

    def allows(allowed, text, schema=None, spelled=False):
        """Whether a text, and its end, may come; with marks as ordinary tokens if `spelled`."""
        grammar = call_grammar(CallForm(style), allowed, tokenizer, schema)
        ids = backend.encode(text, add_special_tokens=False).ids
        if spelled:
            ids = [token for letter in text for token in backend.encode(letter, add_special_tokens=False).ids]
        masks = grammars.matcher(grammar, 0).allowed([], ids)
        return bool(np.all([mask[token] for mask, token in zip(masks, [*ids, END], strict=True)]))

    return style, allows


def test_needed_calls_are_of_their_schema(family):
    style, allows = family
    assert allows(ANY, FIRST[style])
    assert style == "bare" or allows(ANY, BOTH[style])
    assert not allows(ANY, "So.") and not allows(ANY, "") and not allows(ANY, "So. " + FIRST[style])
    assert not allows(ANY, FIRST[style].replace("5", "100")), "more than its schema allows"
    assert not allows(ANY, FIRST[style].replace("find", "gone"))
    assert not allows(ANY, FIRST[style][:-1])


def test_one_call_is_one_and_none_is_none(family):
    style, allows = family
    assert allows(ONE, FIRST[style]) and allows(ONE, "So.") and allows(ONE, "")
    assert style == "bare" or (allows(ONE, "So.\n" + FIRST[style]) and not allows(ONE, BOTH[style]))
    # Where a call is the whole answer, nobody reads one of an answer that has none.
    assert allows(AllowedCalls(()), "So.") and allows(AllowedCalls(()), FIRST[style]) is (style == "bare")


def test_strict_tools_are_so_where_the_model_decides(family):
    style, allows = family
    wrong = FIRST[style].replace("5", "100")
    for tool, as_it_is in ((FIND, True), (STRICT, False)):
        allowed = AllowedCalls((tool, NOW), several=False)
        assert allows(allowed, FIRST[style]) and allows(allowed, "So.") and allows(allowed, wrong) is as_it_is
    assert style == "bare" or allows(AllowedCalls((STRICT, NOW)), "So. " + BOTH[style])


def test_an_answer_may_have_a_form_beside_calls(family):
    style, allows = family
    for allowed in (AllowedCalls((FIND, NOW)), AllowedCalls(())):
        assert allows(allowed, '{"ok": true}', SCHEMA) and not allows(allowed, "So.", SCHEMA)
        assert allows(allowed, FIRST[style], SCHEMA) is bool(allowed.tools)


def test_texts_of_arguments_are_written_as_they_are(family):
    style, allows = family
    if style == "xml":
        text = 'a\n"</param\n</parameter >'
        call = FIRST[style].replace("<parameter=most>", f"<parameter=text>\n{text}\n</parameter>\n<parameter=most>")
        assert allows(ANY, call)


def test_a_mark_cannot_be_spelled_to_get_around_a_strict_schema(family):
    """Where the mark is a token, its letters one by one are another spelling."""
    style, allows = family
    if style != "bare":
        wrong = FIRST[style].replace("5", "100")
        allowed = AllowedCalls((STRICT, NOW))
        assert not allows(allowed, wrong) and not allows(allowed, wrong, spelled=True)
        assert allows(allowed, "So <tool [TOOL", spelled=True)


def test_a_schema_that_cannot_be_followed_is_refused(family):
    style, allows = family
    bad = Tool("find", "", {"type": "object", "properties": {"a": {"$ref": "#/gone"}}, "required": ["a"]})
    with pytest.raises(GrammarError, match="grammar of the tools cannot be followed"):
        allows(AllowedCalls((bad,), needed=True), FIRST[style])


def test_texts_of_arguments_keep_to_their_limits(family):
    style, allows = family
    schema = {"type": "string", "minLength": 2, "maxLength": 6, "pattern": "^[a-z/]+$"}
    tool = Tool("find", "", {"type": "object", "properties": {"text": schema}, "required": ["text"]})
    for text, fits in (("ab/c", True), ("a", False), ("abcdefg", False), ("aB", False)):
        call = FIRST[style].replace('"most": 5', f'"text": "{text}"').replace("most>\n5", f"text>\n{text}")
        assert allows(AllowedCalls((tool,), needed=True), call) is fits
    for more in ({"pattern": "a"}, {"format": "date"}):
        tool = Tool("find", "", {"type": "object", "properties": {"text": {"type": "string", **more}}})
        if style == "xml":
            with pytest.raises(GrammarError, match=r"text, which .* quotes, has the (pattern|format) .*; it "):
                allows(AllowedCalls((tool,), needed=True), FIRST[style])


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"text": True}},
        {"properties": []},
        {"properties": 5, "required": ["text"]},
        {"properties": {"text": {"type": "string", "pattern": 5}}},
        {"properties": {"text": {"type": "string", "minLength": "1}a)/)\nevil: /a/\nZ: (/(.{1"}}},
        {"properties": {"text": {"type": "string", "minLength": 5.5}}},
        {"properties": {f"p{i}": {"type": "integer"} for i in range(500)}, "$defs": {"x": {"title": "x" * 100_000}}},
    ],
    ids=["true", "list", "number", "pattern", "injected", "length", "definitions"],
)
def test_odd_schemas_are_followed_or_refused(family, parameters):
    style, allows = family
    tool = Tool("find", "", {"type": "object", **parameters})
    for allowed in (AllowedCalls((tool,), needed=True), AllowedCalls((tool,), several=False)):
        with contextlib.suppress(GrammarError, ValueError):  # the second: it becomes too complex within an answer
            allows(allowed, FIRST[style])


def test_slashes_of_a_pattern_are_no_ends(family):
    style, allows = family
    schema = {"type": "string", "pattern": "^\\/api\\/[a-z/]+$"}
    tool = Tool("find", "", {"type": "object", "properties": {"text": schema}, "required": ["text"]})
    for text, fits in (("/api/a/b", True), ("/api/A", False)):
        call = FIRST[style].replace('"most": 5', f'"text": "{text}"').replace("most>\n5", f"text>\n{text}")
        assert allows(AllowedCalls((tool,), needed=True), call) is fits


def test_schemas_that_are_too_long_together_are_refused_before_each_is_looked_at():
    many = tuple(Tool(f"f{number}", "", {"title": f"{number}", "type": "wrong"}, strict=True) for number in range(4000))
    with pytest.raises(GrammarError, match="the grammar of the tools has more than 262,144 bytes"):
        AllowedCalls(many).check()
    with pytest.raises(GrammarError, match="f0: the JSON schema cannot be followed"):
        AllowedCalls(many[:100]).check()


def test_reading_needs_no_more_of_a_tool_than_its_name_and_types():
    assert STRICT.for_reading(CallForm("json")) == Tool("find", "", {"properties": {}})
    found = STRICT.for_reading(CallForm("xml"))
    assert (found.name, found.description, found.strict) == ("find", "", False)
    assert found.parameters == {"properties": {"text": {"type": ["string"]}, "most": {"type": []}}}
