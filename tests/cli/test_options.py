"""Options: older names still work, values are checked as they are parsed, and every computing command takes threads."""

import json

import pytest
from command import TEXT, check_refusal, run_command, run_fork, run_here
from triforce.tp import PRESETS

SEVEN = "yarn-llama-2-7b-128k"


@pytest.fixture
def plan(capfd):
    return lambda *arguments: json.loads(run_here(capfd, "plan", *arguments, "--gpus", 2, "--json", "-").out)


def test_older_names_of_options_of_plan_mean_the_same(plan):
    new = plan("--model", SEVEN, "--assume-acceptance", "0.95,0.5")
    assert new["assumed"] == {"acceptance": 0.95, "draft_acceptance": 0.5}
    assert plan("--shape", SEVEN, "--acceptance", 0.95, "--draft-acceptance", 0.5) == new
    assert plan("--model", SEVEN, "--acceptance", "auto", "--draft-acceptance", "auto") == plan("--model", SEVEN)
    assert plan("--model", SEVEN, "--draft-acceptance", 0.25)["assumed"]["draft_acceptance"] == 0.25
    assert plan("--model", SEVEN, "--assume-acceptance", 0.8)["assumed"]["acceptance"] == 0.8


def test_older_name_of_the_answers_length_is_taken_by_bench(pair, capfd):
    arguments = ("bench", "--model", pair[0], "--prompt", TEXT, "--contexts", 12, "--new-tokens", 12)
    check_refusal(run_here(capfd, *arguments), 2, "--contexts has 12", "--max-new-tokens is 12")


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "compare", "models", "plan", "doctor"])
@pytest.mark.slow(keep=("generate", "plan"))
def test_help_shows_one_name_of_each_option(command):
    text = run_fork(command, "--help").out
    assert "--json" in text and "PATH|-" in text
    for older in ("--new-tokens", " --acceptance", "--draft-acceptance", "(auto)"):
        assert older not in text
    assert ("--shape" in text) == (command == "bench")
    assert ("--threads" in text) == (command in ("generate", "chat", "bench", "compare"))


def test_json_of_models_goes_where_it_is_asked_for(capfd, tmp_path):
    path = tmp_path / "models.json"
    outcome = run_here(capfd, "models", "--json", path)
    assert outcome.code == 0 and outcome.out.startswith("name ")
    assert [row["name"] for row in json.loads(path.read_text())] == list(PRESETS)
    for bare in (("--json",), ("--json", "--debug"), ("--debug", "--json"), ("--json", "-")):
        rows = json.loads(run_here(capfd, "models", *bare).out)
        assert [row["name"] for row in rows] == list(PRESETS), bare


def test_debug_changes_nothing_of_models_and_doctor(capfd):
    plain, debug = run_here(capfd, "models"), run_here(capfd, "models", "--debug")
    assert (plain.code, plain.err) == (debug.code, debug.err) == (0, "")
    told, _, behind = plain.out.partition("\nfits here:")  # the table's last columns follow the memory that is free now
    assert debug.out.endswith(behind) and debug.out.splitlines()[0].split() == told.splitlines()[0].split()
    plain, debug = run_here(capfd, "doctor"), run_here(capfd, "doctor", "--debug")
    assert plain.code == debug.code and plain.err == debug.err


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        ("generate", "--threads", "0", ("'0'", "auto or a whole number from 1")),
        ("compare", "--threads", "many", ("'many'", "auto or a whole number from 1")),
        ("bench", "--contexts", "8,,9", ("'8,,9'", "separated by commas")),
        ("bench", "--assume-acceptance", "0.5,0.5,0.5", ("'0.5,0.5,0.5'", "one or two")),
        ("plan", "--host-memory", "nan", ("'nan'", "a number of GiB")),
        ("plan", "--gpu-memory", "0", ("'0'", "above 0")),
        ("compare", "--time-limit", "inf", ("'inf'", "above 0")),
    ],
)
def test_values_are_checked_when_they_are_parsed(capfd, command, option, value, words):
    check_refusal(run_here(capfd, command, option, value), 2, option, *words)


@pytest.mark.slow
def test_threads_are_those_that_were_asked_for(pair):
    common = ("--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--max-new-tokens", 4, "--json", "-")
    # New processes: a fork of one that has computed with two threads would wait for the other one for ever.
    for threads, want in (("--threads", 2), 2), ((), 1):
        outcome = run_command("generate", *common, *threads)
        assert json.loads(outcome.out)["threads"] == want, outcome
    outcome = run_command("compare", *common, "--repeat", 1, "--baseline", "autoregressive", "--threads", 2)
    document = json.loads(outcome.out)
    assert document["threads"] == document["machine"]["threads"] == 2
    assert all("2 threads" in system["ran"] for system in document["systems"])


@pytest.mark.slow
def test_each_rank_computes_with_the_threads_asked_for(pair):
    outcome = run_command(
        "generate", "--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--max-new-tokens", 4, "--json", "-",
        "--gpus", 2, "--device", "cpu", "--threads", 2,
    )  # fmt: skip
    document = json.loads(outcome.out)
    assert (document["world_size"], document["threads"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("read",), "FILE"), (("contexts", "show"), "NAME"), (("contexts", "prune"), "--keep"), (("batch",), "REQUESTS")],
)
def test_a_value_that_is_needed_is_named_where_it_is_not_given(capfd, arguments, word):
    check_refusal(run_here(capfd, *arguments), 2, "Missing", word)
