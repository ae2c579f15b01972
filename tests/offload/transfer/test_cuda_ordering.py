"""The streaming path in every order that CUDA allows: nothing is read before it is there or overwritten while in use.

The whole campaign, with 10,000 random histories: `python tests/support/simulator/simulated_runs.py`.
"""

import threading
import time

import mutations as m
import pytest
import torch
from cuda_simulator import Race, Simulator
from profiles import profile_name
from second_judge import JudgedSimulator
from simulated_runs import make_decoders, play
from triforce.offload import Sampling
from triforce.offload.transfer import cuda_link, host_blocks, staging, streamed_blocks
from triforce.offload.transfer.link import LinkError, ThreadLink
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.errors import CapacityError

GREEDY = Sampling(temperature=0.0)

RARE = (0, 1, 3, 15, 26, 13, 282)
"""Histories that need the rarer waits, or nearly all of them."""

MOVED = ("long", "break", "grow")
"""What seldom comes in a row: the copies of a pass that was broken off, and then the memory they read is given back."""

HISTORIES = 80
"""Random ones in the suite, every other with copies at random times."""


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    return make_decoders(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packing_decoders(tmp_path_factory):
    return make_decoders(tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.mark.parametrize("part", range(HISTORIES // 4))
@pytest.mark.slow(keep=1)
def test_random_histories_give_the_logits_of_a_cache_on_the_device(decoders, part):
    for seed in range(4 * part, 4 * part + 4):
        play(decoders, seed, deferred=bool((seed // 4 + seed) % 2))


@pytest.mark.parametrize("part", range(HISTORIES // 8))
@pytest.mark.slow(keep=1)
def test_random_histories_with_packed_blocks_do_too(packing_decoders, part):
    """Some of which are not in their slots."""
    for seed in range(4 * part, 4 * part + 4):
        play(packing_decoders, seed, deferred=bool((seed // 4 + seed) % 2))


@pytest.mark.parametrize("part", range(HISTORIES // 16))
@pytest.mark.slow(keep=1)
def test_random_histories_with_blocks_on_a_disk_or_in_memory_that_is_not_locked_do_too(
    decoders, packing_decoders, part
):
    for seed in range(4 * part, 4 * part + 4):
        play(decoders, seed, deferred=bool(seed % 2), away=True)
    play(packing_decoders, part, deferred=bool(part % 2), away=True)


@pytest.mark.parametrize("most", [0, 7, 20, 200])
def test_memory_is_locked_as_far_as_the_system_does_it_and_staged_beyond(decoders, most):
    """In blocks: staging takes six."""
    with Simulator() as simulator:
        part, link = decoders[0].part, cuda_link.CudaLink(torch.device("cpu"), runtime=simulator.runtime())
        size = 2 * part.num_kv_heads * 64 * part.head_dim * 4
        simulator.most_locked = most * size
        place = Placement.streaming(64 * 6, 64, 0, 4)
        make = lambda: StreamedBlocks(part, link, place, dtype=torch.float32, device=torch.device("cpu"))  # noqa: E731
        if most < 6:
            with pytest.raises(CapacityError, match=r"refused to page-lock .* the minimum for streaming; .*ulimit -l"):
                make()
            return
        blocks = make()
        locked = sum(simulator.locked.values()) // size
        assert locked == {7: 6, 20: 6, 200: 4 * 6}[most], "staging where it is needed, and room for that of others"
        assert (blocks._staging is None) == (most == 200)


def wait_statements():
    found = m.mutations(
        cuda_link,
        {"wait_stream", "wait_event", "synchronize", "wait"},
        {"record_event"},
        {"CudaLink", "_Arrival"},
    )
    found = [one for one in found if one.source != "self._done.synchronize()"]  # which staging waits with
    found += m.mutations(host_blocks, {"wait", "stop"}, set(), {"Ring"})
    found += m.mutations(streamed_blocks, {"wait", "wait_for_stores", "stop"}, set(), {"StreamedBlocks"})
    # One only times; the other has memory given back, and the next pass does the same.
    without = ("began = ", "self._staging.stop()")
    return [mutation for mutation in found if not mutation.source.startswith(without)]


@pytest.mark.parametrize("mutation", wait_statements(), ids=str)
@pytest.mark.slow(keep=3)
def test_a_run_without_one_of_the_waits_is_noticed(decoders, mutation):
    with mutation.applied():
        if hides_a_failed_store(decoders[0]):
            return
        found = any(is_noticed(decoders, seed) for seed in (*RARE, *range(20)))
        found = found or any(is_noticed(decoders, seed, MOVED) for seed in range(100))
        assert found or any(is_noticed(decoders, seed) for seed in range(20, 200)), f"no history needs {mutation}"


HOST = "the host waits, and what it reads then is not told to the sanitizer"
FREED = "without it memory is freed while a copy uses it, and the sanitizer forgets what is freed"

SEEN_BY_THE_SANITIZER = (
    ("self._inwards.wait_stream(self._runtime.current_stream())", None),
    ("self._outwards.wait_stream(self._runtime.current_stream())", None),
    ("self._outwards.synchronize()", HOST),
    ("self._runtime.synchronize()", FREED),
    ("stream.wait_event(done)", None),
    ("self._inwards.wait_stream(self._outwards)", None),
    ("done = self._runtime.record_event(self._inwards)", None),
    ("done = self._runtime.record_event(self._outwards)", None),
    ("self._link.wait(self._done)", None),
    ("departure.wait()", None),
    ("arrival.wait()", None),
    ("arrival.wait()", FREED),
    ("self._ring.wait_for_stores()", HOST),
    ("self._ring.wait_for_stores()", "it only says that a copy failed: another wait orders what follows"),
    ("self._ring.wait_for_stores()", HOST),
    (
        "self._link.fetch(picked, picks).wait()",
        "the copy is left out with its wait, and what is not there races nothing",
    ),
    ("self._ring.stop()", FREED),
)
"""All of `wait_statements`, in their order, and why the sanitizer cannot see that one is missing; `None`: it orders two
streams of the device, and the sanitizer must."""


def reports(decoders, seed):
    """What PyTorch's sanitizer of streams says of a history."""
    play(decoders, seed, simulator=(simulator := JudgedSimulator()))
    return simulator.reports


@pytest.mark.parametrize("part", range(2))
@pytest.mark.slow(keep=1)
def test_the_sanitizer_of_pytorch_has_no_objection(decoders, part):
    for seed in list(dict.fromkeys((*RARE, *range(10))))[part::2]:
        assert reports(decoders, seed) == []


def test_it_is_known_of_every_wait_whether_the_sanitizer_sees_that_it_is_missing():
    assert [mutation.source for mutation in wait_statements()] == [source for source, _ in SEEN_BY_THE_SANITIZER]


@pytest.mark.parametrize("index", [i for i, (_, unseen) in enumerate(SEEN_BY_THE_SANITIZER) if unseen is None])
@pytest.mark.slow(keep=2)
def test_the_sanitizer_of_pytorch_sees_that_a_wait_between_streams_is_missing(decoders, index):
    mutation = wait_statements()[index]
    with mutation.applied():
        assert any(reports(decoders, seed) for seed in (*RARE, *range(20))), f"no history needs {mutation}"


def is_noticed(decoders, seed, kinds=(None,) * 8):
    try:
        play(decoders, seed, kinds=kinds)
    except (Race, AssertionError):
        return True
    return False


def staging_waits():
    calls = {"wait", "wait_on_host", "finish", "result", "exception", "stop"}
    found = m.mutations(staging, calls, set(), {"Staging", "Staged", "_Write", "StagedCopy"})
    found += m.mutations(cuda_link, {"synchronize"}, set(), {"_Arrival"})
    found += m.mutations(host_blocks, {"wait_for_writes"}, set(), {"Ring"})
    return found if profile_name() == "campaign" else found[:1]  # the others take half a minute each


@pytest.mark.parametrize("mutation", staging_waits(), ids=str)
@pytest.mark.slow(keep=1)
def test_staging_without_one_of_the_waits_is_noticed(decoders, mutation):
    def fails(seed, kinds=(None,) * 8):
        try:
            play(decoders, seed, deferred=bool(seed % 2), kinds=kinds, away=True)
        except Exception:
            return True
        return False

    assert not any(fails(seed) for seed in range(3))
    assert not stops_before_a_read_ends() and not writes_overtake_one_another()
    with mutation.applied():
        if stops_before_a_read_ends() or writes_overtake_one_another():
            return  # threads that are as slow as these are in no history
        found = any(fails(seed) for seed in range(40))
        found = found or any(fails(seed, ("save", "grow", "save", "long", "refresh")) for seed in range(60))
        assert found or any(fails(seed) for seed in range(40, 200)), f"no history needs {mutation}"


class SlowPlace:
    """Somewhere away that is read and written slowly; what was done there is noted when it is done."""

    def __init__(self):
        self.began, self.done, self.seconds = threading.Event(), [], 0.3

    def place(self, memory):
        return memory[:8]

    def read(self, memory):
        self.began.set()
        time.sleep(self.seconds)
        self.done.append("read")

    def write(self, memory):
        found = int(memory[0])
        self.seconds, seconds = 0.0, self.seconds  # the first one takes longer than the second
        time.sleep(seconds)
        self.done.append(found)


def slow_staging():
    return staging.Staging(ThreadLink(), 4096, 6, staging.make_pool(), None), SlowPlace()


def stops_before_a_read_ends():
    """Whether a buffer may still be read into when it is said to be free."""
    stages, place = slow_staging()
    stages.begin(iter((place,)))
    place.began.wait()
    stages.stop()
    ended = bool(place.done)
    stages.pool.shutdown()
    return not ended


def writes_overtake_one_another():
    """Whether of two writes to one place the first may be the last."""
    stages, place = slow_staging()
    for value in (1, 2):
        stages.store(torch.full((8,), value, dtype=torch.uint8), place)
    stages.wait_for_writes()
    stages.pool.shutdown()
    return place.done != [1, 2]


def hides_a_failed_store(decoder):
    link = ThreadLink()
    place = Placement.streaming(100, 64, 0, 4)
    blocks = streamed_blocks.StreamedBlocks(decoder.part, link, place, dtype=torch.float32, device=torch.device("cpu"))
    link.store(torch.zeros(4), torch.zeros(3))
    try:
        blocks.prepare(0, 1)
    except LinkError:
        return False
    finally:
        link.close()
    return True


def test_the_simulator_lets_ordered_accesses_pass_and_no_others():
    with Simulator() as simulator:
        runtime = simulator.runtime()
        other = runtime.new_stream()
        x, y = torch.ones(8), torch.ones(8)
        other.wait_stream(runtime.current_stream())
        with runtime.use(other):
            y.copy_(x, non_blocking=True)
            event = runtime.record_event(other)
        x.mul(2)  # both only read
        with pytest.raises(Race, match="writes"):
            x.mul_(2)
        with pytest.raises(Race, match="reads"):
            y.mul(2)
        runtime.current_stream().wait_event(event)
        x.mul_(2)
        y.mul_(2)
        assert y.tolist() == [2.0] * 8


def test_parts_of_memory_that_do_not_overlap_do_not_conflict():
    with Simulator() as simulator:
        runtime = simulator.runtime()
        other, x = runtime.new_stream(), torch.ones(8, 4)
        simulator.synchronize()
        with runtime.use(other):
            x[4:].copy_(torch.ones(4, 4), non_blocking=True)
        x[:4].mul_(2)
        with pytest.raises(Race):
            x[:5].mul_(2)


@pytest.mark.parametrize("waited", [True, False])
def test_memory_freed_while_another_stream_uses_it_is_noticed(waited):
    simulator = Simulator()
    with simulator:
        runtime = simulator.runtime()
        other, x, y = runtime.new_stream(), torch.ones(8), torch.ones(8)
        other.wait_stream(runtime.current_stream())
        with runtime.use(other):
            y.copy_(x, non_blocking=True)
        if waited:
            runtime.current_stream().wait_stream(other)
        del x
        if waited:
            torch.ones(1).mul_(2)
        else:
            with pytest.raises(Race, match="freed"):
                torch.ones(1).mul_(2)
        simulator.synchronize()
        simulator.races.clear()


def test_the_host_sees_a_stores_target_only_once_it_waited():
    with Simulator() as simulator:
        link = cuda_link.CudaLink(torch.device("cpu"), runtime=simulator.runtime())
        host = link.host_memory((2, 8), torch.float32)
        source = torch.ones(8)
        link.store(source, host[1])
        host[0].sum()
        with pytest.raises(Race, match="the host reads"):
            host.sum()
        link.wait_for_stores()
        assert host.sum() == 8


@pytest.mark.slow(keep=("0",))
@pytest.mark.parametrize("seed", range(12))
def test_a_prefill_in_slices_and_the_rounds_between_them_wait_for_each_other(decoders, seed):
    kinds = ("long", "beside", None, "verify", "beside", None, "rollback", "beside")
    assert play(decoders, seed, deferred=bool(seed % 2), kinds=kinds).operations
