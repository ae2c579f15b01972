"""Several answers over one reading: the same as each alone, written in the order asked, and failing one by one."""

import json
import re

import pytest
from command import TEXT, check_refusal, run_command, run_here, save_tokenizer, undocumented
from tiny import save_llama

ASKS = ("Why?", "How was it?", "Where?")
GREEDY = ("--temperature", 0, "--dtype", "float32", "--ignore-eos")


def asks(*questions):
    return [word for question in questions for word in ("--ask", question)]


def test_each_answer_is_the_one_that_it_is_alone(document):
    together = document(*GREEDY, *asks(*ASKS))
    assert [one["ask"] for one in together["sequences"]] == list(ASKS)
    assert not {"token_ids", "text"} & together.keys()
    for one in together["sequences"]:
        alone = document(*GREEDY, "--ask", one["ask"])
        assert one["token_ids"] == alone["token_ids"] and one["text"] == alone["text"]
        assert one["prompt_tokens"] == alone["prompt_tokens"]
        assert alone.keys() <= one.keys(), alone.keys() - one.keys()
    assert together["new_tokens"] == 12 * len(ASKS)
    assert not undocumented(together, "json.md", "batches.md")


def test_the_text_is_read_once(tmp_path, capfd):
    model = tmp_path / "long"
    save_tokenizer(model)
    save_llama(model, vocab_size=320, max_position_embeddings=4096, num_hidden_layers=1)
    fixed = ("--model", model, "--draft", "none", "--prompt", TEXT * 10, "--max-new-tokens", 4, "--json", "-")
    outcome = run_here(capfd, "generate", *fixed, *GREEDY, *asks(*ASKS))
    first, *others = json.loads(outcome.out)["sequences"]
    assert first["reused_tokens"] == 0 and first["prompt_tokens"] > 2048
    assert all(one["reused_tokens"] == 2048 for one in others), "whole tiles of the tokens that they share"


def test_stdout_has_whole_answers_in_the_order_asked_under_headings_on_stderr(generate, tmp_path):
    path = tmp_path / "run.json"
    outcome = generate(*asks(*ASKS), "--json", path)
    sequences = json.loads(path.read_text())["sequences"]
    texts = [one["text"] if one["text"].endswith("\n") else one["text"] + "\n" for one in sequences]
    assert outcome.out == "".join(texts)
    headings = [line.removeprefix("--- ") for line in outcome.err.splitlines() if line.startswith("--- ")]
    assert headings == list(ASKS)
    for label in ("model", "prompt", "written", "together", "memory"):
        assert f"\n{label}" in "\n" + outcome.err, label
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"], "the temporary file is gone"


def test_answers_to_one_question_are_drawn_anew_and_the_first_is_that_of_the_seed_alone(document):
    sampling = ("--temperature", 1, "--top-p", 1, "--seed", 3, "--dtype", "float32", "--ignore-eos", "--ask", "Why?")
    three = document(*sampling, "-n", 3)["sequences"]
    assert [one["number"] for one in three] == [0, 1, 2]
    assert three[0]["token_ids"] == document(*sampling)["token_ids"]
    assert len({tuple(one["token_ids"]) for one in three}) == 3
    again = document(*sampling, "--answers", 2)["sequences"]
    assert [one["token_ids"] for one in again] == [one["token_ids"] for one in three[:2]]


def test_continuations_of_a_text_need_no_question(generate):
    outcome = generate("-n", 2, "--temperature", 1)
    assert "--- continuation 1 of 2" in outcome.err and "--- continuation 2 of 2" in outcome.err
    assert "will be the same" in generate("-n", 2, "--temperature", 0).err


def test_questions_of_a_file_follow_those_of_the_options(document, tmp_path):
    (tmp_path / "asks.txt").write_bytes("\ufeffHow was it?\r\n\n  \nWhere, “exactly”?\n".encode())
    found = document("--ask", "Why?", "--asks", tmp_path / "asks.txt")
    assert [one["ask"] for one in found["sequences"]] == ["Why?", "How was it?", "Where, “exactly”?"]


def test_one_question_is_one_run_wherever_it_is_from(document, tmp_path):
    (tmp_path / "asks.txt").write_text("\nWhy?\n")
    from_file = document(*GREEDY, "--asks", tmp_path / "asks.txt")
    assert from_file["token_ids"] == document(*GREEDY, "--ask", "Why?")["token_ids"]
    assert "sequences" not in from_file and from_file["text"]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 1, ("--asks", "does not exist")),
        (b"", 1, ("--asks", "is empty", "one question per line")),
        (b"\n \n", 1, ("is empty",)),
        (b"Why?\n\nWho is Andr\xe9?\n", 1, ("line 3 is not UTF-8", "0xe9", "iconv")),
        (b"Why?\nWh\0o?\n", 1, ("line 2 is not text", "NUL")),
        (b"Why?\n" * 1027, 2, ("line 1,025", "1,024 answers", "triforce batch")),
    ],
)
def test_bad_files_of_questions_are_refused_before_anything_is_loaded(capfd, tmp_path, content, code, words):
    path = tmp_path / "asks.txt"
    if content is not None:
        path.write_bytes(content)
    outcome = run_here(capfd, "generate", "--model", tmp_path, "--prompt", "A", "--asks", path)
    check_refusal(outcome, code, *words)


def test_impossible_options_are_refused(capfd):
    check_refusal(run_here(capfd, "generate", "--ask", "Why?", "--ask", " "), 2, "--ask is empty")
    check_refusal(run_here(capfd, "generate", "-n", "0"), 2, "-n", "whole number from 1")
    check_refusal(run_here(capfd, "generate", "-n", "5000"), 2, "1,024 answers", "5,000 to each question")
    check_refusal(run_here(capfd, "generate", "--asks", "-", "--prompt-file", "-"), 2, "--prompt-file and --asks")


def test_a_question_that_is_too_long_fails_alone(generate, document):
    long = "why " * 700
    outcome = generate(*GREEDY, *asks("Why?", long, "Where?"), expect=1)
    assert "error: the prompt has" in outcome.err and "1,024 positions" in outcome.err
    found = document(*GREEDY, *asks("Why?", long, "Where?"), expect=1)["sequences"]
    assert [sorted(one) for one in found][1] == ["ask", "error", "number"]
    assert found[0]["token_ids"] == document(*GREEDY, "--ask", "Why?")["token_ids"] and found[2]["text"]
    refused = generate(*asks(long, long + "?"), expect=1)
    check_refusal(refused, 1, "1,024 positions")


def test_a_saved_context_is_asked_several_things(document, generate, pair, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)
    read = ("read", tmp_path / "book.txt", "--model", pair[0], "--dtype", "float32")
    assert run_here(capfd, *read).code == 0
    found = document(*GREEDY, *asks(*ASKS), "--context", "book")
    alone = [document(*GREEDY, "--ask", ask, "--context", "book") for ask in ASKS]
    assert [one["token_ids"] for one in found["sequences"]] == [one["token_ids"] for one in alone]
    assert found["sequences"][0]["reused_tokens"] > 200
    assert "starts from the saved context book" in generate(*asks(*ASKS), "--context", "book").err


def test_an_interrupt_keeps_every_answer_as_far_as_it_came(document, pair, tmp_path):
    terminals = pytest.importorskip("terminals", reason="pyte is not installed: pip install '.[test]'")
    path = tmp_path / "run.json"
    asked = (*GREEDY, "--prompt", TEXT, *asks(*ASKS), "--max-new-tokens", 600, "--block-length", 4, "--budget", 64)
    fixed = ("--model", pair[0], "--draft", pair[1], "--device", "cpu")
    terminal = terminals.Terminal("generate", *fixed, *asked, "--json", path)
    try:
        terminal.read_until("3 running")
        terminal.type("\x03")
        assert terminal.finish() == 130
    finally:
        terminal.close()
    found = json.loads(path.read_text())["sequences"]
    assert [one["finish_reason"] for one in found] == ["interrupted"] * 3
    assert all(0 < one["new_tokens"] < 600 for one in found)
    assert terminal.raw.endswith("interrupted\r\n") and "Traceback" not in terminal.raw
    printed = re.sub(r"\W", "", terminal.raw[terminal.raw.rindex("\x1b[?1049l") :])
    assert all(re.sub(r"\W", "", one["text"])[:4] in printed for one in found)
    whole = document(*asked, "--max-new-tokens", max(one["new_tokens"] for one in found))["sequences"]
    for one, all_of_it in zip(found, whole, strict=True):
        assert all_of_it["token_ids"][: one["new_tokens"]] == one["token_ids"]


@pytest.mark.slow
def test_several_ranks_give_the_same_answers(document, pair):
    common = ("generate", "--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--max-new-tokens", 12)
    asked = (*GREEDY, *asks(*ASKS), "-n", 2, "--json", "-", "--device", "cpu")
    outcome = run_command(*common, *asked, "--gpus", 2)
    assert outcome.code == 0, outcome
    together = json.loads(outcome.out)
    assert together["world_size"] == 2
    alone = document(*asked[:-4])
    assert [one["token_ids"] for one in together["sequences"]] == [one["token_ids"] for one in alone["sequences"]]
