"""Caches of sequences that have ended: what is shared with them survives runs that are broken off, restored or refused,
and whatever fails, nobody goes on from what is half there."""

import errno
import itertools
import random
import threading
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooked_disk import HookedDisk
from tiny import random_tokens, save_llama
from triforce.offload import ContextRequest, ContextStore, Ended, Engine, Progress, Request, Sampling, Tokens
from triforce.offload.batch.kept import KeptCache, _Taken, common_length
from triforce.offload.caches.full import FullCache
from triforce.offload.held import bytes_by_part
from triforce.offload.limits import Limits, ProcessMemory
from triforce.offload.system import System
from triforce.offload.transfer.device_blocks import Footprint
from triforce.tp import CapacityError
from triforce.tp.decoder import Tiling
from triforce.tp.devices import DeviceMemory

GREEDY = Sampling(temperature=0.0)
BOOK = random_tokens(700, seed=3)
LIMITS = Limits(largest_block=1024, tiling=Tiling(64, 16, 320))
"""So small that a few hundred tokens are several blocks, and are shared."""

SHARED = 640
"""Tokens of the book that two prompts share."""

QUESTIONS = {tag: random_tokens(30, seed=seed) for seed, tag in enumerate("abcd", 60)}


def asked(prompt, tag, new_tokens=6, **options):
    return Request(prompt, GREEDY, new_tokens, ignore_eos=True, tag=tag, **options)


def played(engine, *requests, on_event=lambda run, event: None, **options):
    """The sequences by their tags, once all have ended."""
    left, ended = list(requests), {}
    run = engine.run(lambda waits: left.pop(0) if left else None, **{"max_sequences": 4, "in_slices": False} | options)
    for event in run:
        if isinstance(event, Ended):
            ended[event.sequence.tag] = event.sequence
        on_event(run, event)
    return ended


def answer(engine, prompt, new_tokens=6, **options):
    return engine.generate(prompt, GREEDY, new_tokens, ignore_eos=True, **options)


def alone(engine, prompt, new_tokens=6):
    return answer(engine, prompt, new_tokens, reuse=0).token_ids


def shares(engine, resident=None):
    """Has a text and another that builds on it kept by the engine: the prompts of their next turns."""
    found = played(engine, asked([*BOOK, *QUESTIONS["a"]], "a", 30), asked([*BOOK, *QUESTIONS["b"]], "b"))
    assert found["b"].statistics.reused_tokens == SHARED
    given = {tag: [*BOOK, *QUESTIONS[tag], *found[tag].statistics.token_ids] for tag in "ab"}
    return [[*given[tag], *QUESTIONS["c"]] for tag in "ab"]


def streaming(models, **settings):
    return models.engine("llama", **{"resident": 0.0, "system": System(limits=LIMITS)} | settings)


class Broken(BaseException):
    """As Ctrl-C raises it, wherever it comes."""


@pytest.mark.parametrize("where", ["in a round", "while one is read", "before one is read"])
def test_sequences_that_share_a_book_are_broken_off_together(models, where):
    engine = streaming(models)
    rounds = []

    def breaks(sequence, share):
        if sequence.tag == "b" and share >= {"while one is read": 0.5, "before one is read": 0.0}.get(where, 2.0):
            raise Broken

    def in_a_round(tokens):
        rounds.append(tokens)
        if where == "in a round" and len(rounds) == 3:
            raise Broken
        return False

    requests = asked([*BOOK, *QUESTIONS["a"]], "a", 40), asked([*BOOK, *QUESTIONS["b"]], "b", 40, stops=in_a_round)
    with pytest.raises(Broken):
        played(engine, *requests, on_prefill=breaks)
    following = [*BOOK, *QUESTIONS["b"]]
    assert answer(engine, following).token_ids == alone(engine, following)


def test_no_memory_of_a_pass_stays_taken_once_it_was_broken_off(models):
    engine = streaming(models)

    def breaks(share):
        raise Broken

    run = engine.stream(BOOK, GREEDY, 6, on_prefill=breaks)
    with pytest.raises(Broken):
        next(run)
    assert "prefill" in {part for part, _ in engine.held()}
    engine._end_run()
    assert "prefill" not in {part for part, _ in engine.held()}


def with_more_than_a_block_open(engine):
    """A prompt that begins with the book, the run that answered it, and its cache, after a round that left as much."""
    for more in range(60):
        prompt = [*BOOK, *random_tokens(more, seed=1)]
        run = engine.stream(prompt, GREEDY, 400, ignore_eos=True)
        (kept,) = engine._kept.caches
        if any(kept.length - kept.blocks._base > kept.blocks.block_size for _ in run):
            run.close()
            return prompt, run, kept
    raise AssertionError("no round has left so much")


def test_nobody_goes_on_from_what_a_broken_pass_has_left_of_a_text_that_others_build_on(models):
    """The first pass of who builds on it sends its last block home, a layer at a time."""
    engine = streaming(models, tiers=2, budget=640, block_length=8, early_end="off")
    prompt, first, kept = with_more_than_a_block_open(engine)
    sent = []

    def send(layer, index, block, send=kept.blocks._send_home):
        sent.append(layer)
        if len(sent) == 2:
            raise Broken
        send(layer, index, block)

    kept.blocks._send_home = send
    with pytest.raises(Broken):
        played(engine, asked(QUESTIONS["a"], "a", 40), asked([*BOOK[:300], *QUESTIONS["b"]], "b"))
    del kept.blocks._send_home
    following = [*prompt, *first.statistics.token_ids, *QUESTIONS["c"]]
    assert answer(engine, following).token_ids == alone(engine, following)


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_what_could_not_be_moved_is_no_longer_built_on(models, resident, monkeypatch):
    engine = streaming(models, resident=resident)
    longer, other = shares(engine)
    move = FullCache.move_from

    def moves_half(self, source, length):
        move(self, source, length // 2)
        raise CapacityError("no memory is left")

    monkeypatch.setattr(FullCache, "move_from", moves_half)
    with pytest.raises(CapacityError, match="no memory is left"):
        answer(engine, longer, 900)
    monkeypatch.undo()
    found = answer(engine, other)
    assert found.stats["reused_tokens"] == 0
    assert found.token_ids == alone(engine, other)


def test_who_builds_on_a_text_does_not_go_on_once_less_of_it_was_restored(models, tmp_path):
    """A part of it is saved under the name that is saved to, so it is restored from there, and then it is ended."""
    ticks = itertools.count()
    system = System(clock=lambda: 0.6 * next(ticks), limits=LIMITS)  # so slow that it is asked after each slice
    engine = streaming(models, system=system, store=ContextStore(tmp_path, segment_tokens=128))
    for _ in engine.reading(BOOK, "book", interrupted=lambda: engine.contexts.saved_tokens("book") > 0):
        pass
    assert 0 < engine.contexts.saved_tokens("book") < SHARED
    _, other = shares(engine)

    def ends(run, event):
        if isinstance(event, Progress) and event.sequence.statistics.reused_tokens < SHARED:
            run.end(event.sequence)

    save = ContextRequest(save="book", required=True)
    played(engine, asked(BOOK, "n", contexts=save), on_event=ends, in_slices=True)
    found = answer(engine, other)
    assert found.token_ids == alone(engine, other)


def limited(models, tokens, answer, besides=0):
    """An engine with memory for a run over so many tokens, and for the keys and values of some `besides`."""
    system = System(limits=replace(LIMITS, process=ProcessMemory(0, 0, 0)))
    plan = models.engine("llama", system=system).plan(tokens, answer)
    memory = plan.host_total + besides * plan.request.token_bytes
    return models.engine("llama", host_memory=memory / 2**30, system=system)


def test_a_longer_turn_finds_memory_though_its_text_builds_on_another(models):
    """Beside both there is none, in place of both there is."""
    engine = limited(models, 1670, 900, besides=40)
    _, other = shares(engine)
    run = engine.stream(other, GREEDY, 900, ignore_eos=True)
    tokens = [token for _ in range(3) for token in next(run).tokens]
    assert tokens == alone(engine, other, len(tokens))


def test_memory_of_a_text_that_is_forgotten_comes_back_with_who_builds_on_it(models):
    engine = limited(models, 1610, 6, besides=40)
    kept, prompts = engine._kept, [array("i", [*BOOK, *QUESTIONS[tag]]) for tag in "ab"]
    first, _ = kept.prepare(prompts[0], engine._models.request(len(prompts[0]) + 8))
    first._filled = [len(prompts[0])] * first.config.num_layers  # as if it were read
    text, shared = kept.find(prompts[1])
    second, _ = kept.beside(prompts[1], engine._models.request(len(prompts[1]) + 8), text, shared)
    second._filled = [len(prompts[1])] * first.config.num_layers
    assert second.prefix is first
    kept.forget(prompts[0])
    kept.end(prompts[1])
    del first, second, text
    assert len(answer(engine, random_tokens(1600, seed=4)).token_ids) == 6


def test_a_next_turn_that_is_refused_drops_nothing(models):
    engine = limited(models, 1000, 6)
    for tags in ("a", "ab"):
        for tag in tags:
            answer(engine, [*QUESTIONS[tag], *BOOK[:100]])
        with pytest.raises(CapacityError):
            answer(engine, [*QUESTIONS["a"], *BOOK[:120]], 3900)
        for tag in tags:
            assert answer(engine, [*QUESTIONS[tag], *BOOK[:120]]).stats["reused_tokens"] >= 120


def test_what_is_left_of_a_request_that_was_not_read_is_dropped_first(models):
    engine = limited(models, 320, 6, besides=512 + 512 + 256)  # one that runs, one that is kept, and half of another
    prompts = {tag: random_tokens(300, seed=seed) for seed, tag in enumerate("abc", 20)}

    def ends(run, event):
        if isinstance(event, Progress) and event.sequence.tag == "b":
            run.end(event.sequence)

    long = asked(random_tokens(60, seed=2), "long", 400)
    order = [asked(prompt, tag, 20 if tag == "a" else 6) for tag, prompt in prompts.items()]
    again = asked([*prompts["a"], *QUESTIONS["a"][:8]], "a again")
    ended = played(engine, long, *order, again, on_event=ends, max_sequences=2, in_slices=True)
    assert [one.error for one in ended.values()] == [None] * 5
    assert ended["a again"].statistics.reused_tokens >= 300


class OneOfTwo:
    """Ranks, of which the other one says the least number."""

    rank, size, others = 0, 2, 0

    def __init__(self):
        self.asked = []

    def least(self, numbers):
        self.asked.append(numbers)
        return [min(number, 0) for number in numbers]


@pytest.mark.parametrize("spare", [0, 100])
def test_ranks_take_part_where_another_has_more_left_to_move(spare):
    """What did not pack on one of them has stayed on its GPU."""
    ranks, moved = OneOfTwo(), []
    decoder: Any = SimpleNamespace(ranks=ranks, device=torch.device("cpu"))
    kept = KeptCache(decoder, system=System(device_memory=lambda _: DeviceMemory(10, 100, 0)))

    class SomeBlocks:
        def __init__(self):
            self.footprint = Footprint(spare=spare)

        def offload(self, num_bytes):
            moved.append(num_bytes)
            return 0

    cache: Any = SimpleNamespace(holders=[SimpleNamespace(blocks=SomeBlocks())])
    kept.make_room([cache], lambda: 50)
    assert len(ranks.asked) == 2 and ranks.asked[1] == [10 - 50] and moved == [40]


def test_texts_that_cannot_be_saved_are_all_parted_with_when_a_run_ends(models, tmp_path):
    goes_on, tags, uses = threading.Event(), set(), []

    def hook(kind, *of):
        if kind == "write" and len(of[1]) > 5000:  # of keys and values
            goes_on.wait(30)
            raise OSError(errno.ENOSPC, "none is left")

    def on_event(run, event):
        if isinstance(event, Tokens):
            tags.add(event.sequence.tag)
        uses[:] = uses + [one.saved for one in run.live if one.saved and one.saved not in uses]

    engine = models.engine("llama", store=ContextStore(tmp_path, disk=HookedDisk(hook)))
    requests = [
        asked(random_tokens(200, seed=i), tag, 60, contexts=ContextRequest(save=f"text-{tag}", required=True))
        for i, tag in enumerate("ab")
    ]
    played(engine, *requests, on_event=on_event, interrupted=lambda: len(tags) == 2 and not goes_on.set())
    assert len(uses) == 2 and not any(use.saves for use in uses)


def test_logits_that_were_broken_off_leave_no_text_in_use(models, monkeypatch):
    engine = models.engine("llama")

    def breaks(self, layer, k, v):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(FullCache, "append", breaks)
        with pytest.raises(Broken):
            engine.logits(BOOK, [1, 2, 3])
    assert engine._kept.caches == []


def test_a_rollback_that_fails_when_a_run_is_closed_leaves_nothing_to_go_on_from(models, monkeypatch):
    engine = streaming(models)
    requests = [asked(BOOK, "a")]
    run = engine.run(lambda waits: requests.pop() if requests else None)
    assert isinstance(next(run), Progress)

    def breaks(self):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(FullCache, "break_off", breaks)
        with pytest.raises(Broken):
            run.close()
    assert run.broken
    assert answer(engine, BOOK).token_ids == alone(engine, BOOK)


def test_a_prompt_whose_keys_are_rotated_otherwise_waits_for_those_that_run(tmp_path):
    """Dynamic RoPE: beyond the original positions keys depend on the prompt's length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    save_llama(tmp_path, seed=1, rope_parameters=rope, max_position_embeddings=256)
    engine = Engine.load(tmp_path, device="cpu", dtype="float32", budget=64)
    prompts = {"a": BOOK[:60], "b": BOOK[:400], "c": BOOK[:500], "d": BOOK[:80]}
    began = []

    def on_event(run, event):
        if isinstance(event, Tokens) and event.round.index == 0:
            began.append([one.tag for one in run.live if one.state == "running"])

    ended = played(engine, *(asked(prompt, tag) for tag, prompt in prompts.items()), on_event=on_event)
    assert {tag: one.error for tag, one in ended.items()} == dict.fromkeys("abcd")
    assert began == [["a"], ["b"], ["c"], ["d"]]
    for tag, prompt in prompts.items():
        assert ended[tag].statistics.token_ids == alone(engine, prompt), tag


def test_memory_that_no_token_has_come_to_is_promised_to_who_runs_and_is_not_given_back(models, monkeypatch):
    """A CPU's system counts it as free."""
    engine = models.engine("llama")
    half, plan = engine.plan(1000).resident_kv // 2, engine.plan(2000)
    loaded = plan.weights + plan.request.limits.process.total
    first = engine.stream(BOOK[:30], GREEDY, 970, ignore_eos=True)
    available = plan.host_total - loaded + half
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    kept, request = engine._kept, engine._models.request(2000)
    assert not kept.fits(request), "the first one will take what is free"
    first.close()
    kept.end_all(broken=False)
    without = kept._plan(request, replaces=None, without=kept._droppable(None))
    assert without.request.host_bytes < available + loaded + half


def test_what_prompts_have_in_common_with_texts_is_that_of_their_tokens(models):
    """Texts that build on others, of which some are gone, are compared from where the others end."""
    engine = streaming(models)
    turns = [[*BOOK[:first], *random_tokens(60, seed=first)] for first in (40, 320, 480, 640, 690)]
    turns += [[*turn, *random_tokens(60, seed=first)] for first, turn in enumerate(turns)]
    played(engine, *(asked(turn, "") for turn in turns), max_sequences=2)
    kept = engine._kept
    text = next(text for text in kept._texts if any(one.builds_on(text) for one in kept._texts))
    prompts = [*turns, BOOK, BOOK[:330], random_tokens(50, seed=1), [], *(one.tokens for one in kept._texts)]
    for forgotten in (False, True):
        if forgotten:
            for one in kept._texts:
                one.in_use = one.builds_on(text)  # or they would go with it
            kept.forget(text.tokens)
            assert any(one.full.prefix for one in kept._texts)
        for prompt in prompts:
            found = kept.common_lengths(array("i", prompt))
            for one in kept._texts:
                pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, prompt, strict=False))
                assert found[one.full] == len(list(pairs))


def in_common(tokens, prompt):
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, prompt, strict=False))))


def test_what_is_in_common_follows_a_text_that_changes(models):
    engine = models.engine("llama")
    played(engine, asked(BOOK[:100], "a"))
    (text,) = engine._kept._texts
    prompt = [*text.tokens, *random_tokens(60, seed=1)]
    for change in (
        lambda: None,
        lambda: text.tokens.append(prompt[len(text.tokens)]),  # the next token is the prompt's
        lambda: text.tokens.append(prompt[len(text.tokens)]),
        lambda: text.tokens.__delitem__(slice(-3, None)),  # tokens of its answer are taken back,
        lambda: text.tokens.append(1 + prompt[len(text.tokens)]),  # and another one comes
        lambda: text.tokens.extend(prompt[len(text.tokens) :]),
    ):
        change()
        for asks in (prompt, prompt[:103], BOOK, prompt):
            assert engine._kept.common_lengths(array("i", asks)) == {text.full: in_common(text.tokens, asks)}
    engine._kept._empty(text)
    assert engine._kept.common_lengths(array("i", prompt)) == {text.full: 0}


def test_texts_are_compared_from_what_is_known_and_first_up_to_where_they_are_likely_to_differ():
    chance = random.Random(0)
    for _ in range(3000):
        ours, theirs, alike = (chance.randrange(100) for _ in range(3))
        some, others = array("i", [1] * ours), array("i", [1] * alike + [2] * (theirs - alike))[:theirs]
        found = min(ours, theirs, alike)
        known, likely = chance.randint(0, found), chance.randrange(120)
        assert common_length(some, others, known, likely) == found, (ours, theirs, alike, known, likely)


@pytest.mark.parametrize("resident", [None, 0.0])
def test_so_many_ended_texts_are_kept_and_the_one_that_all_build_on(models, resident):
    engine = models.engine("llama", resident=resident, system=System(limits=replace(LIMITS, kept_texts=3)))
    prompts = {tag: [*BOOK, *random_tokens(30, seed=ord(tag))] for tag in "abcdefgh"}
    ended = played(engine, *(asked(prompt, tag) for tag, prompt in prompts.items()), max_sequences=8)
    kept = engine._kept
    assert len(kept._droppable(None)) == 3
    newest = [text.tokens[: len(BOOK) + 30].tolist() for text in kept._texts[-2:]]
    assert newest == [prompts["g"], prompts["h"]]
    later = played(engine, *(asked([*BOOK, *random_tokens(30, seed=seed)], str(seed)) for seed in range(5)))
    assert all(one.statistics.reused_tokens >= SHARED for one in later.values())
    again = played(engine, asked(prompts["a"], "a"))["a"]
    assert again.statistics.token_ids == ended["a"].statistics.token_ids == alone(engine, prompts["a"])


def test_many_short_texts_push_out_no_long_one(models):
    engine = models.engine("llama", system=System(limits=replace(LIMITS, kept_texts=3)))
    long = random_tokens(1100, seed=8)
    played(engine, asked(long, "long"))
    for seed in range(6):
        played(engine, *(asked(random_tokens(40, seed=10 * seed + one), str(one)) for one in range(4)))
    again = played(engine, asked([*long, 5, 6, 7], "again"))["again"]
    assert again.statistics.reused_tokens >= 1090
    for seed in range(4):
        played(engine, *(asked(random_tokens(1050 + one, seed=seed + one), str(one)) for one in range(2)))
    assert len(engine._kept._droppable(None)) == 3, "long ones only, and still no more"


@pytest.mark.parametrize("resident", [None, 0.0])
def test_bytes_of_ended_texts_are_those_that_they_take(models, resident):
    engine = models.engine("llama", resident=resident, system=System(limits=LIMITS))
    kept, seen = engine._kept, []

    def compare(*_):
        caches = dict.fromkeys(holder for cache in kept.caches for holder in cache.holders)
        assert kept._taken_by(caches) == {one: _Taken.of(one, on_host=True) for one in caches}
        seen.append(kept.memory_bytes)

    first, second = shares(engine)
    played(engine, asked(first, "a", 40), asked(second, "b"), asked(random_tokens(200, seed=5), "c"), on_event=compare)
    compare()
    played(engine, asked([*second, *random_tokens(100, seed=6)], "b"), on_event=compare)
    assert seen and all(seen)


def test_buffers_through_which_blocks_of_a_kept_cache_stream_are_counted(models):
    engine = models.engine("llama", resident=0.0, system=System(limits=LIMITS))
    played(engine, asked(BOOK, "a"))
    (text,) = engine._kept._texts
    parts = bytes_by_part(text.full.held())
    buffers, blocks = parts["ring"] + parts["open_stretches"], text.full.blocks.placement.num_host
    assert buffers > 0 and blocks > 0 and not parts["resident_kv"]
    kv = blocks * text.full.blocks.block_size * text.full.token_bytes
    assert kv <= text.full.bytes_on_host <= 1.1 * kv
    assert engine._kept.memory_bytes == buffers + text.full.bytes_on_host


def test_tokens_of_answers_count_as_touched(models):
    """Whether one is decoded alone or beside another, with a pass for each token."""
    engine = models.engine("llama", tiers=1)
    one = engine.generate(random_tokens(40), GREEDY, 60, ignore_eos=True)
    played(engine, *(asked(random_tokens(40, seed=seed), str(seed), 60) for seed in (1, 2)))
    caches = [text.full for text in engine._kept._texts]
    assert len(caches) >= 3 and one.token_ids
    for cache in caches:
        blocks = cache.blocks
        assert cache.length >= 98
        touched = (blocks._untouched_bytes(x, cache.length) for x in blocks._layers)
        assert blocks.footprint.untouched == sum(touched)
