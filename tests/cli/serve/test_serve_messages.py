"""Anthropic's form: `/v1/messages` and `/v1/messages/count_tokens`, asked by Anthropic's own client and by hand."""

import json
import signal

import pytest
from checkpoints import change_config
from command import TEXT, VOCABULARY, save_tokenizer, undocumented
from served import CHAT, Process
from templates import EOS
from tiny import save_llama
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

anthropic = pytest.importorskip("anthropic")

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Call one in <tool_call></tool_call>.\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "<assistant>{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
"""In the style of Qwen3's, whose answers begin with reasoning where they are to."""

WEATHER = {
    "name": "weather",
    "description": "How the weather will be.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
ASKED = [{"role": "user", "content": "How will the weather be?"}]
DRAWN = {"max_tokens": 60, "extra_body": {"temperature": 1, "seed": 3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that knows tools and reasoning, and whose answers may end."""
    directory = tmp_path_factory.mktemp("messages") / "target"
    save_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    save_llama(directory, vocab_size=VOCABULARY + 2, max_position_embeddings=2048)
    change_config(directory, eos_token_id=EOS)
    return directory


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    forks, folder = [], tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(folder))
        found = Process((model, model), folder / "log", forks)
    yield found
    for fork in forks:
        fork.kill()


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as found:
        yield found


def ask(server, path=MESSAGES, **fields):
    return server.ask("POST", path, {"messages": ASKED, "max_tokens": 10, "temperature": 0, **fields})


def text_block(text, **more):
    return {"type": "text", "text": text, **more}


def streamed(client, **fields):
    """The message that a stream brings, as the client puts it together."""
    with client.messages.stream(model="target", **fields) as stream:
        return stream.get_final_message()


def said(message):
    """What a message says, whole or streamed: ids of calls are drawn for each."""
    blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence


def events_of(reply):
    """The names and the data of a stream's events."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply
    found = [event.split("\n") for event in reply.body.decode().split("\n\n") if event]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def test_a_message_has_the_form_of_anthropic_and_what_it_cost(server):
    found = ask(server).json
    assert found["id"].startswith("msg_") and (found["type"], found["role"]) == ("message", "assistant")
    assert found["model"] == "target" and [block["type"] for block in found["content"]] == ["text"]
    assert found["stop_reason"] in ("end_turn", "max_tokens") and found["stop_sequence"] is None
    usage, timings = found["usage"], found["timings"]
    assert usage["output_tokens"] == timings["predicted_n"] == 10
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (timings["prompt_n"], timings["cache_n"])
    assert not undocumented(found, "serving.md", "batches.md")


def test_an_answer_is_that_of_a_chat_with_the_same_messages(server):
    call = {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Oslo", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": [text_block("No.")], "is_error": True}
    thinking = {"type": "thinking", "thinking": "Ask.", "signature": ""}
    theirs = {
        "system": [
            text_block("x-anthropic-billing-header: cc_version=2.1; cch=5f3a;"),
            text_block("Be", cache_control={"type": "ephemeral"}),
            text_block("brief."),
        ],
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": [thinking, text_block("So:")]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [text_block("And?"), result]},
        ],
        "tools": [WEATHER],
    }
    called = [{"id": "call-1", "function": {"name": "weather", "arguments": json.dumps(call["input"])}}]
    described = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    ours = {
        "messages": [
            {"role": "system", "content": "Be\n\nbrief."},
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": "So:", "reasoning_content": "Ask.", "tool_calls": called},
            {"role": "tool", "tool_call_id": "call-1", "content": "Error: No."},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": described}],
    }
    drawn = {"temperature": 1, "seed": 5, "max_tokens": 30}
    found, chat = ask(server, MESSAGES, **theirs, **drawn).json, server.ask("POST", CHAT, {**ours, **drawn}).json
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]


def test_the_client_reads_the_same_answer_whole_and_streamed(client):
    whole = client.messages.create(model="target", messages=ASKED, **DRAWN)
    stream = streamed(client, messages=ASKED, **DRAWN)
    assert whole.content and said(stream) == said(whole)
    assert stream.usage.output_tokens == whole.usage.output_tokens
    for usage in (whole.usage, stream.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == whole.usage.input_tokens + (
            whole.usage.cache_read_input_tokens
        )


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"weather", "time"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "time"}),
        ({"type": "tool", "name": "weather"}, {"weather"}),
    ],
    ids=["any", "one", "named"],
)
def test_the_client_gets_calls_of_its_tools(client, choice, names):
    asked = {"messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": choice, **DRAWN, "max_tokens": 300}
    whole, stream = client.messages.create(model="target", **asked), streamed(client, **asked)
    assert said(stream) == said(whole)
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert calls and {call.name for call in calls} <= names and whole.stop_reason in ("tool_use", "max_tokens")
    for call in calls if whole.stop_reason == "tool_use" else ():
        assert call.name == "time" or (call.input["city"] in ("Oslo", "Rome") and 1 <= call.input["days"] <= 9)
    if choice != {"type": "any"}:
        assert len(whole.content) == 1 and whole.stop_reason == "tool_use"


def test_what_a_call_gave_is_read_in_the_next_turn(client):
    tools = {"tools": [WEATHER], "model": "target"}
    drawn = {**DRAWN, "max_tokens": 300, "tool_choice": {"type": "tool", "name": "weather"}}
    first = client.messages.create(messages=ASKED, **tools, **drawn)
    (call,) = first.content
    sizes = {}
    for result in ("Rain.", "Rain and snow. " * 20):
        block = {"type": "tool_result", "tool_use_id": call.id, "content": result}
        messages = [*ASKED, first.to_param(), {"role": "user", "content": [block]}]
        second = client.messages.create(messages=messages, **tools, **DRAWN)
        usage = second.usage
        sizes[result] = usage.input_tokens + usage.cache_read_input_tokens
        assert sizes[result] == client.messages.count_tokens(messages=messages, **tools).input_tokens
        assert said(streamed(client, messages=messages, tools=[WEATHER], **DRAWN)) == said(second)
    assert len(set(sizes.values())) == 2


def test_arguments_that_were_cut_are_what_there_is_of_them(client):
    asked = {"messages": ASKED, "tools": [WEATHER], "tool_choice": {"type": "any"}, **DRAWN}
    cut = []
    for most in range(40, 76, 8):
        whole = client.messages.create(model="target", **{**asked, "max_tokens": most})
        assert said(streamed(client, **{**asked, "max_tokens": most})) == said(whole)
        if whole.stop_reason == "max_tokens" and whole.content[-1].type == "tool_use":
            cut.append(whole.content[-1].input)
    assert any(arguments.keys() < {"city", "days"} for arguments in cut), cut


def test_the_stop_text_that_an_answer_ends_before_is_named(client):
    whole = client.messages.create(model="target", messages=ASKED, **DRAWN).content[0].text
    stop = next(whole[at : at + 2] for at in range(6, 40) if not whole[at : at + 2].isspace())
    asked = {"messages": ASKED, "stop_sequences": ["never to be", stop], **DRAWN}
    for found in (client.messages.create(model="target", **asked), streamed(client, **asked)):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
        assert found.content[0].text == whole[: whole.index(stop)].strip()


def test_reasoning_is_a_block_where_the_template_is_told_to_begin_with_it(client, server):
    asked = {"messages": ASKED, "thinking": {"type": "enabled", "budget_tokens": 1024}, **DRAWN, "max_tokens": 1200}
    whole, stream = client.messages.create(model="target", **asked), streamed(client, **asked)
    assert whole.content[0].type == "thinking" and whole.content[0].signature == ""
    assert said(stream) == said(whole)
    counts = {kind: ask(server, COUNT, thinking={"type": kind}).json["input_tokens"]
              for kind in ("enabled", "adaptive", "disabled")}  # fmt: skip
    assert counts["enabled"] == counts["adaptive"] < counts["disabled"]


def test_a_count_is_that_of_the_answers_prompt(client, server):
    for fields in (
        {},
        {"system": "Be brief."},
        {"tools": [WEATHER]},
        {"messages": [{"role": "user", "content": TEXT}]},
    ):
        asked = {"messages": ASKED, **fields}
        usage = client.messages.create(model="target", max_tokens=1, **asked).usage
        counted = client.messages.count_tokens(model="target", **asked).input_tokens
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    running = server.metric("prompt_tokens_total")
    client.messages.count_tokens(model="target", messages=ASKED)
    assert server.metric("prompt_tokens_total") == running, "a count was answered"
    assert not undocumented(ask(server, COUNT).json, "serving.md")


def test_a_follow_up_reads_only_what_is_new(client):
    first = client.messages.create(model="target", messages=[{"role": "user", "content": TEXT}], max_tokens=4)
    messages = [{"role": "user", "content": TEXT}, first.to_param(), *ASKED]
    usage = client.messages.create(model="target", messages=messages, max_tokens=4).usage
    assert usage.cache_read_input_tokens > usage.input_tokens > 0


def test_an_answer_has_the_form_that_is_asked_for(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    found = client.messages.create(model="target", messages=ASKED, output_config=form, **DRAWN)
    assert json.loads(found.content[0].text)["ok"] in (True, False) and found.stop_reason == "end_turn"


def test_a_stream_has_each_event_with_its_name_and_each_block_in_its_bounds(server):
    events = events_of(ask(server, stream=True))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events if name != "ping"]
    deltas = ["content_block_delta"] * (len(names) - 5)
    block = ["content_block_start", *deltas, "content_block_stop"]
    assert names == ["message_start", *block, "message_delta", "message_stop"]
    assert deltas and {data["index"] for name, data in events if "block" in name} == {0}
    start, last = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 10 == last["timings"]["predicted_n"]
    assert not undocumented([data for _, data in events], "serving.md", "batches.md")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "It will"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": "x", "name": "A"}]}, "messages[0].name"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**TIME, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, fields, named):
    reply = ask(server, **fields)
    assert reply.status == 400, reply
    assert reply.json.keys() == {"type", "error"} and reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error" and named in reply.json["error"]["message"]


def test_what_changes_no_answer_is_accepted(server):
    plain = ask(server)
    keeping = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    more |= {"context_management": keeping, "mcp_servers": [], "tool_choice": {"type": "auto"}, "top_k": None}
    found = ask(server, f"{MESSAGES}?beta=true", **more, output_config={"effort": "high"})
    assert found.status == 200 and found.json["content"] == plain.json["content"]
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "interleaved-thinking-2025-05-14"}
    assert server.ask("POST", COUNT, {"messages": ASKED}, **headers).status == 200


def test_errors_are_those_that_the_client_knows(client, server):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", messages=ASKED, max_tokens=5)
    assert missing.value.type == "not_found_error"
    with pytest.raises(
        anthropic.BadRequestError, match="input length and `max_tokens` exceed context limit: messages has"
    ):
        client.messages.create(model="target", messages=ASKED, max_tokens=20_000)
    for path in ("create", "stream"):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: messages has"):
            asked = {"model": "target", "messages": [{"role": "user", "content": TEXT * 20}], "max_tokens": 5}
            if path == "create":
                client.messages.create(**asked)
            else:
                streamed(client, **{name: one for name, one in asked.items() if name != "model"})
    foreign = server.ask("POST", MESSAGES, {}, Host="evil.example")
    assert foreign.status == 403 and foreign.json["error"]["type"] == "permission_error"
    assert server.ask("GET", MESSAGES).json["error"]["type"] == "invalid_request_error"
    assert server.ask("POST", COUNT, b"{").json["error"]["type"] == "invalid_request_error"
    assert server.ask("POST", "/v1/message", {}).json["error"]["param"] is None, "other paths have OpenAI's form"


def test_a_key_comes_in_either_header_on_every_path(serving, model):
    with serving((model, model), api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **given) as client:
                assert client.messages.count_tokens(model="target", messages=ASKED).input_tokens
        wrong = anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong")
        with wrong as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model="target", messages=ASKED, max_tokens=5)
        assert refused.value.type == "authentication_error"
        assert server.ask("GET", "/v1/models", x_api_key="secret").status == 200
        assert server.ask("GET", "/v1/models", x_api_key="wrong").status == 401
        assert server.ask("GET", "/v1/models", x_api_key="wrong", Authorization="Bearer secret").status == 200


def test_a_stream_that_is_cut_ends_with_an_error_event(process, lasting):
    server = process("--grace", 0.2, models=lasting)
    response = server.connect("POST", MESSAGES, {"messages": ASKED, "max_tokens": 60_000, "stream": True}).getresponse()
    assert response.readline() == b"event: message_start\n"
    server.signal(signal.SIGINT)
    name, data, _, _ = response.read().decode().split("\n")[-4:]
    assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "overloaded_error")
    server.fork.wait(30)
