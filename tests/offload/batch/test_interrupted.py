"""A run that is interrupted, in any slice of a prefill or after any round, is whole: the next one reads only what is
new, and its text is the one it has alone."""

import itertools
import json
import random

import pytest
from spmd import run_forks
from tiny import random_tokens
from triforce.offload import Sampling
from triforce.offload.limits import Limits
from triforce.offload.system import System
from triforce.tp.decoder import Tiling

BOOK = random_tokens(900, seed=3)
NEW_TOKENS = 12
LIMITS = Limits(largest_block=1024, tiling=Tiling(64, 16, 320))
"""So small that a few hundred tokens are several blocks and several passes of a prefill, which can be set aside."""

WHERE = pytest.mark.parametrize("resident", [None, 0.0, 1e-4], ids=["all on the device", "streamed", "some of it"])


def slow_clock() -> System:
    """A machine so slow that it is asked after each slice of a prefill whether it goes on."""
    ticks = itertools.count()
    return System(clock=lambda: 0.6 * next(ticks), limits=LIMITS)


def after(count):
    """`interrupted` of a run that ends when it is asked for the `count`th time."""
    calls = itertools.count(1)
    return lambda: next(calls) >= count


def turns(models, resident, seed, ranks=1):
    """Two runs that are interrupted and one that is not, each going on from the last: of each, whether it was in its
    prefill, the tokens known before it, those taken over, and its text; and that of the last one alone."""
    chance = random.Random(seed)
    given = {"resident": resident, "tiers": chance.choice([1, 2, 3]), "gpus": ranks, "room": 200}
    engine = models.engine("llama", **given, system=slow_clock())
    prompt, known, found = BOOK[: chance.choice([500, 900])], 0, []
    sampling = chance.choice([Sampling(0.0), Sampling(0.8, seed=seed)])
    for turn in range(3):
        ends = None if turn == 2 else after(chance.randint(1, 70))
        run = engine.stream(prompt, sampling, NEW_TOKENS, ignore_eos=True, interrupted=ends)
        for _ in run:
            pass
        statistics = run.statistics
        found.append((bool(statistics.token_ids), known, statistics.reused_tokens, statistics.token_ids))
        assert (statistics.finish_reason == "length") == (len(statistics.token_ids) == NEW_TOKENS)
        if turn < 2:
            known = engine._kept.caches[-1].length
            prompt = [*prompt, *statistics.token_ids, *random_tokens(chance.randint(40, 120), seed=seed + turn)]
    want = engine.generate(prompt, sampling, NEW_TOKENS, ignore_eos=True, reuse=0).token_ids
    engine.close()
    return found, want


def check(found, want):
    for _, known, reused, _ in found:
        assert reused == known
    assert found[-1][3] == want


@WHERE
@pytest.mark.slow(keep=("streamed",))
def test_a_next_turn_after_an_interrupt_reads_only_what_is_new(models, resident):
    in_prefill = 0
    for seed in range(30):
        found, want = turns(models, resident, seed)
        check(found, want)
        for (written, before, *_), (_, known, *_) in itertools.pairwise(found):
            in_prefill += not written and known > before
    assert in_prefill > 5, "of those that were in a prefill, some must have read a part of it"


@WHERE
@pytest.mark.slow
def test_the_same_on_two_ranks(models, resident):
    models["llama"]
    for seed in range(6):
        printed = run_forks(lambda seed=seed: print(json.dumps(turns(models, resident, seed, 2)), flush=True), 2)
        first, second = (json.loads(line) for line in printed.splitlines() if line.startswith("["))
        assert first == second
        check(*first)
