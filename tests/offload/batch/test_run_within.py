"""A run within: sequences that wait for memory, and what a run that was broken off in a pass leaves."""

import itertools

import pytest
from tiny import random_tokens
from triforce.offload import Ended, Progress, Request, Sampling, Tokens
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError

GREEDY = Sampling(temperature=0.0)
BOOK = random_tokens(700, seed=3)


class ShortOfMemory:
    """Makes blocks, or has no memory for them."""

    def __init__(self, most_tokens):
        self.most_tokens = most_tokens

    def __call__(self, config, placement, *args, **given):
        if placement.num_blocks * placement.block_size > self.most_tokens:
            raise CapacityError("none is left")
        return make_blocks(config, placement, *args, **given)


def played(engine, requests, on_event):
    """The sequences in the order in which they ended; `on_event(run, event, requests)` is told of each event."""
    ended = []
    run = engine.run(lambda waits: requests.pop(0) if requests else None)
    for event in run:
        if isinstance(event, Ended):
            ended.append(event.sequence)
        on_event(run, event, requests)
    return ended


def test_a_sequence_that_waited_for_memory_is_answered_though_the_first_one_has_ended(models):
    memory = ShortOfMemory(10_000)
    engine = models.engine("llama", budget=64, system=System(make_blocks=memory))
    lengths = {"first": 3, "long": 200, "short": 40}
    requests = [
        Request(random_tokens(60, seed=seed), GREEDY, lengths[tag], ignore_eos=True, tag=tag)
        for seed, tag in enumerate(lengths)
    ]
    late = Request(random_tokens(900, seed=4), GREEDY, 5, ignore_eos=True, tag="late")

    def on_event(run, event, requests):
        if isinstance(event, Tokens) and event.sequence.tag == "short" and event.round.index == 3:
            memory.most_tokens = 0
            requests.append(late)
        if isinstance(event, Ended) and event.sequence.tag == "short":
            memory.most_tokens = 10_000

    ended = played(engine, requests, on_event)
    assert [one.tag for one in ended] == ["first", "short", "late", "long"]
    assert [one.error for one in ended] == [None] * 4


def test_who_is_ended_while_it_waits_for_memory_keeps_nobody_waiting(models):
    engine = models.engine("llama", budget=64, system=System(make_blocks=ShortOfMemory(600)))
    rounds = {"running": 0, "small": 0}

    def on_event(run, event, requests):
        if not isinstance(event, Tokens):
            return
        tag = event.sequence.tag
        if tag == "running":
            rounds["running"] = event.round.index
            if event.round.index == 2:
                requests.append(Request(random_tokens(900, seed=4), GREEDY, 5, ignore_eos=True, tag="big"))
            if event.round.index == 6:
                (big,) = (one for one in run.live if one.tag == "big")
                assert big.waits_for
                run.end(big)
                requests.append(Request(random_tokens(50, seed=6), GREEDY, 5, ignore_eos=True, tag="small"))
        elif event.round.index == 0:
            rounds[tag] = rounds["running"]

    first = Request(random_tokens(60, seed=1), GREEDY, 150, ignore_eos=True, tag="running")
    played(engine, [first], on_event)
    assert 6 <= rounds["small"] < 12


def test_who_is_ended_while_another_prompt_is_read_is_not_waited_for(models):
    """Its prompt would be read for nothing, or it would be told so only when the other one has been read."""
    ticks = itertools.count()
    engine = models.engine("llama", system=System(clock=lambda: 0.6 * next(ticks)))  # a slice at a time
    requests = [Request(BOOK, GREEDY, 3, ignore_eos=True, tag="first"), Request(BOOK, GREEDY, 3, tag="waiting")]
    found = []

    def on_event(run, event, requests):
        found.append((type(event), event.sequence.tag))
        if len(found) == 1:
            run.end(next(one for one in run.live if one.tag == "waiting"))

    run = engine.run(lambda waits: requests.pop(0) if requests else None)
    for event in run:
        on_event(run, event, requests)
    assert found.index((Ended, "waiting")) < found.index((Tokens, "first")) and found[0][0] is Progress


def test_a_run_that_broke_in_a_pass_stays_broken(models):
    engine = models.engine("llama", resident=0.0, tiers=1)
    want = engine.generate(BOOK, GREEDY, 8, ignore_eos=True, reuse=0).token_ids
    engine.generate(BOOK[:300], GREEDY, 1, reuse=0)

    def breaks(share):
        if share:
            raise KeyboardInterrupt

    run = engine.stream(BOOK, GREEDY, 8, ignore_eos=True, on_prefill=breaks)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert list(run) == [] and run.batch.run.broken
    assert engine.generate(BOOK, GREEDY, 8, ignore_eos=True).token_ids == want
