"""What options of several commands refuse, on each of them: an impossible value when it is parsed, with the option and
what is possible, and what is not there before anything is loaded. What they do: `test_engine_options.py`."""

import pytest
from command import check_refusal, run_here

COMMON = ("generate", "chat", "batch", "serve", "bench", "compare")
"""The commands that answer, or measure answers."""

OPTIONS = {
    "--temperature": ("hot", "number", COMMON),
    "--top-p": ("much", "number", COMMON),
    "--min-p": ("some", "number", COMMON),
    "--max-new-tokens": ("0", "whole number from", COMMON),
    "--budget": ("lots", "auto or a whole number of tokens from 1", (*COMMON, "plan")),
    "--chunk-size": ("-8", "auto or a whole number", (*COMMON, "plan")),
    "--draft-length": ("0", "auto or a whole number", (*COMMON, "plan")),
    "--block-length": ("1.5", "auto or a whole number", (*COMMON, "plan")),
    "--resident": ("-1", "auto or a number of GiB", (*COMMON, "plan", "read")),
    "--host-memory": ("-1", "auto or a number of GiB, 0 or more", (*COMMON, "plan", "read")),
    "--gpus": ("0", "whole number from 1", ("generate", "chat", "batch", "serve", "bench", "plan", "read")),
    "--tiers": ("4", "'1', '2', '3'", ("generate", "chat", "batch", "serve", "plan")),
    "--max-sequences": ("0", "whole number from 1", ("batch", "serve")),
    "--repeat": ("0", "whole number from 1", ("bench", "compare")),
    "--batch": ("0", "", ("bench", "compare", "plan")),
    "--truncate": ("left", "'head', 'tail', 'middle'", ("generate", "compare")),
    "--assume-acceptance": ("2", "", ("bench", "plan")),
}

NOWHERE = "/nowhere/to/be/found"

GIVEN = {
    "generate": ("--prompt-file", NOWHERE),
    "chat": ("--prompt-file", NOWHERE),
    "batch": (NOWHERE, "--output", NOWHERE),
    "serve": ("--host", "192.0.2.1"),
    "bench": ("--prompt-file", NOWHERE),
    "compare": ("--prompt-file", NOWHERE),
    "plan": ("--model", NOWHERE),
    "read": (NOWHERE,),
}
"""What else a command is given: it would go no further than here."""

CASES = [(command, option) for option, (_, _, commands) in OPTIONS.items() for command in commands]


@pytest.mark.parametrize(("command", "option"), CASES)
@pytest.mark.slow(keep=24)
def test_an_impossible_value_is_refused_on_every_command(capfd, command, option):
    value, possible, _ = OPTIONS[option]
    outcome = run_here(capfd, command, *GIVEN[command], option, value)
    check_refusal(outcome, 2, option.lstrip("-"), value, possible)


THERE = {"generate": ("--prompt", "It was"), "bench": ("--prompt", "It was"), "compare": ("--prompt", "It was")}

MISSING = {
    "--model": ("no/such/model", (*COMMON, "read")),
    "--draft": ("no/such/model", COMMON),
    "--json": (
        f"{NOWHERE}.json",
        ("generate", "chat", "batch", "bench", "compare", "read", "plan", "models", "doctor"),
    ),
    "--context": ("no such context", COMMON),
    "--prompt-file": (NOWHERE, ("generate", "chat", "bench", "compare")),
}
"""What an option may name, and the commands that have it."""


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for option, (_, commands) in MISSING.items() for command in commands]
)
@pytest.mark.slow(keep=8)
def test_what_is_not_there_is_named_before_anything_is_loaded(capfd, tmp_path, command, option):
    text, requests = tmp_path / "a.txt", tmp_path / "requests.jsonl"
    text.write_text("It was")
    requests.write_text('{"custom_id": "a", "body": {"prompt": "It was"}}\n')
    given = {"batch": (requests, "--output", tmp_path / "answers.jsonl"), "read": (text,), "serve": ("--port", 0)}
    value, _ = MISSING[option]
    others = () if option in ("--prompt-file", "--context") else THERE.get(command, ())
    outcome = run_here(capfd, command, *given.get(command, ()), *others, option, value)
    assert outcome.code in (1, 2) and outcome.out == "", outcome
    assert value in outcome.err and "Traceback" not in outcome.err, outcome
