"""A disk that stands still: whoever saves or restores a text waits for it, and nobody else does."""

import threading

import pytest
from hooked_disk import HookedDisk
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import ContextRequest, ContextStore, Ended, Engine, Request, Sampling
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

LIMIT_S = 30
"""After this time a disk goes on by itself: somebody else waited for it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    return root, save_llama(root, seed=1, head_dim=32)


class Still:
    """What stands still at its `at`-th step, until `go_on` is called."""

    def __init__(self, at=1):
        self.left, self.stands, self.late = at, False, False
        self._going = threading.Event()

    def step(self):
        self.left -= 1
        if self.left == 0:
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
    check_saved(engine)
    assert batch.sequences[0].is_unfinished
    text = batch.sequences[0].statistics.token_ids
    assert text == greedy_oracle(model[1], ONE, len(text))
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


def test_who_comes_while_the_last_answer_is_saved_begins_at_once(model, tmp_path):
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
    for _ in range(3):
        next(batch)
    again = batch.add(Request(TWO, GREEDY, 1, contexts=ContextRequest(save="two", required=True)))
    played(batch, still, until=index)
    assert batch.sequences[index].error is None
    while again >= len(batch.sequences) or batch.sequences[again].state != "ended":
        next(batch)
    failure = batch.sequences[again].failure
    assert failure is None or "being saved" in str(failure), failure  # the first one still had the name
    batch.close()
    engine.read(TWO, "two")
    check_saved(engine)


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
