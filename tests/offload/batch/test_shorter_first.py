"""A prompt that is much shorter than the rest of a long prompt does not wait for the end of that prompt's prefill."""

import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from spmd import run_forks
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import ContextRequest, ContextStore, Ended, Engine, Progress, Request, Sampling, Tokens
from triforce.offload.batch.reading import Reading
from triforce.offload.caches.full import FullCache
from triforce.offload.limits import Limits
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError
from triforce.tp.decoder import Tiling

GREEDY = Sampling(temperature=0.0)
PROMPTS = {
    "long": random_tokens(2600, seed=1),
    "short": random_tokens(500, seed=2),
    "question": random_tokens(20, seed=3),
    "runs": random_tokens(20, seed=4),
}
STREAMED = pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
BESIDE = pytest.mark.parametrize("first", [["long"], ["runs", "long"]], ids=["alone", "beside an answer"])


@pytest.fixture(autouse=True)
def one_slice_at_a_time(monkeypatch):
    """Other sequences are looked for after each slice of a prefill."""
    monkeypatch.setattr(Reading, "due", 1)
    monkeypatch.setattr(Reading, "due_alone", 1)


LIMITS = Limits(tiling=Tiling(slice_work=1))
"""Attention is divided into slices even if it takes hardly any time."""


def ticking(tick_s=0.1, **other):
    """A system on whose clock each slice takes as long as the next, so that nothing depends on how fast this machine
    is."""
    return System(clock=itertools.count(0.0, tick_s).__next__, limits=LIMITS, **other)


def request(tag, prompt=None, new_tokens=None, **more):
    new_tokens = new_tokens or (300 if tag == "runs" else 6)
    return Request(prompt or PROMPTS[tag], GREEDY, new_tokens, ignore_eos=True, tag=tag, **more)


@dataclass
class Played:
    """What a run has shown."""

    begun: list[Any] = field(default_factory=list)
    """The tags in the order of first tokens."""
    texts: dict[Any, list[int]] = field(default_factory=dict)
    ended: dict[Any, Any] = field(default_factory=dict)
    """The sequences, in the order of their ends."""

    def check(self, oracle, prompts=PROMPTS):
        for tag, tokens in self.texts.items():
            assert tokens == greedy_oracle(oracle, prompts[tag], len(tokens), tokens), tag


def play(engine, first, later, on_event=lambda run, event: None, name=lambda sequence: sequence.tag, found=None):
    """A run in which `later` requests come once the prompt of the last of the `first` ones is being read."""
    first, later, found, read = list(first), list(later), found or Played(), 0

    def more(waits):
        if first:
            return first.pop(0)
        return later.pop(0) if later and (read > 2 or waits) else None

    run = engine.run(more)
    for event in run:
        tag = name(event.sequence)
        if isinstance(event, Tokens):
            found.texts.setdefault(tag, []).extend(event.round.tokens)
            if event.round.index == 0:
                found.begun.append(tag)
        elif isinstance(event, Ended):
            found.ended[tag] = event.sequence
        elif not first:
            read += 1
        on_event(run, event)
    return found


@BESIDE
@pytest.mark.parametrize("short", ["short", "question"])
@STREAMED
def test_it_is_answered_before_and_no_text_changes(models, resident, short, first):
    found = play(models.engine("llama", resident=resident, system=ticking()), map(request, first), [request(short)])
    assert found.begun == [*first[:-1], short, "long"]
    found.check(models["llama"][1])
    assert len(found.texts) == len(first) + 1


@pytest.fixture
def read(monkeypatch):
    """The tags of the prompts of which slices are read, one for each look for others."""
    tags, go_on = [], Reading.go_on

    def noted(reading, *args, **more):
        tags.append(reading.sequence.tag)
        return go_on(reading, *args, **more)

    monkeypatch.setattr(Reading, "go_on", noted)
    return tags


def test_nothing_more_of_the_long_prompt_is_read_before_it(models, read):
    joins, first, found = [], [request("long")], Played()

    def more(waits):
        if first:
            return first.pop()
        if len(read) < 3 or joins:
            return None
        joins.append(len(read))
        return request("short")

    for event in models.engine("llama", system=ticking()).run(more):
        if isinstance(event, Tokens):
            found.texts.setdefault(event.sequence.tag, []).extend(event.round.tokens)
    assert read[joins[0]] == "short" and read.count("long") > joins[0]
    found.check(models["llama"][1])


def test_slices_are_read_however_many_join_and_leave(models, read):
    """One request after the other joins, and is no longer wanted before the next look."""
    first, number = [request("long")], itertools.count()

    def more(waits):
        for sequence in run.live:
            if sequence.tag != "long":
                run.end(sequence)
        if first:
            return first.pop()
        tag = next(number)
        assert tag < 200, "the long prompt is not read on"
        return request(tag, [7], 1) if tag % 2 == 0 else None  # `None` says that there is no other at this look

    run = models.engine("llama", system=ticking()).run(more)
    for _ in run:
        if read.count("long") > 20:
            run.end_all()
            break


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "qwen3-next", "qwen3-moe"])
@STREAMED
@pytest.mark.slow(keep=("resident-qwen3-next", "streamed-gemma3"))
def test_so_it_is_in_families_with_windows_states_and_experts(models, resident, family):
    found = play(models.engine(family, resident=resident, system=ticking()), [request("long")], [request("short")])
    assert found.begun == ["short", "long"]
    found.check(models[family][1])


@BESIDE
def test_the_long_prompt_is_read_on_however_many_short_ones_come(models, first):
    """Each of three clients asks again as soon as it has its answer. The long prompt gets as much time as they."""
    waiting, asks, asked, ended = (
        [request(tag, new_tokens=2000 if tag == "runs" else 1) for tag in first],
        [0, 1, 2],
        0,
        [],
    )

    def more(waits):
        nonlocal asked
        if waiting:
            return waiting.pop(0)
        asked += bool(asks)
        assert asked < 200, "the long prompt is not read on"
        return request(asks.pop(), random_tokens(5, seed=asked), 1) if asks else None

    run = models.engine("llama", system=ticking()).run(more)
    for event in run:
        if isinstance(event, Ended):
            ended.append(event.sequence.tag)
            if event.sequence.tag == "long":
                run.end_all()
            else:
                asks.append(event.sequence.tag)
    assert ended[-1] == "long" and len(ended) > 4, "short ones went first, and the long one came, too"


def test_a_prompt_of_more_than_half_of_what_is_left_waits(models):
    found = play(
        models.engine("llama", system=ticking()), [request("long")], [request("more", random_tokens(1600, seed=5))]
    )
    assert found.begun == ["long", "more"]


def test_a_question_about_the_text_that_is_being_read_waits_for_it(models):
    """It would read the same text."""
    asks = [*PROMPTS["long"], *random_tokens(9, seed=5)]
    found = play(models.engine("llama", system=ticking()), [request("long", new_tokens=60)], [request("asks", asks)])
    assert found.begun == ["long", "asks"]
    assert found.ended["asks"].statistics.reused_tokens >= len(PROMPTS["long"]) - 8
    found.check(models["llama"][1], PROMPTS | {"asks": asks})


@STREAMED
def test_what_a_running_answer_begins_with_is_shared_by_both(models, resident):
    book = random_tokens(1100, seed=6)
    prompts = {"runs": [*book, 1], "long": [*book, *random_tokens(1700, seed=7)], "short": [*book, 2, 3, 4]}
    first, short = [request(tag, prompts[tag]) for tag in ("runs", "long")], request("short", prompts["short"])
    found = play(models.engine("llama", resident=resident, system=ticking()), first, [short])
    assert found.begun == ["runs", "short", "long"]
    assert min(found.ended[tag].statistics.reused_tokens for tag in ("short", "long")) >= 1000
    found.check(models["llama"][1], prompts)


@STREAMED
def test_nothing_is_shared_that_the_long_prompt_has_itself(models, resident):
    """Some layers may have moved it already."""
    engine, book = models.engine("llama", resident=resident, system=ticking()), random_tokens(1100, seed=6)
    engine.generate([*book, 1], GREEDY, 1)
    prompts = {"long": [*book, *random_tokens(2900, seed=7)], "short": [*book[:1030], 2, 3, 4]}
    found = play(engine, [request("long", prompts["long"])], [request("short", prompts["short"])])
    assert found.begun == ["short", "long"]
    assert found.ended["long"].statistics.reused_tokens >= 1000 > found.ended["short"].statistics.reused_tokens
    found.check(models["llama"][1], prompts)


def test_a_prompt_that_is_to_be_saved_waits(models, tmp_path):
    def saves(name):
        return request(name, contexts=ContextRequest(save=name))

    engine = models.engine("llama", store=ContextStore(tmp_path), system=ticking())
    found = play(engine, [saves("long")], [saves("short"), request("question")])
    assert found.begun == ["question", "long", "short"]
    assert [one.error for one in found.ended.values()] == [None] * 3 and len(engine.contexts.store.names()) == 2
    found.check(models["llama"][1])


@pytest.mark.parametrize("whose", ["long", "short"])
@BESIDE
def test_either_may_be_ended_meanwhile(models, whose, first):
    def on_event(run, event):
        if isinstance(event, Progress) and event.sequence.tag == "short":
            run.end(next(one for one in run.live if one.tag == whose))

    engine, oracle = models.engine("llama", system=ticking()), models["llama"][1]
    found = play(engine, map(request, first), [request("short")], on_event)
    assert set(found.ended) == {*first, "short"} and whose not in found.texts
    found.check(oracle)
    again = engine.generate(PROMPTS["long"], GREEDY, 6, ignore_eos=True)
    assert again.token_ids == greedy_oracle(oracle, PROMPTS["long"], 6)


def test_a_run_that_ends_meanwhile_leaves_what_can_be_gone_on_from(models):
    engine, long = models.engine("llama", system=ticking()), PROMPTS["long"]
    engine.generate([*long[:1100], 1], GREEDY, 1)
    found = play(
        engine,
        [request("long")],
        [request("short")],
        lambda run, event: event.sequence.tag == "short" and run.end_all(),
    )
    assert not found.texts
    again = engine.generate(long, GREEDY, 6, ignore_eos=True)
    assert again.token_ids == greedy_oracle(models["llama"][1], long, 6)
    assert again.stats["reused_tokens"] >= 1024


@STREAMED
def test_one_that_fails_changes_no_other(models, resident, monkeypatch):
    append, failed = FullCache.append, []

    def fail_once(cache, layer, k, v):
        if layer == 1 and cache.capacity < 1000 and not failed:
            failed.append(cache)
            raise CapacityError("none is left")
        return append(cache, layer, k, v)

    monkeypatch.setattr(FullCache, "append", fail_once)
    found = play(models.engine("llama", resident=resident, system=ticking()), [request("long")], [request("short")])
    assert failed and found.ended["short"].error == "none is left" and found.ended["long"].error is None
    assert list(found.texts) == ["long"]
    found.check(models["llama"][1])


def test_without_memory_for_both_it_waits_until_the_long_prompt_is_read(models):
    """And not until its answer is complete."""

    def make(config, placement, *args, **given):
        if placement.capacity < 1000 and "long" not in found.begun:
            raise CapacityError("none is left")
        return make_blocks(config, placement, *args, **given)

    def on_event(run, event):
        waited.update(one.waits_for for one in run.live if one.tag == "short" and one.waits_for)
        lengths.setdefault(event.sequence.tag, len(found.texts.get("long", ())))

    found, waited, lengths = Played(), set(), {}
    engine = models.engine("llama", system=ticking(make_blocks=make))
    play(engine, [request("long", new_tokens=100)], [request("short")], on_event, found=found)
    assert found.begun == ["long", "short"] and waited == {"memory: none is left"}
    assert lengths["short"] < 10
    found.check(models["llama"][1])


def run_on_ranks(root, resident):
    tick_s = (0.1, 0.37)[int(os.environ["RANK"])]  # so that no rank decides by its own clock
    where = {"device": "cpu", "dtype": "float32", "gpus": 2}
    engine = Engine.load(root / "target", root / "draft", budget=64, resident=resident, system=ticking(tick_s), **where)
    lengths = {len(prompt): tag for tag, prompt in PROMPTS.items() if tag != "runs"}
    first, later = [request("long")], [request("short"), request("question")]
    found = play(engine, first, later, name=lambda sequence: lengths.get(sequence.statistics.prompt_tokens))
    print(json.dumps({"begun": found.begun, "texts": found.texts}), flush=True)
    engine.close()


@STREAMED
@pytest.mark.slow(keep=("resident",))
def test_two_ranks_do_the_same(tmp_path, resident):
    model = save_family(tmp_path / "target", "llama-tied", seed=1, head_dim=32)
    save_llama(tmp_path / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    printed = run_forks(lambda: run_on_ranks(tmp_path, resident), 2)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    texts = {tag: greedy_oracle(model, PROMPTS[tag], 6) for tag in ("question", "short", "long")}
    assert [report["texts"] for report in reports] == [texts, texts]
    assert all(report["begun"][-1] == "long" for report in reports)


def test_what_is_left_of_a_prompt_that_is_saved_segment_by_segment(models, tmp_path):
    """It has several passes. A prompt of nearly half of what is left still goes first."""

    def more(waits):
        if first:
            return first.pop()
        for one in run.live if later else ():
            if one.active_or_none and one.active.full.length >= 2048 and (1 - one.read_share) * len(prompt) > 900:
                return later.pop()
        return None

    prompt = random_tokens(3900, seed=8)
    first = [request("long", prompt, contexts=ContextRequest(save="text"))]
    later, begun = [request("short", random_tokens(400, seed=9))], []
    engine = models.engine("llama", store=ContextStore(tmp_path, segment_tokens=1024), system=ticking())
    run = engine.run(more)
    for event in run:
        if isinstance(event, Tokens) and event.round.index == 0:
            begun.append(event.sequence.tag)
    assert begun == ["short", "long"]
