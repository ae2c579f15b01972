"""A run within: sequences that wait for memory, what next turns of conversations go on from, and what a run that was
broken off in a pass leaves."""

import itertools
import json

import pytest
from spmd import run_forks
from tiny import random_tokens
from triforce.offload import Ended, Progress, Request, Sampling, Tokens
from triforce.offload.limits import Limits
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError
from triforce.tp.decoder import Tiling

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
    ticks = itertools.count()  # each slice takes as long as the next
    system = System(make_blocks=ShortOfMemory(600), clock=lambda: 0.001 * next(ticks))
    engine = models.engine("llama", budget=64, system=system)
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
    assert 6 <= rounds["small"] < 12, rounds


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


LIMITS = Limits(largest_block=1024, tiling=Tiling(64, 16, 320))
"""So small that a few hundred tokens are several blocks, and are shared."""

NEW = 30
"""Tokens of a question."""


class Conversations:
    """Each goes on with its next turn as soon as an answer is there, beside one long answer, which began first."""

    def __init__(self, engine, texts, turns):
        self.engine, self.turns = engine, turns
        self.apart = len(set(map(tuple, texts.values()))) > 1  # else all begin before the first one's cache is free
        self.prompts = {tag: [*text, *random_tokens(NEW, seed=50 + i)] for i, (tag, text) in enumerate(texts.items())}
        self.done = dict.fromkeys(texts, 0)
        self.waiting = [Request(BOOK, GREEDY, 350, ignore_eos=True, tag="long"), *map(self.request, texts)]
        self.known = dict.fromkeys(texts, 0)
        self.asked, self.found, self.last = [], [], "long"

    def request(self, tag):
        return Request(self.prompts[tag], GREEDY, 5, ignore_eos=True, tag=tag)

    def play(self):
        """Of each turn but the first ones the tokens that were known before, and those that were taken over."""
        source = lambda waits: self.waiting.pop(0) if self.waiting else None  # noqa: E731
        for event in self.engine.run(source, max_sequences=4, in_slices=self.apart):
            tag, sequence = event.sequence.tag, event.sequence
            if not isinstance(event, Ended):
                continue
            assert not sequence.error
            self.last = tag
            if tag == "long":
                continue
            statistics = sequence.statistics
            self.asked.append((self.prompts[tag], statistics.token_ids))
            if self.done[tag]:
                self.found.append((self.known[tag], statistics.reused_tokens))
            self.done[tag] += 1
            written = [*self.prompts[tag], *statistics.token_ids]
            self.known[tag] = len(written) - 1  # the last token is known, its keys and values are not
            self.prompts[tag] = [*written, *random_tokens(NEW, seed=90 + len(self.asked))]
            if self.done[tag] < self.turns:
                self.waiting.append(self.request(tag))
        return self.found

    def check(self):
        """Each text is the one it has alone."""
        for prompt, tokens in self.asked:
            assert tokens == self.engine.generate(prompt, GREEDY, len(tokens), ignore_eos=True, reuse=0).token_ids


def converse(models, resident, texts, ranks=1, turns=3):
    engine = models.engine("llama", resident=resident, gpus=ranks, system=System(limits=LIMITS))
    conversations = Conversations(engine, texts, turns)
    if engine.target.ranks.rank:
        while (run := engine.follow()) is not None:
            for _ in run:
                pass
    else:
        conversations.play()
        conversations.check()
        engine.finish()
    engine.close()
    return conversations


SEVERAL = {
    "each its own text": {tag: random_tokens(300, seed=seed) for seed, tag in enumerate("abc", 20)},
    "one text": dict.fromkeys("abc", BOOK[:500]),
    "the text of the long one": dict.fromkeys("abc", BOOK),
}


@pytest.mark.parametrize("texts", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_each_conversation_goes_on_from_its_own_tokens_beside_others(models, resident, texts):
    conversations = converse(models, resident, texts)
    assert conversations.last == "long" and len(conversations.found) == 6
    assert all(known == reused for known, reused in conversations.found)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_so_it_does_on_two_ranks(models, resident):
    models["llama"]

    def call():
        found = converse(models, resident, SEVERAL["the text of the long one"], 2, turns=2).found
        print(json.dumps(found), flush=True)

    printed = run_forks(call, 2)
    found = max(json.loads(line) for line in printed.splitlines() if line.startswith("["))
    assert len(found) == 3 and all(known == reused for known, reused in found)


def test_what_has_ended_makes_way_for_what_begins_the_oldest_first(models):
    """A request that needs the memory neither waits nor is refused."""
    sizes = models.engine("llama", budget=64)
    alone, large = (sizes.plan(length).host_total for length in (340, 1610))
    memory = large + sizes.plan(460).kv + 2 * (alone - sizes.plan(20).host_total)
    engine = models.engine("llama", budget=64, host_memory=memory / 2**30)
    prompts = {tag: random_tokens(300, seed=seed) for seed, tag in enumerate("abc", 20)}
    order = [*prompts.items(), ("large", random_tokens(1600, seed=9)), ("c", prompts["c"]), ("a", prompts["a"])]
    requests = [Request(random_tokens(60, seed=2), GREEDY, 400, ignore_eos=True, tag="long")]
    requests += [Request(prompt, GREEDY, 5, ignore_eos=True, tag=tag) for tag, prompt in order]
    ended, waited = [], []
    run = engine.run(lambda waits: requests.pop(0) if requests else None, max_sequences=2)
    for event in run:
        waited += [one.tag for one in run.live if one.waits_for]
        if isinstance(event, Ended):
            ended.append(event.sequence)
    assert [one.error for one in ended] == [None] * 7 and ended[-1].tag == "long" and not waited
    reused = [one.statistics.reused_tokens for one in ended]
    assert reused == [0, 0, 0, 0, 292, 0, 0], "what was used last has stayed, what was used first has not"


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
