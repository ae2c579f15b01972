"""The drafting tiers' caches of a sequence that joins: filled before the first round for which anything may be drafted,
and with no effect on any text."""

import random
import weakref
from typing import Any

import pytest
from tiny import random_tokens, save_family
from triforce.offload import Ended, Engine, Request, Sampling, Tokens
from triforce.offload.batch.sequence import ActiveSequence
from triforce.offload.batch.sequence_setup import SequenceSetup
from triforce.offload.limits import Limits
from triforce.offload.planning.cost_model import PassTimes
from triforce.offload.speculation.control import DraftControl
from triforce.offload.speculation.distribution import SequencesFailed
from triforce.offload.speculation.refresh import RetrievalWork, next_work
from triforce.offload.speculation.tiers import Tier
from triforce.offload.system import System
from triforce.tp.decoder import Tiling

GREEDY = Sampling(temperature=0.0)
LIMITS = Limits(largest_block=1024, tiling=Tiling(64, 16, 320))
BOOK = random_tokens(400, seed=3)
QUESTIONS = [random_tokens(5 + number, seed=number) for number in range(6)]
PROMPTS = [*([*BOOK, *question] for question in QUESTIONS), *QUESTIONS]


def decides(monkeypatch, drafts):
    """Has what is drafted, for the full cache's tier and the one below, be what `drafts()` says each time."""

    def by_time(control, step, most):
        tokens, probe = drafts() and min(3, most), None
        if control.may_skip_retrieval is not None:
            control.retrieval_work = next_work(control.last_retrieval_work, bool(tokens), not tokens)
            probe = 0 if control.retrieval_work is RetrievalWork.REBUILD else None
        return tokens, 1.0, probe

    monkeypatch.setattr(DraftControl, "_by_time", by_time)


def noting_fills(monkeypatch):
    """The sequences whose drafting caches are filled from here on."""
    filled, real = [], ActiveSequence.fill_drafting_caches

    def noted(sequence, **given):
        filled.append(sequence)
        real(sequence, **given)

    monkeypatch.setattr(ActiveSequence, "fill_drafting_caches", noted)
    return filled


def texts(engine, prompts, joins, new_tokens=10, most=4):
    """What is written after these prompts, each of which joins where `joins()`, or where nobody runs; by its index."""
    left, found = list(enumerate(prompts)), dict[int, Any]()

    def source(waits):
        if left and (waits or joins()):
            number, prompt = left.pop(0)
            return Request(prompt, GREEDY, new_tokens, ignore_eos=True, tag=number)
        return None

    for event in engine.run(source, max_sequences=most):
        if isinstance(event, Ended):
            assert event.sequence.error is None
            found[event.sequence.tag] = event.sequence.statistics.token_ids
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize("settings", [{}, {"resident": 0.0}], ids=["resident", "streamed"])
def test_texts_do_not_depend_on_when_anything_is_drafted(models, settings, monkeypatch):
    rng = random.Random(7)
    engine = models.engine("llama", **{"system": System(limits=LIMITS)} | settings)
    alone = [texts(engine, [prompt], lambda: True)[0] for prompt in PROMPTS]
    for often in (0.1, 0.5, 0.9) * 4:
        decides(monkeypatch, lambda often=often: 3 * (rng.random() < often))
        order = rng.sample(range(len(PROMPTS)), 7)
        found = texts(engine, [PROMPTS[i] for i in order], lambda: rng.random() < 0.4)
        assert found == [alone[i] for i in order]


def test_a_prompt_whose_windows_do_not_reach_what_it_shares_is_read_beside_another(tmp_path):
    """In 16 bits, where keys and values stream: of what is shared no layer sees anything any more."""
    save_family(tmp_path, "mistral-window", head_dim=32, hidden_size=64, max_position_embeddings=4096)
    limits = Limits(largest_block=1024, tiling=Tiling(512, 256, 1024))
    given = {"device": "cpu", "dtype": "bfloat16", "resident": 0.0, "tiers": 1, "system": System(limits=limits)}
    engine = Engine.load(tmp_path, "none", **given)
    book = random_tokens(1100, seed=3)
    prompts = [[*book, *random_tokens(200, seed=5)], [*book, *random_tokens(500, seed=6)]]
    alone = [engine.generate(prompt, GREEDY, 10, ignore_eos=True, reuse=0).token_ids for prompt in prompts]
    assert texts(engine, prompts, lambda: True) == alone


def test_an_answer_that_nothing_is_drafted_for_fills_no_cache_for_it(models, monkeypatch):
    engine, filled = models.engine("llama"), noting_fills(monkeypatch)
    decides(monkeypatch, lambda: 3)
    alone = [texts(engine, [prompt], lambda: True)[0] for prompt in PROMPTS[:3]]
    assert len(filled) == 3
    filled.clear()
    decides(monkeypatch, lambda: 0)
    assert texts(engine, PROMPTS[:3], lambda: True) == alone
    assert not filled


@pytest.mark.parametrize(("seconds", "fills"), [(1e3, False), (0.0, None)])
def test_short_answers_fill_no_cache_where_that_takes_longer_than_they_do(models, monkeypatch, seconds, fills):
    engine, filled = models.engine("llama"), noting_fills(monkeypatch)
    monkeypatch.setattr(SequenceSetup, "note_filling", lambda setup, took: None)
    monkeypatch.setattr(PassTimes, "filling", lambda times: seconds)
    alone = [engine.generate(prompt, GREEDY, 10, ignore_eos=True).token_ids for prompt in PROMPTS[:3]]
    filled.clear()
    assert texts(engine, PROMPTS[:3], lambda: True) == alone
    assert fills is None or bool(filled) == fills


def test_sequences_that_follow_others_in_a_run_go_on_from_what_those_have_measured(models):
    """Several that begin together; those of a much longer text, and one alone, begin anew."""
    engine, begun = models.engine("llama"), set()
    long = [random_tokens(3000, seed=5), random_tokens(3000, seed=6)]
    groups = [PROMPTS[:2], PROMPTS[1:3], long, PROMPTS[:2], PROMPTS[:1]]
    left = [(i, prompt) for i, group in enumerate(groups) for prompt in group]

    def source(waits):
        if not left or (not waits and left[0][0] not in begun):
            return None
        group, prompt = left.pop(0)
        begun.add(group)
        return Request(prompt, GREEDY, 6, ignore_eos=True, tag=group)

    run = engine.run(source, max_sequences=4)
    controls = {event.sequence.tag: run.tiers[0].control for event in run if isinstance(event, Ended)}
    assert controls[0] is controls[1] and len({id(control) for control in controls.values()}) == 4


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("more", ["", ",lookup"])
def test_a_later_run_of_several_goes_on_from_what_an_earlier_one_measured_and_keeps_nothing_else_of_it(models, more):
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 64}
    engine, caches = Engine.load(models["llama"][0], f"{models.root / 'draft'}{more}", **given), []

    def control(prompts, tiers=None):
        batch = engine.batch([Request(prompt, GREEDY, 6, ignore_eos=True) for prompt in prompts], tiers=tiers)
        for _ in batch:
            caches.extend(weakref.ref(one.active.full) for one in batch.sequences if one.active_or_none)
        return batch.run.tiers[0].control

    first = control(PROMPTS[:3])
    assert control(PROMPTS[:1]) is not first  # one alone
    assert control(PROMPTS[3:5]) is first
    assert control(PROMPTS[:3], tiers=1) is not first
    long = [random_tokens(3000, seed=seed) for seed in (5, 6)]
    assert control(long) is not first
    engine.generate(QUESTIONS[0], GREEDY, 1)
    engine._kept.forget_all()
    assert caches and {cache() for cache in caches} <= {None, *engine._kept.caches}


def test_a_round_that_was_broken_off_before_caches_were_filled_leaves_them_to_the_next(models, monkeypatch):
    """Also where lengths are chosen before that one, as a prompt was read; else the first draft would read all of the
    text, into a cache that grows."""
    engine, step, failed, rooms = models.engine("llama"), Tier.step, list[Any](), set()
    alone = [texts(engine, [prompt], lambda: True)[0] for prompt in PROMPTS[:2]]
    left, drafts = [0, 1], [0]

    def breaks_off_once(tier, sequences, limits, **given):
        emitted = step(tier, sequences, limits, **given)
        if tier.control.retrieval_work is RetrievalWork.REBUILD and not failed:
            failed.append(sequences[1])
            tier.control.choose_lengths(1)
            raise SequencesFailed("broken off", failed)
        return emitted

    def source(waits):
        number = left.pop(0) if left else None
        return number if number is None else Request(PROMPTS[number], GREEDY, 10, ignore_eos=True, tag=number)

    monkeypatch.setattr(Tier, "step", breaks_off_once)
    decides(monkeypatch, lambda: drafts[0])
    run, found = engine.run(source, max_sequences=4), dict[int, Any]()
    for event in run:
        if isinstance(event, Ended):
            found[event.sequence.tag] = event.sequence.error, event.sequence.statistics.token_ids
        for retrieval in [one.active.retrieval for one in run.live if one.active_or_none]:
            rooms |= {keys.shape[1] for keys, _ in retrieval._buffers} if retrieval else set()
        drafts[0] = 3 * (run.rounds_done >= 3)
    assert found[0] == (None, alone[0]) and found[1][0] == "broken off"
    assert 0 < len(found[1][1]) < 10 and found[1][1] == alone[1][: len(found[1][1])]
    assert len(rooms) == 1, "a cache has grown"


@pytest.mark.parametrize(("added", "stays"), [(300, True), (3000, False)])
def test_a_budget_that_grows_with_the_text_leaves_the_caches_of_the_turn_before(tmp_path_factory, added, stays):
    """As long as hardly more is planned, the budget stays with them; then both are new."""
    root = tmp_path_factory.mktemp("turns")
    save_family(root / "target", "llama", seed=1, max_position_embeddings=32768)
    save_family(root / "draft", "llama", seed=9)
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", block_length=4, draft_length=2)
    engine._kept.room = 4096  # as a conversation has
    book, met = random_tokens(9000, seed=3), list[Any]()
    prompts = [book, [*book, *random_tokens(added, seed=4)]]

    def source(waits):
        return Request(prompts.pop(0), GREEDY, 8, ignore_eos=True) if waits and prompts else None

    for event in engine.run(source):
        if isinstance(event, Tokens) and event.round.index == 1:
            met.append((event.sequence.active.retrieval, event.sequence.active.plan.budget))
    (before, first), (after, second) = met
    assert (before is after) == stays == (first == second)
