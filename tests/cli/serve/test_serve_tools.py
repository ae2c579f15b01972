"""Tools over HTTP: prompts describe them, calls are in each family's form, and `tool_choice` decides on an answer."""

import json
import random

import jsonschema
import pytest
from checkpoints import change_config
from random_schemas import damaged, random_schema
from served import CHAT, COMPLETION, Process
from tool_models import MARKS, tool_model
from transformers import AutoTokenizer

END = 1
PARAMETERS = {
    "type": "object",
    "properties": {"day": {"enum": ["Mon", "Tue"]}, "most": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["day", "most"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": NONE}},
]
SCHEMAS = {"find": PARAMETERS, "now": NONE}
ASKED = {"messages": [{"role": "user", "content": "When?"}], "tools": TOOLS, "max_tokens": 150, "temperature": 1.0}
FAMILIES = [
    ("json", None),
    ("json", False),
    ("json", True),
    ("xml", False),
    ("bare", None),
    ("list", True),
    ("named", True),
]


def serving(model, folder, forks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(folder))
        return Process((model, model), folder / "log", forks, "--draft", "lookup")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda one: f"{one[0]}-{one[1]}")
def family(request, pair, tmp_path_factory):
    """The style of a family, its model, and a server of that."""
    style, special = request.param
    folder, forks = tmp_path_factory.mktemp(style), []
    model = tool_model(pair[0], folder, style, special=special)
    change_config(model, eos_token_id=END)
    yield style, model, serving(model, folder, forks)
    for fork in forks:
        fork.kill()


def choices_of(reply, count):
    """Those of a request for `count` answers, which are written at the same time, each with a seed of its own."""
    assert reply.status == 200, reply.body
    assert len(reply.json["choices"]) == count
    return reply.json["choices"]


def choice_of(reply):
    return choices_of(reply, 1)[0]


def calls_of(message):
    """Names and arguments, which are of the tools' schemas."""
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    assert all(call["type"] == "function" for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == len(found)
    return found


def streamed(server, **asked):
    """The message that a stream brings, its `finish_reason`, and the kinds of its deltas in order."""
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    reply = server.ask("POST", CHAT, {**asked, "stream": True})
    assert reply.status == 200 and reply.events[-1] == "[DONE]", reply.body
    for event in reply.events[:-1]:
        (choice,) = event["choices"]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value if name != "role" else value
                continue
            for call in value:
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    message["tool_calls"].append(call)
                else:
                    assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def test_a_required_call_comes_and_is_of_its_schema(family):
    server = family[2]
    for seed in range(6):
        asked = {**ASKED, "tool_choice": "required", "seed": seed}
        choice = choice_of(server.ask("POST", CHAT, asked))
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        calls = calls_of(choice["message"])
        message, reason = streamed(server, **asked)
        assert (calls_of(message), reason, message["content"]) == (calls, "tool_calls", "")


def test_a_named_tool_is_called_once(family):
    server = family[2]
    named = {"type": "function", "function": {"name": "now"}}
    for choice in choices_of(server.ask("POST", CHAT, {**ASKED, "tool_choice": named, "seed": 0, "n": 3}), 3):
        assert (choice["finish_reason"], calls_of(choice["message"])) == ("tool_calls", [("now", {})])


def test_without_parallel_calls_there_is_one(family):
    server = family[2]
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "seed": 0, "n": 4}
    for choice in choices_of(server.ask("POST", CHAT, asked), 4):
        assert choice["finish_reason"] == "tool_calls" and len(calls_of(choice["message"])) == 1


def test_with_none_nothing_is_called_though_the_prompt_is_the_same(family):
    style, _, server = family
    reply = server.ask("POST", CHAT, {**ASKED, "tool_choice": "none", "seed": 2, "n": 4, "max_tokens": 60})
    for choice in choices_of(reply, 4):
        message = choice["message"]
        assert "tool_calls" not in message and not any(mark in message["content"] for mark in MARKS[style])
    other = server.ask("POST", CHAT, {**ASKED, "max_tokens": 1})
    assert other.json["usage"]["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]


def test_a_form_of_answers_is_one_beside_calls(family):
    """With `response_format`, an answer is calls or JSON of that schema."""
    server = family[2]
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    kinds = set()
    for choice in choices_of(server.ask("POST", CHAT, {**ASKED, "response_format": wanted, "seed": 0, "n": 8}), 8):
        if choice["finish_reason"] == "length":
            continue
        message = choice["message"]
        kinds.add("tool_calls" in message)
        if "tool_calls" not in message:
            jsonschema.validate(json.loads(message["content"]), schema)
            assert choice["finish_reason"] == "stop"
    assert kinds


def test_strict_tools_are_called_by_their_schema_where_the_model_decides(family):
    """A random model hardly calls; what it writes ends, and is no broken call."""
    _style, _, server = family
    tools = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
    asked = {**ASKED, "tools": tools, "seed": 0, "n": 3, "max_tokens": 60}
    for choice in choices_of(server.ask("POST", CHAT, asked), 3):
        if "tool_calls" in choice["message"] and choice["finish_reason"] != "length":
            calls_of(choice["message"])


def test_the_prompt_is_that_of_transformers(family):
    """Tools, calls and their results go through the chat template as it takes them."""
    _, model, server = family
    called = {"name": "find", "arguments": {"day": "Mon", "most": 3}}
    call = {"id": "abcdefghi", "type": "function", "function": called}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "At 5."},
    ]
    said = ((one["function"]["name"], one["function"].get("description", "")) for one in TOOLS)
    tools = [
        {"type": "function", "function": {"name": name, "description": described, "parameters": SCHEMAS[name]}}
        for name, described in said
    ]
    oracle = AutoTokenizer.from_pretrained(model)
    ids = oracle.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    sent = [dict(one) for one in messages]
    sent[1] = {
        "role": "assistant",
        "tool_calls": [{**call, "function": {**called, "arguments": json.dumps(called["arguments"])}}],
    }
    reply = server.ask("POST", CHAT, {**ASKED, "messages": sent, "max_tokens": 3, "temperature": 0})
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["prompt_tokens"] == len(ids)
    alone = server.complete(ids, max_tokens=3, temperature=0).json["choices"][0]["text"]
    assert (reply.json["choices"][0]["message"]["content"] or "") == alone.strip()


def test_a_text_beside_a_result_is_part_of_it_where_the_template_wants_an_answer_next(pair, tmp_path):
    """As Mistral's templates do."""
    model, forks = tool_model(pair[0], tmp_path, "list", special=True), []
    template = model / "chat_template.jinja"
    strict = (
        "{%- for m in messages %}{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}"
    )
    strict += "{{ raise_exception('after a result comes an answer') }}{% endif %}{% endfor %}"
    template.write_text(strict + template.read_text())
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    before = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "abcdefghi"}
    apart = [*before, {**result, "content": "At 5."}, {"role": "user", "content": "Sure?"}]
    joined = [*before, {**result, "content": "At 5.\n\nSure?"}]
    try:
        server = serving(model, tmp_path, forks)
        found = [server.ask("POST", CHAT, {**ASKED, "messages": one, "temperature": 0}).json for one in (apart, joined)]
        assert found[0]["usage"]["prompt_tokens"] == found[1]["usage"]["prompt_tokens"]
        assert found[0]["choices"][0]["message"]["content"] == found[1]["choices"][0]["message"]["content"]
    finally:
        for fork in forks:
            fork.kill()


@pytest.fixture(scope="module", params=[()], ids=[""])
def server(request, pair, tmp_path_factory):
    folder, forks = tmp_path_factory.mktemp("tools"), []
    model = tool_model(pair[0], folder, "json", special=False, more=request.param)
    change_config(model, eos_token_id=END)
    yield serving(model, folder, forks)
    for fork in forks:
        fork.kill()


def changed(**fields):
    return {"type": "function", "function": {**TOOLS[0]["function"], **fields}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [changed(name="a b")]}, "tools[0].function.name", "'a b'"),
        ({"tools": [changed(parameters=[])]}, "tools[0].function.parameters", "must be an object"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two of the name find"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice", "'gone'"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "give one of them",
        ),
        ({"regex": "a+"}, "regex", "without tools"),
        (
            {
                "tools": [changed(parameters={"type": "object", "properties": {"a": {"$ref": "#/gone"}}})],
                "tool_choice": "required",
            },
            "tools",
            "cannot be followed",
        ),
        ({"messages": [{"role": "tool", "content": "5", "tool_call_id": "x"}]}, "messages[0].tool_call_id", "'x'"),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "in messages of assistant",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(server, fields, param, words):
    reply = server.ask("POST", CHAT, {**ASKED, **fields})
    assert reply.status == 400, reply.body
    assert reply.json["error"]["param"] == param and words in reply.json["error"]["message"], reply.json


def test_models_without_a_form_of_calls_say_so(pair, tmp_path, server):
    assert server.ask("POST", COMPLETION, {"prompt": "It was", "tools": TOOLS}).json["error"]["param"] == "tools"
    forks = []
    try:
        plain = serving(pair[0], tmp_path, forks)
        error = plain.ask("POST", CHAT, ASKED).json["error"]
        assert error["param"] == "tools" and "this model has no chat template" in error["message"]
    finally:
        for fork in forks:
            fork.kill()


@pytest.mark.parametrize("depth", [60, 199, 201, 700])
def test_earlier_calls_may_be_nested_deeply(server, depth):
    function = {"name": "now", "arguments": f'{{"a": {"[" * depth}{"]" * depth}}}'}
    call = {"id": "a", "type": "function", "function": function}
    asked = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = server.ask("POST", CHAT, {"messages": [*asked, *ASKED["messages"]], "max_tokens": 1})
    assert reply.status == 200 or "positions" in reply.json["error"]["message"], reply.body


@pytest.mark.parametrize("server", [("<think>", "</think>")], indirect=True, ids=["thinks"])
def test_reasoning_stands_in_a_field_of_its_own(server):
    """By a grammar that ends it, as a random model would go on."""
    asked = {"messages": [{"role": "user", "content": "So?"}], "regex": "yes", "temperature": 1.0, "max_tokens": 200}
    seen = set()
    for seed in range(30):
        choice = choice_of(server.ask("POST", CHAT, {**asked, "seed": seed}))
        message = choice["message"]
        seen.add("reasoning_content" in message)
        assert message["content"] in ("yes", "") and "<think>" not in message.get("reasoning_content", "")
        if choice["finish_reason"] == "stop":
            assert message["content"] == "yes"
        whole, reason = streamed(server, **asked, seed=seed)
        assert (whole["content"], reason) == (message["content"], choice["finish_reason"])
        assert whole["reasoning_content"] == message.get("reasoning_content", "")
    assert False in seen


def test_the_client_of_openai_calls_tools(server):
    openai = pytest.importorskip("openai", reason="OpenAI's package is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    asked = {"model": "any", "messages": [{"role": "user", "content": "When?"}], "tools": TOOLS, "seed": 3}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150}
    asked["model"] = client.models.list().data[0].id
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, event.arguments) for event in done] == [(call.function.name, call.function.arguments)]
    assert final.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "At 5."}
    told = [*asked["messages"], message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**(asked | {"messages": told, "tool_choice": "none", "max_tokens": 5}))
    assert answer.choices[0].message.tool_calls is None and answer.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.slow
def test_calls_of_random_schemas_are_of_them(family):
    server, chance, complete = family[2], random.Random(7), 0
    for seed in range(20):
        schema = random_schema(chance, depth=1)
        tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
        asked = {**ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        choice = choice_of(server.ask("POST", CHAT, {**asked, "max_tokens": 250}))
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            complete += 1
    assert complete > 5


@pytest.mark.slow
def test_tools_that_were_damaged_leave_the_server_whole(server):
    chance = random.Random(5)
    for _ in range(200):
        tool = {"type": "function", "function": {"name": "find", "parameters": random_schema(chance)}}
        tools = damaged([tool], chance)
        if tools is None:
            continue
        asked = {**ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 6}
        assert server.ask("POST", CHAT, asked).status in (200, 400)
    assert server.ask("POST", CHAT, {**ASKED, "max_tokens": 4}).status == 200
