"""Answers over HTTP: whole and streamed, alone and beside others, and what is said where there is none."""

import json
import shutil
import time

import pytest
from command import TEXT, run_here, undocumented
from served import embedding_calls
from templates import TEMPLATE, with_template

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def text_of(reply):
    assert reply.status == 200, reply
    (choice,) = reply.json["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def pieces_of(reply, number=0):
    """The text of a stream's answer, put together."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply
    assert reply.events[-1] == "[DONE]"
    choices = [one for event in reply.events[:-1] for one in event["choices"] if one["index"] == number]
    return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)


def test_an_answer_has_the_form_of_openai_and_what_it_cost(server):
    found = server.chat().json
    (choice,) = found["choices"]
    assert (found["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    usage, timings = found["usage"], found["timings"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert server.complete().json["object"] == "text_completion"
    assert not undocumented(found, "serving.md", "batches.md")


@pytest.mark.slow
def test_an_answer_is_the_one_that_generate_writes(server, pair, capfd):
    for fields, more in (
        ({}, ("--temperature", 0)),
        ({"temperature": 1, "seed": 5}, ("--temperature", 1, "--seed", 5)),
    ):
        fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32")
        alone = run_here(capfd, "generate", *fixed, "--prompt", TEXT, "--max-new-tokens", 12, *more, "--json", "-")
        assert text_of(server.complete(TEXT, max_tokens=12, **fields)) == json.loads(alone.out)["text"]


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_a_stream_brings_the_same_text_in_pieces(server, kind):
    ask = getattr(server, kind)
    fields = {"temperature": 1, "seed": 3, "max_tokens": 20}
    stream = ask(stream=True, stream_options={"include_usage": True}, **fields)
    whole = ask(**fields)
    assert pieces_of(stream) == text_of(whole)
    *_, last, usage, _ = stream.events
    assert last["choices"][0]["finish_reason"] == whole.json["choices"][0]["finish_reason"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole.json["usage"]["completion_tokens"]
    assert usage["timings"] == last["timings"]
    assert len({event["id"] for event in stream.events[:-1]}) == 1
    assert "usage" not in ask(stream=True, **fields).events[0]


def test_several_answers_are_drawn_with_one_seed_each_its_own(server):
    fields = {"temperature": 1, "seed": 7, "max_tokens": 12}
    choices = server.complete(n=3, **fields).json["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2] and len({one["text"] for one in choices}) == 3
    assert choices[0]["text"] == text_of(server.complete(**fields))
    stream = server.complete(n=3, stream=True, **fields)
    assert [pieces_of(stream, number) for number in range(3)] == [one["text"] for one in choices]


def test_an_answer_ends_before_a_stop_and_shows_nothing_of_it(server):
    whole = text_of(server.complete(max_tokens=40))
    stop = whole[8:11]
    for stream in (False, True):
        reply = server.complete(max_tokens=40, stop=["never to be", stop], stream=stream)
        text = pieces_of(reply) if stream else text_of(reply)
        assert text == whole[: whole.index(stop)]
        last = reply.events[-2] if stream else reply.json
        assert last["choices"][0]["finish_reason"] == "stop"


def test_reading_is_told_where_that_is_asked_for(server):
    reply = server.complete(TEXT, stream=True, return_progress=True)
    progress = [event["prompt_progress"] for event in reply.events[:-1] if "prompt_progress" in event]
    assert progress and progress[-1]["processed"] == progress[-1]["total"] >= progress[-1]["cache"]
    assert not undocumented(progress, "serving.md")
    assert not any("prompt_progress" in event for event in server.complete(TEXT, stream=True).events[:-1])


def test_timings_come_with_every_piece_where_that_is_asked_for(server):
    plain = server.complete(stream=True).events[:-1]
    timed = server.complete(stream=True, timings_per_token=True).events[:-1]
    assert ["timings" in event for event in plain] == [False] * (len(plain) - 1) + [True]
    counts = [event["timings"]["predicted_n"] for event in timed]
    assert counts == sorted(counts) and counts[-1] == timed[-1]["timings"]["predicted_n"]


def test_a_follow_up_reads_only_what_is_new(server):
    first = server.complete(TEXT).json
    again = server.complete(TEXT + " And then").json
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - 16 <= cached < again["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"logprobs": 1}, 400, "logprobs"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"response_format": 3}, 400, "response_format"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
        ({"model": "gpt-5"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, 400, "stream_options.other"),
        ({"max_tokens": 10**6}, 400, "messages"),
        ({"context": "nothing"}, 400, "context"),
        ({"context": "../../etc"}, 400, "context"),
        ({"messages": []}, 400, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, fields, status, param):
    reply = server.chat(**fields)
    assert reply.status == status, reply
    error = reply.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param and param.partition(".")[0] in error["message"]


def test_the_chat_template_is_given_the_variables_of_the_option_and_the_body(serving, pair, tmp_path):
    template = TEMPLATE.replace("<assistant>{%", "<assistant>{% if think is false %}(no thought){% endif %}{%")
    model = with_template(pair[0], tmp_path, template)
    with serving((model, model), template_arg="think=false") as server:
        asked = {given: server.chat(max_tokens=1, chat_template_kwargs=given and {"think": given == "yes"})
                 for given in (None, "yes", "no")}  # fmt: skip
        counts = {given: reply.json["usage"]["prompt_tokens"] for given, reply in asked.items()}
        assert counts[None] == counts["no"] > counts["yes"]
        refused = server.chat(chat_template_kwargs={"chat_template": "{{ 7 * 7 }}"})
        assert refused.status == 400 and refused.json["error"]["param"] == "chat_template_kwargs"


def test_logprobs_of_a_chat_are_one_entry_a_token(server):
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "temperature": 1, "seed": 4}
    found = server.chat(**fields).json
    (choice,) = found["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"] == 12
    for entry in entries:
        assert entry["token"].strip() in choice["message"]["content"] or entry["bytes"] is None
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][2]["logprob"]
        assert entry["bytes"] in (list(entry["token"].encode()), None)
    assert not undocumented(found, "serving.md", "batches.md")
    stream = server.chat(stream=True, **fields).events[:-1]
    pieces = [one["logprobs"]["content"] for event in stream for one in event["choices"] if one["logprobs"]]
    assert [entry for piece in pieces for entry in piece] == entries
    assert server.chat(temperature=1, seed=4, max_tokens=12).json["choices"][0]["message"] == choice["message"]


def test_logprobs_of_a_completion_are_lists(server):
    (choice,) = server.complete(logprobs=2).json["choices"]
    found = choice["logprobs"]
    assert found["tokens"] and all(token in choice["text"] or "\ufffd" in token for token in found["tokens"])
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"])
    # At temperature 0 each token is the likeliest.
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values())
    offsets = found["text_offset"]
    assert offsets == [sum(map(len, found["tokens"][:count])) for count in range(len(offsets))]
    stream = server.complete(logprobs=2, stream=True).events[:-1]
    sent = [one["logprobs"] for event in stream for one in event["choices"] if one["logprobs"]]
    assert [offset for one in sent for offset in one["text_offset"]] == offsets


def test_a_model_is_found_by_its_name(server, serving, pair, monkeypatch):
    (listed,) = server.ask("GET", "/v1/models").json["data"]
    assert server.ask("GET", "/v1/models/target").json == listed
    for name in ("gpt-4o", "meta-llama/Llama-3.1-8B", "meta-llama%2FLlama", "target/", "targe", "%00", ""):
        reply = server.ask("GET", f"/v1/models/{name}")
        assert reply.status == 404 and reply.json["error"]["type"] == "invalid_request_error", name
        assert reply.json["error"]["code"] == "model_not_found" and reply.json["error"]["param"] == "model"
    lines = [json.loads(line) for line in server.log.splitlines() if "/v1/models/" in line]
    assert {line["route"] for line in lines} == {"/v1/models/{name}"}


def check_alike(choice, alone):
    assert choice["text"] == alone["text"] and choice["finish_reason"] == alone["finish_reason"]
    for name in ("tokens", "text_offset"):
        assert choice["logprobs"][name] == alone["logprobs"][name]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    "prompts", [["It was", "Was it?", "It was"], [[5, 6, 7], [8], [9, 5]]], ids=["texts", "tokens"]
)
def test_several_prompts_are_answered_as_each_alone(server, prompts):
    fields = {"temperature": 1, "seed": -5, "max_tokens": 9, "logprobs": 2, "n": 2}
    found = server.complete(prompts, **fields).json
    alone = [server.complete(prompt, **fields).json for prompt in prompts]
    assert [one["index"] for one in found["choices"]] == list(range(6))
    for choice, other in zip(found["choices"], [one for each in alone for one in each["choices"]], strict=True):
        check_alike(choice, other)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(each["usage"][name] for each in alone), name
    assert found["timings"]["cache_n"] + found["timings"]["prompt_n"] == found["usage"]["prompt_tokens"]
    stream = server.complete(prompts, stream=True, stream_options={"include_usage": True}, **fields)
    assert [pieces_of(stream, number) for number in range(6)] == [one["text"] for one in found["choices"]]
    told = stream.events[-2]["usage"]
    assert {name: told[name] for name in told if "details" not in name} == {
        name: found["usage"][name] for name in told if "details" not in name
    }


def test_several_prompts_are_bounded_and_named_where_one_cannot_be_answered(server):
    for prompts, n in ((["a"] * 129, 1), (["a"] * 65, 2)):
        refused = server.complete(prompts, n=n)
        assert refused.status == 400 and refused.json["error"]["param"] == "prompt"
        assert "can have 128" in refused.json["error"]["message"]
    for prompts in (["a", [5]], [["a"]], ["a", None], [[5], []], [], [[5], 5]):
        assert server.complete(prompts).json["error"]["param"] == "prompt", prompts
    refused = server.complete([[5], [320]])
    assert refused.status == 400 and "prompt[1] has the token 320" in refused.json["error"]["message"]
    refused = server.complete(["a", "b " * 2000], stream=True)
    assert refused.json["error"]["code"] == "context_length_exceeded" and refused.json["error"]["param"] == "prompt[1]"


@pytest.mark.slow
def test_as_many_answers_as_may_be_are_written(server):
    found = server.complete(["a"] * 64, n=2, max_tokens=1).json
    assert [one["index"] for one in found["choices"]] == list(range(128))
    assert found["usage"]["completion_tokens"] == 128


def test_reading_is_told_of_each_of_several_prompts(server):
    prompts = [TEXT + " one", "Not " + TEXT]
    events = server.complete(prompts, stream=True, return_progress=True, n=2).events[:-1]
    told = [(one["choices"][0]["index"], one["prompt_progress"]) for one in events if "prompt_progress" in one]
    assert {index for index, _ in told} == {0, 2}
    assert all(last["processed"] == last["total"] for last in dict(told).values())


def test_seeds_below_0_are_seeds(server):
    fields = {"temperature": 1, "max_tokens": 12}
    texts = {seed: text_of(server.complete(seed=seed, **fields)) for seed in (-1, -5, 1, 5, 0, -(2**63), 2**63 - 1)}
    assert len(set(texts.values())) == len(texts)
    assert all(text_of(server.complete(seed=seed, **fields)) == texts[seed] for seed in (-1, -5))
    assert [text_of(server.complete(seed=-1, **fields)) for _ in range(2)] == [texts[-1]] * 2, "-1 is like others"
    for seed in (-(2**63) - 1, 2**63, -0.5):
        refused = server.complete(seed=seed)
        assert refused.status == 400 and refused.json["error"]["param"] == "seed"


def test_an_answer_whose_length_is_not_said_has_that_of_the_option(serving, long_pair):
    with serving(long_pair, max_new_tokens=7) as server:
        for reply in (server.chat(max_tokens=None), server.complete(max_tokens=None)):
            assert reply.json["usage"]["completion_tokens"] == 7
            assert reply.json["choices"][0]["finish_reason"] == "length"


def test_models_and_health(server, pair):
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert model["id"] == "target" and server.chat(model="target").status == 200
    assert server.ask("GET", "/health").json == {"status": "ready"}


@pytest.mark.parametrize("temperature", [10**30, 1e308, 1e-300])
def test_numbers_that_tensors_do_not_hold_are_answered(server, temperature):
    assert server.chat(temperature=temperature).status == 200


def test_metrics_count_what_was_answered(serving):
    with serving() as server:
        server.complete(max_tokens=6)
        text = server.ask("GET", "/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['triforce_requests_total{endpoint="/v1/completions",status="200"}']) == 1
    assert 0 < float(values["triforce_generated_tokens_total"]) <= 6
    assert float(values["triforce_time_to_first_token_seconds_count"]) == 1
    tokens = float(values["triforce_generated_tokens_total"])
    assert float(values["triforce_time_between_tokens_seconds_count"]) == tokens - 1
    assert float(values["triforce_queue_length"]) == float(values["triforce_running_answers"]) == 0
    assert "process_resident_memory_bytes" in values and float(values["triforce_kv_cache_bytes"]) > 0


def test_a_server_takes_memory_at_its_start(server, serving):
    """That of later caches; `test_serve_memory.py` is about the rest."""
    body = {"prompt": "It was", "max_tokens": 6, "temperature": 0}
    wanted, least = server.complete(**body).json["choices"], 2**26

    def free(one):
        return one.metric("free_memory_bytes")

    with serving(host_memory=0.5) as other:
        assert other.complete(**body).json["choices"] == wanted
        server.wait_for(lambda: free(other) > free(server) + least)
        assert other.complete(prompt=TEXT * 4, max_tokens=6).status == 200
        assert other.complete(**body).json["choices"] == wanted and free(other) > free(server) + least


def test_metrics_count_what_is_uploaded_and_what_streams(serving, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(resident=0.0) as server:
        tokens = server.upload("book", TEXT * 3).json["tokens"]
        server.wait_for(lambda: server.metric("link_stored_bytes_total"))  # counted after the upload's end is sent
        read = server.metrics()
        assert read["prompt_tokens_total"] == read["uploaded_tokens_total"] == tokens
        assert read["link_stored_bytes_total"] > 0 and read["generated_tokens_total"] == 0
        held = read["kv_cache_bytes"]
        server.chat("Who?", context="book", max_tokens=6)
        server.wait_for(lambda: server.metric("link_bytes_total") > read["link_bytes_total"])  # likewise
        asked = server.metrics()
        assert asked["uploaded_tokens_total"] == tokens < asked["prompt_tokens_total"]
        assert asked["cached_tokens_total"] > 0
        assert asked["kv_cache_bytes"] >= held


@pytest.mark.slow
def test_answers_do_not_depend_on_what_others_ask(server):
    asked = [{"prompt": TEXT[: 40 + 20 * i], "temperature": 1, "seed": i, "max_tokens": 6 + i} for i in range(12)]
    alone = [text_of(server.complete(**fields)) for fields in asked]
    together = server.at_once(*(lambda fields=fields: text_of(server.complete(**fields)) for fields in asked))
    assert together == alone


@pytest.mark.slow
def test_prompts_whose_length_decides_how_they_are_rotated_are_answered_one_after_another(serving, pair, tmp_path):
    scaled = tmp_path / "scaled"
    shutil.copytree(pair[0], scaled)
    config = json.loads((scaled / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (scaled / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "rope_parameters": rope}))
    with serving((scaled, scaled)) as server:
        asked = [{"prompt": TEXT[: 40 * (1 + i)], "max_tokens": 9} for i in range(6)]
        alone = [text_of(server.complete(**fields)) for fields in asked]
        long = server.complete(**asked[-1]).json["usage"]["prompt_tokens"]
        assert long > 64, "it is rotated otherwise than the short ones"
        replies = server.at_once(*(lambda fields=fields: server.complete(**fields) for fields in asked))
        assert [text_of(reply) for reply in replies] == alone


def test_who_goes_away_frees_the_place(serving, lasting):
    with serving(lasting, max_sequences=1) as server:
        body = {"prompt": "It was", "max_tokens": 60_000, "stream": True}
        connection = server.connect("POST", COMPLETION, body)
        connection.getresponse().read(10)
        waiting = server.connect("POST", COMPLETION, {"prompt": "It", "max_tokens": 900})
        server.wait_for(lambda: server.metric("queue_length") == 1)
        waiting.close()
        server.wait_for(lambda: server.metric("queue_length") == 0)
        connection.close()
        server.wait_for(lambda: server.metric("running_answers") == 0)
        assert server.metric("generated_tokens_total") < 60_000, "it was not written to its end"
        assert server.complete().status == 200
        server.wait_for(lambda: server.log.count('"status": 499') == 1)


def test_a_full_queue_refuses_and_says_when_to_ask_again(serving, lasting):
    with serving(lasting, max_sequences=1, max_queue=1) as server:
        body = {"prompt": "It was", "max_tokens": 60_000}
        first = server.connect("POST", COMPLETION, body)
        server.wait_for(lambda: server.metric("running_answers") == 1)
        second = server.connect("POST", COMPLETION, body)
        server.wait_for(lambda: server.metric("queue_length") == 1)
        refused = server.complete()
        assert refused.status == 429 and refused.json["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        first.close()
        second.close()
        server.wait_for(lambda: server.metric("running_answers") == 0)


def test_too_little_memory_is_said_with_its_reason(serving, pair, tmp_path):
    model = tmp_path / "endless"
    shutil.copytree(pair[0], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    with serving((model, model)) as server:
        for stream in (False, True):
            reply = server.complete(stream=stream, max_tokens=9 * 10**8)
            assert reply.status == 503 and "of memory" in reply.json["error"]["message"], reply
        assert server.complete().status == 200


@pytest.mark.slow
def test_a_comment_keeps_a_silent_stream_alive(process, lasting):
    slow = embedding_calls(lambda _: time.sleep(0.05))  # an answer that lasts, and takes no processor time for that
    server = process("--max-sequences", 1, models=lasting, before=slow)
    first = server.connect("POST", COMPLETION, {"prompt": "It was", "max_tokens": 60_000})
    server.wait_for(lambda: server.metric("running_answers") == 1)
    waiting = server.connect("POST", COMPLETION, {"prompt": "It", "max_tokens": 3, "stream": True})
    response = waiting.getresponse()
    assert response.readline() == b": keep-alive\n"
    first.close()
    assert response.read().endswith(b"data: [DONE]\n\n")
    waiting.close()


@pytest.mark.slow
def test_the_client_of_openai_is_served(server):
    openai = pytest.importorskip("openai", reason="OpenAI's package is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    asked = {"model": "target", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    plain = client.completions.create(model="target", prompt="It was", max_tokens=6)
    assert plain.choices[0].finish_reason in ("length", "stop")
    assert [model.id for model in client.models.list()] == ["target"]
    assert client.models.retrieve("target").id == "target"
    several = client.completions.create(model="target", prompt=["It was", "Was it?"], max_tokens=6, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, presence_penalty=1)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(asked | {"model": "gpt-5"}))
