"""The loop that commands share, from within: what is held of an answer, and what is said of it."""

import gc
import weakref
from collections import deque

import pytest
from command import TEXT
from triforce.cli.session.prompt import Prompt
from triforce.cli.session.session import Failed, Finished, Session, Task, Written
from triforce.cli.terminal.stopping import Stop
from triforce.offload import Engine, Sampling
from triforce.offload.batch.sequence import BatchSequence
from triforce.offload.contexts.model import ContextRequest
from triforce.tp.weights.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def engine(pair):
    return Engine.load(pair[0], draft="none", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(pair):
    return Tokenizer.load(pair[0])


class Owner:
    """Whatever an answer is for."""


def task_of(tokenizer, words, tokens=6, **options):
    prompt = Prompt(tokenizer.encode(words, True))
    return Task(prompt, ContextRequest(), Sampling(0.0), tokens, ignore_eos=True, owner=Owner(), **options)


def one_by_one(tasks):
    return lambda waits: tasks.pop(0) if tasks else None


def test_a_finished_answer_is_freed_at_once(engine, tokenizer):
    tasks = [task_of(tokenizer, TEXT[start : start + 40]) for start in range(0, 120, 40)]
    owners = [weakref.ref(task.owner) for task in tasks]
    gc.collect()
    gc.disable()
    try:
        session = Session(engine, tokenizer, max_sequences=1)
        assert sum(isinstance(event, Finished) for event in session.events(one_by_one(tasks))) == 3
        assert [owner() for owner in owners] == [None] * 3
    finally:
        gc.enable()


def test_while_the_next_task_is_waited_for_nothing_is_held_of_the_last(engine, tokenizer):
    tasks, held = [task_of(tokenizer, TEXT[start : start + 40]) for start in (0, 40)], []
    owners = [weakref.ref(task.owner) for task in tasks]

    def next_task(waits):
        if waits:
            held.append([owner() is not None for owner in owners])
        return tasks.pop(0) if tasks else None

    gc.disable()
    try:
        deque(Session(engine, tokenizer, max_sequences=1).events(next_task), maxlen=0)
    finally:
        gc.enable()
    assert held == [[True, True], [False, True], [False, False]]


def test_nothing_follows_of_a_task_that_is_ended_with_its_last_tokens(engine, tokenizer):
    task, session, seen = task_of(tokenizer, TEXT[:40]), Session(engine, tokenizer), []
    for event in session.events(one_by_one([task])):
        seen += [event] if event else []
        if isinstance(event, Written) and task.text.num_tokens == task.max_new_tokens:
            session.end(task)
    assert seen and all(isinstance(event, Written) for event in seen)


def test_what_fails_fails_alone(engine, tokenizer):
    good, bad = task_of(tokenizer, TEXT[:40]), task_of(tokenizer, TEXT[:40], tokens=10**6)
    ends = [
        event for event in Session(engine, tokenizer).events(one_by_one([bad, good])) if not isinstance(event, Written)
    ]
    errors = {event.task: str(event.error) for event in ends if isinstance(event, Failed)}
    assert [event.task for event in ends if isinstance(event, Finished)] == [good]
    assert errors.keys() == {bad} and "positions" in errors[bad]


def test_tokens_of_a_round_that_was_broken_off_are_no_part_of_the_text(engine, tokenizer, monkeypatch):
    record, recorded = BatchSequence.record, []

    def break_the_third(self, statistics):
        if len(recorded) == 2:
            raise Stop(130, "interrupted")
        recorded.append(statistics)
        record(self, statistics)

    monkeypatch.setattr(BatchSequence, "record", break_the_third)
    task, shown = task_of(tokenizer, TEXT[:40]), ""
    with pytest.raises(Stop):
        for event in Session(engine, tokenizer).events(one_by_one([task])):
            shown += event.piece if isinstance(event, Written) else ""
    assert task.sequence is not None
    token_ids = task.sequence.statistics.token_ids
    assert 2 <= len(token_ids) == task.text.num_tokens
    assert shown + task.finish_text() == task.text.text == tokenizer.decode(token_ids)


def test_nothing_is_known_of_a_task_that_an_interrupt_kept_from_being_opened(engine, tokenizer):
    asked = []
    session = Session(engine, tokenizer, interrupted=lambda: len(asked) > 0)

    def next_task(waits):
        asked.append(waits)
        return task_of(tokenizer, TEXT[:40]) if len(asked) == 1 else None

    assert not any(session.events(next_task))
    (task,) = session.tasks
    assert task.sequence is None and not task.begun and task.finish_text() == ""
