"""Answers in a form: the options of `generate`, and the fields of requests to `serve` and `batch`."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from checkpoints import change_config
from command import TEXT, run_here
from random_schemas import damaged, random_schema
from served import CHAT, COMPLETION, Process
from templates import with_template

END = 1
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
ASKED = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 80, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def model(pair, tmp_path_factory):
    """The tiny target with a chat template, whose answers may end."""
    found = with_template(pair[0], tmp_path_factory.mktemp("forms"))
    change_config(found, eos_token_id=END)
    return found


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    forks = []
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(folder))
        found = Process((model, model), folder / "log", forks, "--draft", "lookup")
    yield found
    for fork in forks:
        fork.kill()


@pytest.fixture
def generated(model, capfd, tmp_path, monkeypatch):
    """Runs `generate`; its outcome and its JSON, if it writes any."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    path = tmp_path / "answer.json"
    fixed = ("--model", model, "--draft", "lookup", "--device", "cpu", "--dtype", "float32", "--json", path)

    def run(*options):
        outcome = run_here(capfd, "generate", "--prompt", TEXT, *options, *fixed)
        return outcome, json.loads(path.read_text()) if outcome.code == 0 else None

    return run


@pytest.fixture
def file(tmp_path):
    def write(text, name="form"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def of_form(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("option", "form", "fits"),
    [
        ("--json-schema", json.dumps(SCHEMA), of_form),
        ("--regex", "(yes|no), [0-9]{2}", re.compile("(yes|no), [0-9]{2}").fullmatch),
        ("--grammar", 'start: "yes" | "no" " " start', re.compile("(no )*yes").fullmatch),
        ("--grammar", 'root ::= "yes" | "no " root', re.compile("(no )*yes").fullmatch),
    ],
    ids=["schema", "regex", "lark", "gbnf"],
)
def test_answers_of_generate_are_in_the_form(generated, file, option, form, fits):
    given = form if option == "--regex" else file(form)
    for more in ((), ("--ask", "Why?"), ("--ask", "Why?", "-n", 2)):
        outcome, document = generated(option, given, "--seed", 4, "--temperature", 1, "--max-new-tokens", 200, *more)
        assert document, outcome.err
        for answer in document.get("sequences", [document]):
            assert answer["finish_reason"] in ("eos", "length")
            if answer["finish_reason"] == "eos":
                assert fits(answer["text"]), answer["text"]


def test_an_answer_that_is_cut_says_so(generated):
    _, document = generated("--regex", "a{300}", "--max-new-tokens", 5)
    assert document["finish_reason"] == "length" and set(document["text"]) == {"a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "a", "--grammar", "FILE"), "error: --regex and --grammar are both given"),
        (
            ("--regex", "a", "--ignore-eos"),
            "error: --ignore-eos is given, but an answer with --json-schema, --regex or --grammar ends",
        ),
        (("--regex", "(a"), "error: the regular expression cannot be followed: "),
        (("--json-schema", "FILE"), "error: the JSON schema cannot be read: "),
        (("--json-schema", "MISSING"), "error: --json-schema MISSING does not exist"),
        (("--json-schema", "-", "--asks", "-"), "error: --asks and --json-schema are both -"),
        (("--grammar", "FILE"), "error: the grammar cannot be followed: "),
    ],
    ids=["two", "ignore-eos", "regex", "schema", "missing", "stdin", "grammar"],
)
def test_what_cannot_be_followed_is_refused_in_a_line(generated, file, options, message):
    path = file("start: { no")
    outcome, _ = generated(*(path if one == "FILE" else one for one in options))
    assert outcome.code in (1, 2) and outcome.out == ""
    assert outcome.err.startswith(message) and outcome.err.count("\n") == 1, outcome.err


def test_the_server_answers_in_the_form(server):
    reply = server.ask("POST", CHAT, {**ASKED, "response_format": FORMAT})
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop" and of_form(choice["message"]["content"])
    streamed = server.ask("POST", CHAT, {**ASKED, "response_format": FORMAT, "stream": True}).events
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed[:-1] if event["choices"])
    assert text == choice["message"]["content"]
    whole = {"prompt": TEXT, "max_tokens": 60, "seed": 1, "n": 2}
    for one in server.ask("POST", COMPLETION, {**whole, "regex": "[a-c]{4}"}).json["choices"]:
        assert re.fullmatch("[a-c]{4}", one["text"])
    for one in server.ask("POST", COMPLETION, {**whole, "grammar": 'start: "x" | "y"'}).json["choices"]:
        assert one["text"] in "xy"
    anything = server.ask("POST", CHAT, {**ASKED, "response_format": {"type": "json_object"}, "max_tokens": 300}).json
    content = anything["choices"][0]["message"]["content"]
    assert content.startswith("{") and (
        anything["choices"][0]["finish_reason"] == "length" or json.loads(content) is not None
    )
    assert server.ask("POST", CHAT, {**ASKED, "response_format": {"type": "text"}}).status == 200


def test_batch_answers_as_the_server(server, model, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    body = {**ASKED, "response_format": FORMAT}
    requests.write_text(json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body}))
    given = ("--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32")
    assert run_here(capfd, "batch", requests, "-o", answers, *given).code == 0
    found = json.loads(answers.read_text())["response"]["body"]["choices"][0]["message"]["content"]
    assert found == server.ask("POST", CHAT, body).json["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema",
            "has 3 as schema",
        ),
        ({"response_format": FORMAT, "regex": "a"}, "regex", "are both given"),
        ({"regex": "("}, "regex", "cannot be followed"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x.y/z"}}}},
            "response_format",
            "cannot be followed",
        ),
    ],
    ids=["type", "no schema", "schema", "two", "regex", "grammar", "elsewhere"],
)
def test_what_is_wrong_is_named(server, fields, param, message):
    reply = server.ask("POST", CHAT, ASKED | fields)
    assert reply.status == 400 and reply.json["error"]["param"] == param and message in reply.json["error"]["message"]


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "recursion": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(10_000)}},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 4},
    "nothing": {"enum": []},
    "deep": nested(60),
    "deeper": nested(400),
    "pattern": {"type": "string", "pattern": "^(a|aa|aaa){1,400}(b{1,400}c{1,400}){1,400}$"},
    "long": {"type": "string", "minLength": 10**9},
    "many": {"type": "array", "items": {"type": "integer"}, "minItems": 10**7},
    "chain": {
        "$defs": {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1200)} | {"a1200": {}},
        "$ref": "#/$defs/a0",
    },
    "union": {"anyOf": [{"const": "x" * i} for i in range(400)]},
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_cost_bounded_time(server, name):
    """They are answered, or refused by name; the server answers others meanwhile, and afterwards."""
    form = {"type": "json_schema", "json_schema": {"schema": HOSTILE[name]}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "POST", CHAT, ASKED | {"response_format": form, "max_tokens": 8})
        assert server.ask("POST", CHAT, ASKED | {"max_tokens": 4}).status == 200
        reply = asked.result(timeout=60)
    assert reply.status in (200, 400), reply.body
    if reply.status == 400:
        assert reply.json["error"]["code"] in ("grammar_not_usable", None)
    assert server.ask("GET", "/health").status == 200


def test_a_grammar_of_many_rules_leaves_the_server_whole(server):
    """However deep they go, and however often one has another."""
    for of, count in ((lambda i: f"a{i}: a{i + 1}", 900), (lambda i: f"A{i}: A{i + 1} A{i + 1}", 200)):
        rules = [of(i) for i in range(count)]
        first, last = rules[0].split(":")[0], rules[-1].split(" ")[-1]
        source = "\n".join([f"start: {first}", *rules, f'{last}: "x"'])
        assert server.ask("POST", CHAT, ASKED | {"grammar": source, "max_tokens": 3}).status in (200, 400)
    assert server.ask("POST", CHAT, ASKED | {"max_tokens": 4}).status == 200


@pytest.mark.slow
def test_schemas_that_were_damaged_leave_the_server_whole(server):
    chance = random.Random(5)
    for _ in range(200):
        schema = damaged(random_schema(chance), chance)
        if schema is None:
            continue
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert server.ask("POST", CHAT, ASKED | {"response_format": form, "max_tokens": 6}).status in (200, 400)
    assert server.ask("POST", CHAT, ASKED | {"max_tokens": 4}).status == 200
