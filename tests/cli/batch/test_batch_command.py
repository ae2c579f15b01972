"""`triforce batch`: a line a request, a line an answer, and a run that goes on where it was stopped."""

import json
import shutil
import signal

import pytest
from command import TEXT, Running, check_refusal, run_command, run_here, undocumented, without_weights

GREEDY = {"temperature": 0, "max_tokens": 10}


def chat(custom_id, question="Why?", **fields):
    body = {"messages": [{"role": "user", "content": question}], **GREEDY, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id, prompt: object = "It was", **fields):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, **GREEDY, **fields},
    }


def write(path, lines):
    """Objects, or bytes as they are; `None` leaves what is there."""
    if lines is not None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + b"\n")


@pytest.fixture
def files(tmp_path):
    return tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"


@pytest.fixture
def batch(pair, capfd, files):
    """Runs the command over lines: objects, or bytes as they are."""

    def run(lines, *arguments, model=pair[0], expect=0):
        write(files[0], lines)
        fixed = ("--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32")
        outcome = run_here(capfd, "batch", files[0], "-o", files[1], *fixed, *arguments)
        assert outcome.code == expect, outcome
        return outcome

    return run


@pytest.fixture
def answers(files):
    """The answers that there are, by `custom_id`."""

    def read():
        found = [json.loads(line) for line in files[1].read_text().splitlines()]
        assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in found)
        assert len({line["id"] for line in found}) == len(found)
        return {line["custom_id"]: line for line in found}

    return read


def body_of(line):
    assert line["error"] is None and line["response"]["status_code"] == 200, line
    return line["response"]["body"]


def test_each_request_has_an_answer_in_its_form(batch, answers, pair):
    outcome = batch([chat("a"), completion("b"), chat("c", n=2, temperature=1, seed=3)], "--json", "-")
    found = {name: body_of(line) for name, line in answers().items()}
    assert sorted(found) == ["a", "b", "c"]
    assert found["a"]["object"] == "chat.completion" and found["b"]["object"] == "text_completion"
    (choice,) = found["a"]["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length")
    assert len(found["c"]["choices"]) == 2 and [one["index"] for one in found["c"]["choices"]] == [0, 1]
    for body in found.values():
        usage, timings = body["usage"], body["timings"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["predicted_ms"] > 0 and timings["draft_n"] >= timings["draft_n_accepted"]
        assert body["model"] == str(pair[0])
    document = json.loads(outcome.out)
    assert document["requests"] == {"total": 3, "skipped": 0, "answered": 3, "failed": 0, "interrupted": 0}
    assert document["new_tokens"] == sum(body["timings"]["predicted_n"] for body in found.values())
    assert not undocumented(document, "json.md", "batches.md")
    assert not undocumented(list(answers().values()), "batches.md")
    assert "3 of 3 requests" in outcome.err


def test_an_answer_is_the_one_that_generate_writes(batch, answers, pair, capfd):
    batch([completion("a", TEXT, max_tokens=12), completion("b", TEXT, max_tokens=12, temperature=1, seed=5)])
    for name, more in (("a", ("--temperature", 0)), ("b", ("--temperature", 1, "--seed", 5))):
        fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32")
        alone = run_here(capfd, "generate", *fixed, "--prompt", TEXT, "--max-new-tokens", 12, *more, "--json", "-")
        assert body_of(answers()[name])["choices"][0]["text"] == json.loads(alone.out)["text"]


def test_a_request_may_have_several_prompts(batch, answers):
    fields = {"temperature": 1, "seed": -5, "n": 2}
    batch(
        [
            completion("both", ["It was", "Was it?"], **fields),
            completion("a", **fields),
            completion("b", "Was it?", **fields),
        ]
    )
    both, a, b = (body_of(answers()[name]) for name in ("both", "a", "b"))
    assert [one["index"] for one in both["choices"]] == [0, 1, 2, 3]
    assert [one["text"] for one in both["choices"]] == [one["text"] for found in (a, b) for one in found["choices"]]
    assert both["usage"]["prompt_tokens"] == a["usage"]["prompt_tokens"] + b["usage"]["prompt_tokens"]
    outcome = batch([completion("many", ["It was"] * 65, n=2)], expect=1)
    assert "130 answers" in outcome.err and "can have 128" in outcome.err


def test_answers_do_not_depend_on_how_many_are_written_at_a_time(batch, answers, files):
    lines = [chat(str(n), f"Why {n}?", max_tokens=4 + n, temperature=1, seed=n) for n in range(7)]
    batch(lines, "--max-sequences", 1)
    one = {name: body_of(line)["choices"] for name, line in answers().items()}
    assert len(one) == 7
    for most in (2, 7):
        files[1].unlink()
        batch(lines, "--max-sequences", most)
        assert {name: body_of(line)["choices"] for name, line in answers().items()} == one


@pytest.mark.slow
def test_hundreds_of_answers_are_those_of_each_alone(batch, answers):
    lines = [completion(str(n), max_tokens=2, n=100, temperature=1, seed=n) for n in range(3)]
    batch([*lines, completion("last", max_tokens=3)], "--max-sequences", 32)
    found = {name: body_of(line)["choices"] for name, line in answers().items()}
    assert [len(found[str(n)]) for n in range(3)] == [100] * 3 and len(found["last"]) == 1
    again = completion("again", max_tokens=2, n=3, temperature=1, seed=2)
    batch([again], "--max-sequences", 1)
    assert body_of(answers()["again"])["choices"] == found["2"][:3]


def test_an_answer_ends_before_a_stop(batch, answers, files):
    batch([completion("a", max_tokens=40)])
    whole = body_of(answers()["a"])["choices"][0]["text"]
    stop = whole[8:11]
    batch([completion("b", max_tokens=40, stop=["never to be", stop])])
    body = body_of(answers()["b"])
    assert body["choices"][0]["text"] == whole[: whole.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] < 40


def test_absent_fields_are_those_of_the_options(batch, answers):
    bare = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "It was"}}
    batch([bare], "--max-new-tokens", 7, "--temperature", 0)
    assert body_of(answers()["a"])["usage"]["completion_tokens"] <= 7
    text = body_of(answers()["a"])["choices"][0]["text"]
    batch([completion("b", max_tokens=7)])
    assert body_of(answers()["b"])["choices"][0]["text"] == text


def test_what_is_answered_is_skipped_and_what_failed_is_tried_again(batch, answers, files):
    refused = batch([chat("a"), chat("b", stream=True)], expect=1)
    assert "requests.jsonl, line 2: stream would change the answer" in refused.err
    before = answers()
    error = before["b"]["response"]["body"]["error"]
    assert before["b"]["response"]["status_code"] == 400 and error["param"] == "stream"
    outcome = batch([chat("a", "Another?"), chat("b"), chat("c")], "--json", "-")
    after = answers()
    assert after["a"] == before["a"] and body_of(after["b"]) and body_of(after["c"])
    assert len(files[1].read_text().splitlines()) == 3, "the line of the failure is gone"
    assert json.loads(outcome.out)["requests"]["skipped"] == 1 and "1 skipped" in outcome.err


def test_nothing_is_loaded_where_all_is_answered(batch, pair, files, tmp_path):
    batch([chat("a")])
    content, hollow = files[1].read_bytes(), without_weights(pair[0], tmp_path)
    outcome = batch(None, "--json", "-", model=hollow)
    assert json.loads(outcome.out)["requests"] == {
        "total": 1, "skipped": 1, "answered": 0, "failed": 0, "interrupted": 0,
    }  # fmt: skip
    batch(None, "--gpus", 2, model=hollow)
    assert files[1].read_bytes() == content


def test_a_torn_last_line_is_dropped(batch, answers, files):
    batch([chat("a"), chat("b")])
    content = files[1].read_bytes()
    first = content.index(b"\n") + 1
    kept = json.loads(content[:first])["custom_id"]
    for torn in (content[:-20], content[: first + 1], content[:first] + b"\0\0\0", content[:-1]):
        files[1].write_bytes(torn)
        batch(None)
        assert answers().keys() == {"a", "b"} and answers()[kept] == json.loads(content[:first])
        assert files[1].read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"custom_id": "x", "body": {', ("line 2: it is not JSON", "at column")),
        (b"[1]", ("line 2: it is not a JSON object",)),
        (b"\xff{}", ("line 2: it is not UTF-8: byte 0xff at offset 0",)),
        (b'{"body": {"prompt": "x"}}', ("line 2: custom_id is missing",)),
        (b'{"custom_id": 5, "body": {"prompt": "x"}}', ("line 2: custom_id is 5; it must be a text",)),
        (b'{"custom_id": "x"}', ("line 2: body is missing",)),
        (b'{"custom_id": "x", "method": "GET", "body": {"prompt": "x"}}', ("line 2: method is 'GET'",)),
        (b'{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', ("line 2: url is '/v1/embeddings'",)),
        (b'{"custom_id": "x", "bdoy": {}}', ("line 2: bdoy is not a field of a line",)),
        (b'{"custom_id": "a", "body": {"prompt": "x"}}', ("line 2: custom_id 'a' is also in line 1",)),
        (b"[" * 100_000, ("line 2: it is not JSON",)),
    ],
)
def test_a_malformed_line_fails_alone_and_is_named(batch, answers, line, words):
    outcome = batch([chat("a"), line, b"  ", chat("z")], expect=1)
    for word in words:
        assert word in outcome.err, outcome.err
    found = answers()
    assert body_of(found["a"]) and body_of(found["z"]) and len(found) == 3
    (failed,) = [one for one in found.values() if one["error"]]
    assert failed["response"] is None and words[0] in failed["error"]["message"]


def test_malformed_lines_are_named_before_anything_is_loaded(batch, pair, tmp_path):
    hollow = without_weights(pair[0], tmp_path)
    outcome = batch([b"{", chat("a", temperature=-1), chat("b")], model=hollow, expect=1)
    assert outcome.err.index("line 1: it is not JSON") < outcome.err.index("line 2: temperature is -1")
    assert outcome.err.index("line 2:") < outcome.err.index("has no weights")


def test_requests_that_cannot_be_met_fail_alone(batch, answers):
    lines = [chat("long", "why " * 900), chat("a"), chat("nope", context="nope"), chat("other", model="gpt-4o")]
    outcome = batch(lines, expect=1)
    found = answers()
    assert body_of(found["a"])
    codes = {name: found[name]["response"]["body"]["error"]["code"] for name in ("long", "nope", "other")}
    assert codes == {"long": "context_length_exceeded", "nope": "context_not_usable", "other": "model_not_found"}
    assert found["other"]["response"]["status_code"] == 404
    assert "1,024 positions" in outcome.err and "1 of 4 requests, 3 failed" in outcome.err


def test_a_request_that_memory_does_not_suffice_for_fails_alone(batch, answers, pair, tmp_path):
    model = tmp_path / "endless"
    shutil.copytree(pair[0], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    lines = [chat("a"), chat("b", max_tokens=9 * 10**8, n=2), chat("c")]
    batch(lines, "--max-sequences", 2, model=model, expect=1)
    found = answers()
    assert body_of(found["a"]) and body_of(found["c"])
    assert found["b"]["response"]["status_code"] == 500
    assert "of memory" in found["b"]["response"]["body"]["error"]["message"]


def test_questions_about_a_saved_context(batch, answers, pair, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)
    read = ("read", tmp_path / "book.txt", "--model", pair[0], "--device", "cpu", "--dtype", "float32")
    assert run_here(capfd, *read).code == 0
    plain, asked = chat("plain"), [chat("a", context="book"), chat("b", "How?", context="book")]
    batch([asked[0], plain, asked[1]])
    found = {name: body_of(line) for name, line in answers().items()}
    cached = {name: body["usage"]["prompt_tokens_details"]["cached_tokens"] for name, body in found.items()}
    assert cached["a"] > 200 and cached["plain"] == 0
    assert found["b"]["usage"]["prompt_tokens"] > 200
    assert found["plain"]["usage"]["prompt_tokens"] < 50
    batch([chat("c"), chat("d", context=None)], "--context", "book")
    assert body_of(answers()["c"])["choices"] == found["a"]["choices"], "the option names it for all"


def test_an_interrupt_keeps_what_came_and_the_next_run_completes_it(batch, answers, pair, files, tmp_path):
    write(files[0], [completion(str(n), TEXT, max_tokens=300 if n else 3) for n in range(4)])
    settings = ("--max-sequences", 3, "--block-length", 2, "--budget", 64)
    fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32")
    with Running("batch", files[0], "-o", files[1], *fixed, *settings, "--json", tmp_path / "run.json") as run:
        run.wait_until(lambda: files[1].exists() and files[1].read_text().endswith("\n"))
        run.signal(signal.SIGINT)
        outcome = run.finish()
    assert outcome.code == 130 and outcome.err.endswith("interrupted\n"), outcome
    found = answers()
    assert body_of(found.pop("0")), "it was complete"
    assert found and all(line["error"]["code"] == "interrupted" for line in found.values())
    parts = {name: line["response"]["body"]["choices"][0] for name, line in found.items()}
    assert all(part["finish_reason"] == "interrupted" and part["text"] for part in parts.values())
    assert json.loads((tmp_path / "run.json").read_text())["requests"]["answered"] == 1
    batch(None, *settings)
    for name, part in parts.items():
        assert body_of(answers()[name])["choices"][0]["text"].startswith(part["text"].rstrip("�"))
    assert answers().keys() == {"0", "1", "2", "3"}


BAD_FIELDS = {
    "stream": True,
    "frequency_penalty": 0.5,
    "tools": [{"type": "function"}],
    "response_format": 3,
    "temprature": 0.1,
    "temperature": -1,
    "top_p": 1.5,
    "top_k": -1,
    "min_p": 1.5,
    "seed": 2**63,
    "n": 129,
    "max_tokens": 0,
    "stop": ["a", ""],
    "context": 5,
    "messages": [{"role": "tool", "content": "x"}],
    "top_logprobs": 2,
    "model": "gpt-4o",
}


def test_fields_of_a_body_are_refused_by_name_before_anything_is_loaded(batch, answers, pair, tmp_path):
    outcome = batch([chat(name, **{name: value}) for name, value in BAD_FIELDS.items()],
                    model=without_weights(pair[0], tmp_path), expect=1)  # fmt: skip
    found = answers()
    assert found.keys() == BAD_FIELDS.keys() and "has no weights" not in outcome.err
    for name, line in found.items():
        error = line["response"]["body"]["error"]
        assert error["param"].partition("[")[0] == name and error["message"], error
        assert line["response"]["status_code"] == (404 if name == "model" else 400)


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "words"),
    [
        (lambda a, b: a.unlink(), (), 1, ("the file of requests", "does not exist")),
        (lambda a, b: a.write_text("\n\n"), (), 2, ("has no requests",)),
        (lambda a, b: b.mkdir(), (), 2, ("--output", "is a directory")),
        (lambda a, b: b.write_text("my notes\nmore\n"), (), 2, ("line 1 is not an answer of a batch", "another file")),
        (lambda a, b: b.hardlink_to(a), (), 2, ("--output", "is the file of requests")),
        (lambda a, b: None, ("--context", "../x"), 2, ("cannot be the name",)),
        (lambda a, b: None, ("--max-sequences", 0), 2, ("--max-sequences", "whole number from 1")),
        (lambda a, b: None, ("--model", "nope"), 1, ("'nope'",)),
    ],
)
def test_impossible_runs_are_refused_and_change_nothing(batch, files, prepare, arguments, code, words):
    files[0].write_text(json.dumps(chat("a")) + "\n")
    prepare(*files)
    before = files[1].read_bytes() if files[1].is_file() else None
    check_refusal(batch(None, *arguments, expect=code), code, *words)
    assert before == (files[1].read_bytes() if files[1].is_file() else None)


def test_both_files_are_needed(capfd):
    check_refusal(run_here(capfd, "batch", "-o", "answers.jsonl"), 2, "REQUESTS")
    check_refusal(run_here(capfd, "batch", "requests.jsonl"), 2, "--output")
    check_refusal(run_here(capfd, "batch", "requests.jsonl", "-o", "-"), 2, "--output is -", "give a file")


def test_requests_come_through_a_pipe(pair, files):
    lines = "".join(json.dumps(chat(name)) + "\n" for name in "ab").encode()
    fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32")
    outcome = run_command("batch", "-", "-o", files[1], *fixed, stdin=lines)
    assert outcome.code == 0 and "2 requests of standard input" in outcome.err, outcome
    assert len(files[1].read_text().splitlines()) == 2


@pytest.mark.slow
def test_several_ranks_give_the_same_answers(batch, answers, files, pair):
    lines = [chat(str(n), f"Why {n}?", max_tokens=5 + n) for n in range(4)]
    batch(lines, "--max-sequences", 2)
    alone = {name: body_of(line)["choices"] for name, line in answers().items()}
    files[1].unlink()
    fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32", "--max-sequences", 2)
    outcome = run_command("batch", files[0], "-o", files[1], *fixed, "--gpus", 2)
    assert outcome.code == 0, outcome
    assert {name: body_of(line)["choices"] for name, line in answers().items()} == alone
