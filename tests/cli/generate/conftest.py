"""`generate` on the tiny pair."""

import json

import pytest
from command import TEXT, run_here


@pytest.fixture
def generate(pair, capfd):
    """Runs `generate` on the tiny pair within this process."""
    target, draft = pair

    def run(*arguments, expect=0):
        given = ["--model", target, "--draft", draft, "--max-new-tokens", 12, *arguments]
        if not {"--prompt", "--prompt-file", "--context"} & set(map(str, arguments)):
            given += ["--prompt", TEXT]
        outcome = run_here(capfd, "generate", *given)
        assert outcome.code == expect, outcome
        return outcome

    return run


@pytest.fixture
def document(generate):
    """The JSON of such a run."""
    return lambda *arguments, expect=0: json.loads(generate("--json", "-", *arguments, expect=expect).out)
