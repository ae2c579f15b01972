"""What the engine raises in the middle of a run: text that came before it is kept."""

import json

from command import TEXT, run_here
from triforce.offload import Run, Tokens


def test_failed_prefill_is_an_error_without_statistics(pair, capfd, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Run, "__next__", fail)
    outcome = run_here(capfd, "generate", "--model", pair[0], "--prompt", TEXT, "--json", "-")
    assert (outcome.code, outcome.out) == (1, "")
    assert "out of memory" in outcome.err and "written" not in outcome.err


def test_what_fails_in_the_engine_leaves_the_answers_so_far(generate, monkeypatch):
    step = Run.__next__

    def failing(self):
        event = step(self)
        if isinstance(event, Tokens) and event.round.index == 3:
            raise RuntimeError("a device is gone")
        return event

    monkeypatch.setattr(Run, "__next__", failing)
    outcome = generate("--ask", "Why?", "--ask", "How?", "--max-new-tokens", 90, "--json", "-", expect=1)
    assert all(one["new_tokens"] for one in json.loads(outcome.out)["sequences"])
    assert "a device is gone" in outcome.err
