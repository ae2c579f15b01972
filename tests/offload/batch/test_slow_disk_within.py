"""A disk that stands still: whoever saves or restores a text waits for it, and nobody else does."""

import errno
import itertools
import json
import math
import os
import random
import threading
import time

import pytest
from hooked_disk import HookedDisk
from spmd import run_forks
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import ContextRequest, ContextStore, Ended, Engine, Request, Sampling, Tokens
from triforce.offload.batch.reading import Reading
from triforce.offload.contexts.segments.file import SegmentFile
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError

GREEDY = Sampling(temperature=0.0)
ONE, TWO, THREE = (random_tokens(length, seed=length) for length in (90, 600, 61))
ROUNDS = 15
"""So many rounds of another answer must take place while the disk stands still."""

SYNCS = 17
"""So many syncs it takes to save `TWO` where nothing was saved before: directories, manifests and three segments."""

LIMIT_S = 10
"""After this time a disk goes on by itself: somebody else waited for it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    return root, save_llama(root, seed=1, head_dim=32)


class Still:
    """What stands still at its `at`-th step, until `go_on` is called."""

    def __init__(self, at=1):
        self.at, self.steps, self.stands, self.late = at, 0, False, False
        self._going = threading.Event()

    def step(self):
        self.steps += 1
        if self.steps == self.at:
            self.stands = True
            self.late = not self._going.wait(LIMIT_S)
            self.stands = False

    def go_on(self):
        self._going.set()

    def hook(self, kind, *_):
        if kind in ("sync", "sync_directory"):
            self.step()


def engine_of(model, tmp_path, still=None, **given):
    """An engine whose store has segments of 256 tokens, and a disk that may stand still."""
    store = ContextStore(
        tmp_path / "store", segment_tokens=256, disk=HookedDisk(still.hook if still else lambda *_: None)
    )
    engine = Engine.load(model[0], store=store, **({"device": "cpu", "dtype": "float32", "budget": 64} | given))
    assert engine.contexts
    _ = engine.contexts.fingerprint  # as a server does when it starts
    return engine


def begun(engine, new_tokens=1500, **options):
    batch = engine.batch([Request(ONE, GREEDY, new_tokens, ignore_eos=True)], in_slices=True, **options)
    next(batch)
    return batch


def played(batch, still, *, until, rounds=ROUNDS):
    """Goes on until the sequence `until` has ended. The disk goes on after so many rounds of the first sequence."""
    seen = 0
    while until >= len(batch.sequences) or batch.sequences[until].state != "ended":
        index, _ = next(batch)
        seen += index == 0 and still.stands
        if seen == rounds:
            still.go_on()
    assert not still.late and seen >= rounds, "who saves nothing went on"
    return batch.sequences[until]


def saved_then(still, later):
    """Gives a run a text to save, and the sequences of `later` as soon as the disk stands still."""
    first = [Request(TWO, GREEDY, 1, contexts=ContextRequest(save="two", required=True), tag="saved")]
    return lambda waits: first.pop() if first else later.pop() if later and still.stands else None


def check_saved(engine, name="two"):
    assert engine.contexts.store.load(name).saved == len(TWO)
    assert not any(wrong for _, wrong in engine.contexts.store.verify(name))


@pytest.mark.parametrize("at", range(1, SYNCS + 1))
def test_no_other_answer_waits_while_a_text_is_saved(model, tmp_path, at):
    still = Still(at)
    engine = engine_of(model, tmp_path, still)
    batch = begun(engine)
    contexts = ContextRequest(save="two", required=True)
    one = played(batch, still, until=batch.add(Request(TWO, GREEDY, 3, ignore_eos=True, contexts=contexts)))
    assert one.error is None and one.statistics.token_ids == greedy_oracle(model[1], TWO, 3)
    assert still.steps == SYNCS
    check_saved(engine)
    assert batch.sequences[0].is_unfinished
    text = batch.sequences[0].statistics.token_ids
    assert text == greedy_oracle(model[1], ONE, len(text), text)
    batch.close()
    result = engine.generate(TWO + THREE, GREEDY, 8, ignore_eos=True, reuse=0, contexts=ContextRequest(name="two"))
    assert result.token_ids == greedy_oracle(model[1], TWO + THREE, 8) and result.stats["reused_tokens"] == len(TWO)


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("what", ["token_ids", "read"])
def test_no_other_answer_waits_while_a_text_is_restored(model, tmp_path, monkeypatch, resident, what):
    engine_of(model, tmp_path).read(TWO, "two")
    still, whole = Still(), getattr(SegmentFile, what)

    def read(*given):
        if threading.current_thread() is not threading.main_thread() or what == "read":
            still.step()
        return whole(*given)

    monkeypatch.setattr(SegmentFile, what, read)
    batch = begun(engine_of(model, tmp_path, resident=resident))
    prompt = TWO + THREE
    asked = Request(prompt, GREEDY, 8, ignore_eos=True, contexts=ContextRequest(name="two"))
    one = played(batch, still, until=batch.add(asked))
    assert one.statistics.reused_tokens == len(TWO)
    assert one.statistics.token_ids == greedy_oracle(model[1], prompt, 8)
    batch.close()


def test_who_comes_while_the_last_answer_is_saved_begins_soon(model, tmp_path):
    still = Still(SYNCS)
    engine = engine_of(model, tmp_path, still)
    ended, later = [], [Request(THREE, GREEDY, ROUNDS, ignore_eos=True, tag="later")]
    for event in engine.run(saved_then(still, later)):
        if isinstance(event, Ended):
            ended.append(event.sequence)
            still.go_on()
    assert not still.late and [(one.tag, one.error) for one in ended] == [("later", None), ("saved", None)]
    assert ended[0].statistics.token_ids == greedy_oracle(model[1], THREE, ROUNDS)
    check_saved(engine)


@pytest.mark.parametrize("at", [2, 9])
def test_a_text_that_nobody_wants_any_more_is_left_when_the_disk_goes_on(model, tmp_path, at):
    still = Still(at)
    engine = engine_of(model, tmp_path, still)
    batch = begun(engine)
    index = batch.add(Request(TWO, GREEDY, 1, contexts=ContextRequest(save="two", required=True)))
    while not still.stands:
        next(batch)
    batch.end(index)
    one = played(batch, still, until=index)
    assert one.error is None and len(one.statistics.token_ids) == 0
    assert not list((tmp_path / "store").rglob(".*.probe"))
    again = batch.add(Request(TWO, GREEDY, 1, contexts=ContextRequest(save="two", required=True)))
    while again >= len(batch.sequences) or batch.sequences[again].state != "ended":
        next(batch)
    assert batch.sequences[again].error is None
    check_saved(engine)
    batch.close()


def test_who_could_use_what_is_just_being_saved_waits_for_it(model, tmp_path):
    """A next turn, which is saved too, goes on from all that the turn before has left. Nobody waits for 2 s or longer,
    and here five rounds never take that long."""
    still = Still(SYNCS)
    engine = engine_of(model, tmp_path, still, system=System(clock=itertools.count(0.0, 1e-4).__next__))
    turns = [TWO, [*TWO, *greedy_oracle(model[1], TWO, 3), *THREE]]
    asked = [Request(ONE, GREEDY, 1500, ignore_eos=True, tag="beside")]
    asked += [Request(turns[0], GREEDY, 3, ignore_eos=True, contexts=ContextRequest(save="one"), tag="first")]
    next_turn = Request(turns[1], GREEDY, 3, ignore_eos=True, contexts=ContextRequest(save="two"), tag="next")
    run, rounds, ended = engine.run(lambda waits: asked.pop(0) if asked else None), 0, []
    for event in run:
        if isinstance(event, Ended):
            ended.append(event.sequence)
            if event.sequence.tag == "next":
                run.end_all()
        elif isinstance(event, Tokens) and event.sequence.tag == "beside" and still.stands:
            rounds += any(one.state == "saving" for one in run.live)  # the turn before is written, but not saved
            if rounds == 1:
                asked.append(next_turn)
            if rounds == 5:
                still.go_on()
    assert not still.late and [(one.tag, one.error) for one in ended] == [("first", None), ("next", None)]
    assert ended[1].statistics.reused_tokens == len(TWO) + 2
    assert ended[1].statistics.token_ids == greedy_oracle(model[1], turns[1], 3)


def test_who_saves_another_text_does_not_wait(model, tmp_path):
    still = Still(SYNCS)
    engine = engine_of(model, tmp_path, still)
    asked = [Request(ONE, GREEDY, 4000, ignore_eos=True, tag="beside")]
    asked += [Request(TWO, GREEDY, 3, ignore_eos=True, contexts=ContextRequest(save="two"), tag="first")]
    other = [Request(THREE, GREEDY, 3, ignore_eos=True, contexts=ContextRequest(save="three"), tag="other")]
    ended = []

    def more(waits):
        # Not before the disk stands still, else it might stand still at a sync of the other text.
        if other and still.stands and any(one.state == "saving" for one in run.live):
            return other.pop()
        return asked.pop(0) if asked else None

    run = engine.run(more)
    for event in run:
        assert not any(one.waits_for for one in run.live)
        if isinstance(event, Ended):
            ended.append(event.sequence)
            if len(ended) == 2:
                run.end_all()
        elif isinstance(event, Tokens) and event.sequence.tag == "other":
            still.go_on()
    assert not still.late and {(one.tag, one.error) for one in ended} == {("first", None), ("other", None)}


def test_who_waits_for_memory_that_a_saved_text_still_takes_does_not_fail(model, tmp_path):
    still, waited = Still(SYNCS), []

    def make(*given, **named):
        if still.stands:
            waited.append(True)
            threading.Timer(0.2, still.go_on).start()
            raise CapacityError("none is left")
        return make_blocks(*given, **named)

    engine = engine_of(model, tmp_path, still, system=System(make_blocks=make))
    later = [Request(THREE, GREEDY, ROUNDS, ignore_eos=True, tag="later")]
    ended = [event.sequence for event in engine.run(saved_then(still, later)) if isinstance(event, Ended)]
    assert waited == [True] and not still.late
    assert [(one.tag, one.error) for one in ended] == [("saved", None), ("later", None)]
    assert ended[1].statistics.token_ids == greedy_oracle(model[1], THREE, ROUNDS)
    check_saved(engine)


def test_ranks_stay_together_whatever_their_disks_do(model, tmp_path):
    """Each rank's disk is slow or full by chance; sequences are saved, dropped, and ended with the run."""
    runs = 9

    def call():
        rank = int(os.environ["RANK"])
        delay, writes = [0.0], [math.inf]

        def hook(kind, *_):
            if kind in ("sync", "sync_directory"):
                time.sleep(delay[0])
            writes[0] -= kind == "write"
            if writes[0] < 0 and kind in ("create", "write", "sync"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        store = ContextStore(tmp_path / "store", segment_tokens=128, disk=HookedDisk(hook))
        engine = Engine.load(model[0], store=store, device="cpu", dtype="float32", budget=64, gpus=2)
        for seed in range(runs):
            alike, own = random.Random(seed), random.Random(2 * seed + rank)
            delay[0] = own.choice([0.0, 0.05])
            writes[0] = own.randrange(60) if alike.choice([None, 0, 1]) == rank else math.inf
            states = set()
            if rank == 0:
                asked = []
                for number in range(4):
                    tokens = random_tokens(own.randrange(60, 500), seed=own.choice([1, 2]))
                    saved = own.random() < 0.7
                    context = ContextRequest(save=f"text{seed}-{number}" if saved else None, origin="client")
                    asked.append(Request(tokens, GREEDY, own.randrange(1, 12), ignore_eos=True, contexts=context))
                last = own.choice([math.inf, math.inf, own.randrange(40)])
                run = engine.run(lambda waits, asked=asked: asked.pop() if asked else None, max_sequences=3)
                for number, _ in enumerate(run):
                    states |= {one.state for one in run.live}
                    if own.random() < 0.1 and run.live:
                        run.end(own.choice(run.live))
                    if number == last:
                        run.end_all()
            else:
                run = engine.follow()
                assert run
                for _ in run:
                    states |= {one.state for one in run.live}
            run.close()
            print(json.dumps({"rank": rank, "calls": dict(engine.target.ranks.collectives), "states": sorted(states)}))
            engine.target.ranks.share(None)
        if rank == 0:
            engine.finish()
        else:
            assert engine.follow() is None
        engine.close()

    said = [json.loads(line) for line in run_forks(call, 2).splitlines() if line.startswith("{")]
    first, second = ([one["calls"] for one in said if one["rank"] == rank] for rank in (0, 1))
    assert first == second and len(first) == runs
    assert any("saving" in one["states"] for one in said)
    store = ContextStore(tmp_path / "store")
    assert store.names() and not [name for name in store.names() if any(wrong for _, wrong in store.verify(name))]
    assert not list((tmp_path / "store").rglob(".*.probe"))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an answer"])
def test_a_long_prompt_is_read_on_while_a_text_is_restored_for_a_shorter_one(model, tmp_path, monkeypatch, beside):
    """The shorter one goes first, and the disk stands still until much of the long prompt has been read."""
    engine_of(model, tmp_path).read(TWO, "two")
    still, whole = Still(), SegmentFile.read
    monkeypatch.setattr(SegmentFile, "read", lambda *given: (still.step(), whole(*given))[1])
    monkeypatch.setattr(Reading, "due", 1)
    monkeypatch.setattr(Reading, "due_alone", 1)
    engine, long, asks = engine_of(model, tmp_path), random_tokens(2500, seed=4), TWO + THREE
    first = [Request(long, GREEDY, 3, ignore_eos=True, tag="long")]
    if beside:
        first.append(Request(ONE, GREEDY, 1500, ignore_eos=True, tag="runs"))
    later = [Request(asks, GREEDY, 3, ignore_eos=True, tag="asks", contexts=ContextRequest(name="two"))]
    shares, begun, texts = [], [], {}

    def more(waits):
        if first:
            return first.pop()
        return later.pop() if later and any(one.read_share for one in run.live) else None

    run = engine.run(more)
    for event in run:
        tag = event.sequence.tag
        if still.stands:
            shares.extend(one.read_share for one in run.live if one.tag == "long")
            if shares[-1] > shares[0] + 0.2:
                still.go_on()
        if isinstance(event, Tokens):
            begun += [tag] if event.round.index == 0 else []
            texts.setdefault(tag, []).extend(event.round.tokens)
    assert not still.late and shares, "the long prompt was read on"
    assert begun[-2:] == ["asks", "long"]
    for tag, prompt in (("long", long), ("asks", asks)):
        assert texts[tag] == greedy_oracle(model[1], prompt, 3)
