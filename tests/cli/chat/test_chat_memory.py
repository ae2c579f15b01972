"""Questions that memory does not suffice for, as the engine finds out: others are answered, on one rank and on two."""

import io
import json
import os
import sys

import pytest
from command import run_here
from triforce.cli.app import run
from triforce.offload.batch.kept import KeptCache
from triforce.offload.batch.reading import Reading
from triforce.offload.speculation.tiers import Tier
from triforce.tp.errors import CapacityError


def test_trim_makes_room_in_memory_too(pair, capfd, monkeypatch):
    prepare, most = KeptCache.prepare, 60

    def prepare_with_little_memory(self, prompt, *given, **named):
        if len(prompt) > most:
            raise CapacityError("a context of so many tokens needs more")
        return prepare(self, prompt, *given, **named)

    monkeypatch.setattr(KeptCache, "prepare", prepare_with_little_memory)
    lines = "Why?\nHow?\nWhere?\nWhen?\n"

    def chat(lines, *arguments, expect=0):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        outcome = run_here(capfd, "chat", *fixed_for(pair), "--max-new-tokens", 8, *arguments)
        assert outcome.code == expect, outcome.err
        return outcome

    assert "error: a context of so many tokens needs more" in chat(lines, expect=1).err
    trimmed = chat(lines, "--trim", "--json", "-")
    assert "dropped, to make room: Why?" in trimmed.err and len(json.loads(trimmed.out)) == 4
    most = 5
    assert "error: a context of so many tokens needs more" in chat("Why?\n", "--trim", expect=1).err


def fixed_for(pair):
    return "--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32"


@pytest.mark.slow
def test_several_ranks_go_on_after_a_question_that_memory_does_not_suffice_for(pair):
    from spmd import run_forks

    def rank():
        given = KeptCache.prepare

        def little(self, prompt, *rest, **named):
            if len(prompt) > 100:
                raise CapacityError("a context of so many tokens needs more")
            return given(self, prompt, *rest, **named)

        KeptCache.prepare = little
        lines = f"Why?\n{'how ' * 40}\nWhere?\n"
        sys.stdin = io.TextIOWrapper(io.BytesIO(lines.encode()))
        code = run([str(argument) for argument in ("chat", *fixed_for(pair), "--max-new-tokens", 4)])
        assert code == (0 if os.environ["RANK"] == "1" else 1)

    assert len(run_forks(rank, 2, 60).split()) >= 2


@pytest.mark.parametrize("where", ["prefill", "round"])
@pytest.mark.slow
def test_several_ranks_end_if_memory_runs_out_within_a_pass(pair, tmp_path, where):
    """The other rank may wait inside the pass: it cannot take part in the next question, nor in the same one again."""
    from spmd import run_forks

    def rank():
        of_class, name = {"prefill": (Reading, "go_on"), "round": (Tier, "step")}[where]
        given, first = getattr(of_class, name), os.environ["RANK"] == "0"

        def little(self, *rest, **named):
            sequence = self.sequence if where == "prefill" else rest[0][0]
            if first and len(sequence.context) > 60:
                raise CapacityError("memory ran out in this pass")
            return given(self, *rest, **named)

        setattr(of_class, name, little)
        lines = f"Why?\n{'how ' * 40}\nWhere?\n"
        sys.stdin = io.TextIOWrapper(io.BytesIO(lines.encode()))
        arguments = "chat", *fixed_for(pair), "--trim", "--max-new-tokens", 4, "--json", tmp_path / "turns.json"
        code = run([str(argument) for argument in arguments])
        print(f"rank {os.environ['RANK']} ended with {code}", flush=True)
        os._exit(0)

    said = run_forks(rank, 2, 60)
    assert "rank 0 ended with 1" in said and "rank 1 ended with 69" in said
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert turns[0]["question"] == "Why?" and "Where?" not in [turn["question"] for turn in turns]
