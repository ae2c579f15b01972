"""`triforce read`, `triforce contexts`, and the options of other commands that saved contexts have."""

import io
import json
import re
import shutil
import signal
import sys

import pytest
import xxhash
from command import (
    TEXT,
    VOCABULARY,
    Outcome,
    Running,
    fork_interpreters,
    run_command,
    run_fork,
    run_here,
    save_pair,
    save_tokenizer,
)
from tiny import save_llama
from triforce.kernels import Level, arithmetic, cpu_level
from triforce.tp import Tokenizer

QUESTION = "Why was it so, and for whom?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def triforce(pair, capfd, tmp_path, monkeypatch):
    """Runs a command with the tiny model and a store of its own."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)

    def run(command, *arguments, expect=0) -> Outcome:
        models = () if command == "contexts" else ("--model", pair[0], "--device", "cpu")
        outcome = run_here(capfd, command, *models, *arguments)
        assert outcome.code == expect, outcome.err
        return outcome

    return run


def answered(triforce, *arguments) -> dict:
    fixed = ("--seed", "3", "--max-new-tokens", "12", "--ignore-eos", "--json", "-")
    return json.loads(triforce("generate", *arguments, *fixed).out)


def test_a_book_is_read_once_and_asked_often(triforce, tmp_path):
    said = triforce("read", tmp_path / "book.txt").err
    assert (
        re.search(r"context book: \d+ tokens", said)
        and "free; the prefill takes about" in said
        and "--context 'book'" in said
    )
    tokens = json.loads(triforce("contexts", "show", "book", "--json", "-").out)["tokens"]
    asked = answered(triforce, "--context", "book", "--ask", "What was it, and for whom was it so?")
    assert asked["context"] == "book" and asked["reused_tokens"] == tokens < asked["prompt_tokens"]
    again = triforce("read", tmp_path / "book.txt").err
    assert "nothing to read" in again
    fresh = answered(triforce, "--prompt-file", tmp_path / "book.txt", "--no-context")
    assert fresh["context"] is None and fresh["reused_tokens"] == 0
    found = answered(triforce, "--prompt", TEXT * 2)
    assert found["context"] == "book" and found["reused_tokens"] > 64


def test_the_answer_from_a_context_is_that_of_reading_afresh(triforce, tmp_path):
    saving = answered(triforce, "--prompt-file", tmp_path / "book.txt", "--ask", QUESTION, "--save-context", "mine")
    assert saving["context"] is None and not saving["warnings"]
    restored = answered(triforce, "--context", "mine", "--ask", QUESTION)
    assert restored["token_ids"] == saving["token_ids"] and restored["prompt_tokens"] == saving["prompt_tokens"]
    assert restored["reused_tokens"] == json.loads(triforce("contexts", "show", "mine", "--json", "-").out)["tokens"]


def test_several_files_are_one_context_in_the_order_given(triforce, tmp_path):
    (tmp_path / "more.txt").write_text("And then it ended.")
    triforce("read", tmp_path / "book.txt", tmp_path / "more.txt", "--as", "both")
    (tmp_path / "joined.txt").write_text(TEXT + "And then it ended.")
    assert "nothing to read" in triforce("read", tmp_path / "joined.txt", "--as", "both").err
    wrong_order = triforce("read", tmp_path / "more.txt", tmp_path / "book.txt", "--as", "both", expect=1)
    assert "holds another text: it differs from this one at token" in wrong_order.err


def test_contexts_are_listed_shown_verified_and_removed(triforce, tmp_path):
    assert "no contexts in" in triforce("contexts").out
    assert json.loads(triforce("contexts", "--json", "-").out) == []
    triforce("read", tmp_path / "book.txt", "--as", "one")
    (listed,) = json.loads(triforce("contexts", "list", "--json", "-").out)
    keys = {
        "name",
        "model",
        "dtype",
        "arithmetic",
        "tokens",
        "kv_bytes",
        "disk_bytes",
        "segments",
        "complete",
        "created",
        "used",
    }
    assert keys <= listed.keys() and listed["complete"] and listed["kv_bytes"] <= listed["disk_bytes"]
    assert "one" in triforce("contexts").out
    assert "as they were written" in triforce("contexts", "verify", "one").err
    (segment,) = (tmp_path / "home" / "contexts" / "one").glob("*.safetensors")
    with segment.open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff\x00\xff")
    broken = triforce("contexts", "verify", "one", expect=1)
    assert "damaged from position 0 on; read its text again under this name to mend it" in broken.err
    assert json.loads(triforce("contexts", "verify", "one", "--json", "-", expect=1).out)["damaged"]
    assert json.loads(triforce("contexts", "rm", "one", "--json", "-").out) == {"removed": ["one"]}
    assert "there is no context 'one'" in triforce("contexts", "rm", "one", expect=1).err
    assert not (tmp_path / "home" / "contexts" / "one").exists()


def test_a_context_in_bfloat16_is_packed_unless_told_not_to(triforce, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text(TEXT * 4)
    for name, more in (("packed", ()), ("raw", ("--pack", "off"))):
        triforce("read", text, "--as", name, "--dtype", "bfloat16", *more)
    packed, raw = (json.loads(triforce("contexts", "show", one, "--json", "-").out) for one in ("packed", "raw"))
    assert (packed["packed_segments"], raw["packed_segments"]) == (1, 0)
    assert packed["kv_bytes"] == raw["kv_bytes"] and packed["disk_bytes"] < 0.9 * raw["disk_bytes"]
    assert "1 segments, 1 of them packed" in triforce("contexts", "show", "packed").out
    asked = [
        answered(triforce, "--context", one, "--ask", QUESTION, "--dtype", "bfloat16") for one in ("packed", "raw")
    ]
    assert asked[0]["token_ids"] == asked[1]["token_ids"] and asked[0]["reused_tokens"] == packed["tokens"]
    refused = triforce("read", text, "--as", "other", "--dtype", "float32", "--pack", "on", expect=2)
    assert "only bfloat16 is packed" in refused.err


def test_what_streams_is_packed_where_that_is_asked_for(triforce, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 4)
    common = ("--prompt-file", tmp_path / "long.txt", "--dtype", "bfloat16", "--resident", "0", "--no-context")
    packed, raw = (answered(triforce, *common, "--pack", pack) for pack in ("on", "auto"))
    assert packed["settings"]["packed"] and not raw["settings"]["packed"]
    assert packed["token_ids"] == raw["token_ids"]
    assert 0 < packed["link"]["bytes_streamed"] < 0.8 * raw["link"]["bytes_streamed"]


def test_a_damaged_context_costs_a_reading_and_no_token(triforce, tmp_path):
    triforce("read", tmp_path / "book.txt")
    want = answered(triforce, "--context", "book", "--ask", QUESTION)
    (segment,) = (tmp_path / "home" / "contexts" / "book").glob("*.safetensors")
    content = bytearray(segment.read_bytes())
    content[8192] ^= 4
    segment.write_bytes(content)
    got = answered(triforce, "--context", "book", "--ask", QUESTION)
    assert got["token_ids"] == want["token_ids"] and got["reused_tokens"] == 0
    assert (
        "the context 'book' is damaged" in got["warnings"][0]
        and "computes the text again from position 0" in got["warnings"][0]
    )


def test_a_context_of_another_level_is_used_and_named(triforce, pair, tmp_path):
    if cpu_level() == Level.NONE:
        pytest.skip("there is one level here")

    def without_kernels(command, *arguments):
        fixed = ("--model", pair[0], "--device", "cpu")
        run = run_fork(command, *fixed, *arguments, anew="triforce", TRIFORCE_CPU_LEVEL="none")
        assert run.code == 0, run
        return json.loads(run.out)

    assert without_kernels("read", tmp_path / "book.txt", "--json", "-")["arithmetic"] == 0
    asked = ("--context", "book", "--ask", QUESTION)
    alike = without_kernels("generate", *asked, "--max-new-tokens", 2, "--json", "-")
    other = answered(triforce, *asked)
    assert other["context"] == "book" and other["reused_tokens"] == alike["reused_tokens"] > 0
    assert alike["warnings"] == [] and other["warnings"] == [
        f"the context 'book' was saved with other arithmetic (number 0; this run computes with {arithmetic()}): "
        "in near-ties, answers may differ from those after a prefill of the text on this machine"
    ]


def computed_with(directory, numbers):
    """Says in a manifest that keys and values were computed with other arithmetic; `None`: nothing, as once."""
    path = directory / "manifest.json"
    described = json.loads(path.read_bytes())
    del described["checksum"]
    for segment in described["segments"]:
        del segment["arithmetic"]
        segment |= {} if numbers is None else {"arithmetic": numbers}
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    path.write_text(json.dumps(described | {"checksum": checksum}))


def test_what_is_added_to_a_context_of_other_arithmetic_does_not_hide_it(triforce, tmp_path):
    """A text that grew, and another context that begins with it, of which some is in memory already."""
    contexts, number = tmp_path / "home" / "contexts", arithmetic()
    triforce("read", tmp_path / "book.txt")
    computed_with(contexts / "book", [3])
    assert json.loads(triforce("contexts", "show", "book", "--json", "-").out)["arithmetic"] == 3
    (tmp_path / "book.txt").write_text(TEXT * 2)
    grown = triforce("read", tmp_path / "book.txt")
    answered(triforce, "--prompt", TEXT * 3, "--save-context", "longer")
    assert f"'book' was saved with other arithmetic (number 3; this run computes with {number})" in grown.err
    for name in ("book", "longer"):
        assert json.loads(triforce("contexts", "show", name, "--json", "-").out)["arithmetic"] is None
        (warning,) = answered(triforce, "--context", name, "--ask", QUESTION)["warnings"]
        assert f"'{name}' was saved in part with other arithmetic (number 3; this run" in warning


def test_a_conversation_about_a_context_of_other_arithmetic_is_saved_as_such(triforce, tmp_path, monkeypatch):
    triforce("read", tmp_path / "book.txt")
    computed_with(tmp_path / "home" / "contexts" / "book", [3])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\nHow?\n/save talk\n")))
    said = triforce("chat", "--context", "book", "--max-new-tokens", 3).err
    assert said.count("with other arithmetic (number 3;") == 1, said
    described = json.loads(triforce("contexts", "list", "--json", "-").out)
    assert {one["name"]: one["arithmetic"] for one in described} == {"book": 3, "talk": None}
    (warning,) = answered(triforce, "--context", "talk", "--ask", QUESTION)["warnings"]
    assert "'talk' was saved in part with other arithmetic (number 3;" in warning


def test_a_context_of_an_earlier_version_is_used_in_silence(triforce, tmp_path):
    """Its manifest does not say what computed it."""
    triforce("read", tmp_path / "book.txt")
    assert json.loads(triforce("contexts", "show", "book", "--json", "-").out)["arithmetic"] == arithmetic()
    computed_with(tmp_path / "home" / "contexts" / "book", None)
    assert json.loads(triforce("contexts", "show", "book", "--json", "-").out)["arithmetic"] is None
    asked = answered(triforce, "--context", "book", "--ask", QUESTION)
    assert asked["context"] == "book" and asked["reused_tokens"] and asked["warnings"] == []


def test_prune_and_the_quota_remove_what_was_used_longest_ago(triforce, tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(name + TEXT)
        triforce("read", tmp_path / f"{name}.txt")
    size = json.loads(triforce("contexts", "show", "first", "--json", "-").out)["disk_bytes"]
    monkeypatch.setenv("TRIFORCE_CONTEXTS_MAX", str(int(2.5 * size)))
    (tmp_path / "third.txt").write_text("third" + TEXT)
    refused = triforce("read", tmp_path / "third.txt")
    assert "removed the context first" in refused.err
    assert [one["name"] for one in json.loads(triforce("contexts", "--json", "-").out)] == ["second", "third"]
    monkeypatch.setenv("TRIFORCE_CONTEXTS_MAX", "1KB")
    (tmp_path / "fourth.txt").write_text("fourth" + TEXT)
    assert "would exceed the quota" in triforce("read", tmp_path / "fourth.txt", expect=1).err
    assert len(json.loads(triforce("contexts", "--json", "-").out)) == 2, "nothing was removed for nothing"
    pruned = json.loads(triforce("contexts", "prune", "--keep", f"{size}B", "--json", "-").out)
    assert pruned == {"removed": ["second"]}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "--context", "nope"), 1, "there is no context 'nope'"),
        (("generate", "--context", "../nope"), 2, "'../nope' cannot be the name of a context"),
        (("generate", "--context", "x", "--prompt", "y"), 2, "--context and --prompt are both given"),
        (("generate", "--context", "x", "--save-context", "y"), 2, "--context and --save-context are both given"),
        (("read", "nope.txt"), 1, "FILE nope.txt does not exist"),
        (("read", "book.txt", "--as", "a/b"), 2, "'a/b' cannot be the name of a context"),
        (("read", "book.txt", "--system", "Be brief."), 2, "this model has no chat template"),
        (("contexts", "prune", "--keep", "lots"), 2, "a size such as 20GB or 500MiB"),
    ],
)
def test_impossible_requests_are_refused_by_name(triforce, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert message in triforce(*arguments, expect=code).err


def test_a_text_is_saved_in_the_frame_that_a_question_continues(triforce, pair, tmp_path, monkeypatch):
    """With a chat template, the prompt of `--context --ask` is what the template gives for text and question."""
    model = tmp_path / "chat"
    shutil.copytree(pair[0], model)
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    triforce("read", tmp_path / "book.txt", "--system", "Be brief.", "--model", model)
    tokenizer = Tokenizer.load(model)
    asked = answered(triforce, "--context", "book", "--ask", QUESTION, "--model", model)
    framed = tokenizer.encode("<system>Be brief.<user>" + TEXT, False)
    question = tokenizer.encode(f"{QUESTION}<assistant>", False)
    assert asked["reused_tokens"] == len(framed)
    assert asked["prompt_tokens"] == len(framed) + len(question)
    without = triforce("generate", "--context", "book", "--model", model, expect=2)
    assert "give the question with --ask" in without.err


def test_an_interrupted_reading_answers_nothing_and_goes_on(triforce, tmp_path):
    model, home = tmp_path / "long", tmp_path / "home"
    save_tokenizer(model)
    save_llama(model, vocab_size=VOCABULARY, max_position_embeddings=65_536)
    (tmp_path / "long.txt").write_text(TEXT * 120)
    fixed = (tmp_path / "long.txt", "--model", model, "--device", "cpu", "--dtype", "float32")
    with Running("read", *fixed, TRIFORCE_HOME=str(home)) as run:
        run.wait_until(lambda: list(home.glob("contexts/long/*.safetensors")))
        run.signal(signal.SIGINT)
        outcome = run.finish()
    assert outcome.code == 130 and outcome.err.endswith("interrupted\n"), outcome
    refused = triforce("generate", "--context", "long", "--model", model, "--dtype", "float32", expect=1).err
    assert "is not complete: " in refused and "triforce read completes it" in refused
    (listed,) = json.loads(triforce("contexts", "--json", "-").out)
    assert not listed["complete"] and listed["tokens"] > 10_000


def test_a_damaged_manifest_is_one_damaged_context(triforce, tmp_path):
    for name in ("book", "other"):
        triforce("read", tmp_path / "book.txt", "--as", name)
    (manifest,) = (tmp_path / "home" / "contexts" / "book").glob("*.json")
    manifest.write_text(manifest.read_text().replace("float32", "float16", 1))
    listed = triforce("contexts").out
    assert "damaged" in listed and "other" in listed
    assert "its checksum is not that of its contents" in triforce("contexts", "show", "book", expect=1).err


@pytest.mark.slow
def test_how_a_text_is_read_does_not_change_what_is_saved(triforce, pair, tmp_path):
    """Streamed, with other threads, on two ranks: the context is the one that a plain reading goes on with."""
    home = str(tmp_path / "home")
    for name, more in (("streamed", ("--resident", 0)), ("threads", ("--threads", 2)), ("ranks", ("--gpus", 2))):
        fixed = ("read", tmp_path / "book.txt", "--as", name, "--model", pair[0], "--device", "cpu", "--json", "-")
        done = run_command(*fixed, *more, TRIFORCE_HOME=home)
        assert done.code == 0, done
        assert "nothing to read" in triforce("read", tmp_path / "book.txt", "--as", name).err


def test_a_bench_and_a_comparison_start_from_a_saved_text(triforce, tmp_path, monkeypatch):
    triforce("read", tmp_path / "book.txt", "--raw")
    path = tmp_path / "bench.json"
    fixed = ("--context", "book", "--draft", "none", "--max-new-tokens", 4, "--repeat", 1)
    triforce("bench", *fixed, "--contexts", 150, "--tiers", 1, "--json", path)
    assert json.loads(path.read_text())["contexts"][0]["restored_tokens"] > 100
    without_name = triforce("compare", *fixed, "--baseline", "autoregressive", "--prompt", "A", expect=2)
    assert "--context and --prompt are both given" in without_name.err
    fork_interpreters(monkeypatch)
    compared = json.loads(triforce("compare", *fixed, "--baseline", "autoregressive", "--json", "-").out)
    assert [system["failure"] for system in compared["systems"]] == [None, None]
    assert compared["prompt_tokens"] > 200, "the text alone"
