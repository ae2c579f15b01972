"""What a rank says where a call to the others fails, and how long it waits for them: real ranks on CPUs."""

import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import meeting
from hooked_disk import HookedDisk
from spmd import ENVIRONMENT, run_forks
from tiny import random_tokens, save_llama
from triforce.offload import ContextStore, Engine, Sampling
from triforce.offload.system import System
from triforce.tp.errors import HangError, PeerError, TriforceError
from triforce.tp.parallel import launch
from triforce.tp.parallel.device_watch import DeviceWatch
from triforce.tp.parallel.place import Place
from triforce.tp.parallel.ranks import Ranks, thread_ids

LIMIT_S = 4.0
"""Seconds: ranks that do not hang must not differ by as much, however busy the machine is."""

GREEDY = Sampling(temperature=0.0)
NEW_TOKENS = 12
MEMORY = 2**28
"""Bytes of a message that one rank has no memory for."""


def joined(limit_s=60.0):
    place = Place.from_environment()
    assert place is not None
    return Ranks.join(place, torch.device("cpu"), limit_s)


def say(**found):
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"])} | found) + "\n").encode())


def said(call):
    """What each rank has said, in the order of ranks."""
    found = [json.loads(line) for line in run_forks(call, 2).splitlines() if line.startswith("{")]
    assert [one["rank"] for one in sorted(found, key=lambda one: one["rank"])] == [0, 1], found
    return sorted(found, key=lambda one: one["rank"])


def attempt(act):
    """The names of the classes of the error that `act` ends with, its message and the seconds that it took."""
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        say(kinds=names, message=str(error), seconds=time.monotonic() - began)
    else:
        say(kinds=[], message="", seconds=time.monotonic() - began)


def no_memory_for_a_message():
    """Rank 1 may take no more memory than it has, and a little, when rank 0 sends it a large object."""
    ranks = joined()
    held = []
    if ranks.rank:
        taken = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY // 16, resource.RLIM_INFINITY))
        held = free_pieces(MEMORY // 4)
    attempt(lambda: ranks.share(bytes(MEMORY) if ranks.rank == 0 else None))
    del held


def free_pieces(size):
    """All memory that can still be had in pieces of `size` bytes: a process that has tested much has some left over
    in its heap, which no limit of its addresses counts.
    """
    pieces = []
    with contextlib.suppress(MemoryError):
        while True:
            pieces.append(bytearray(size))
    return pieces


def no_memory_on_a_gpu():
    """PyTorch's collective finds none, as NCCL does where it allocates."""

    def all_reduce(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    ranks = joined()
    if ranks.rank:
        dist.all_reduce = all_reduce
    attempt(lambda: ranks.sum(torch.ones(8, 8)))


def no_such_numbers():
    ranks = joined()
    attempt(lambda: ranks.sum(torch.ones(4, dtype=torch.int16)))


KINDS = {
    no_memory_for_a_message: ("RuntimeError", "allocate memory"),
    no_memory_on_a_gpu: ("OutOfMemoryError", "Tried to allocate 2.00 GiB"),
    no_such_numbers: ("RuntimeError", "Invalid scalar type"),
}


@pytest.mark.parametrize("fails", KINDS, ids=lambda call: call.__name__)
def test_an_error_of_a_rank_within_a_call_keeps_its_kind(fails):
    kind, text = KINDS[fails]
    other, failed = said(fails)
    assert kind in failed["kinds"] and "PeerError" not in failed["kinds"], failed
    assert text in failed["message"]
    if fails is no_memory_on_a_gpu:
        assert "PeerError" in other["kinds"] and "HangError" not in other["kinds"], other
        assert "lost the other ranks" in other["message"]


def test_a_rank_that_hangs_ends_the_others_by_the_limit():
    def call():
        ranks = joined(limit_s=2.0)
        if ranks.rank == 0:
            attempt(lambda: ranks.share_numbers([1], 4) and ranks.sum(torch.ones(8, 8), "all_reduce_chunks"))
        else:
            ranks.share_numbers([], 4)
            time.sleep(4.0)
            attempt(lambda: ranks.sum(torch.ones(8, 8)))

    waited, hung = said(call)
    assert "HangError" in waited["kinds"], waited
    assert "rank 0 waited 2 s for the other ranks in all_reduce_chunks" in waited["message"]
    assert 2 <= waited["seconds"] < 4
    assert hung["kinds"][0] == "PeerError", hung


def test_what_is_waited_for_patiently_has_no_limit():
    def call():
        ranks = joined(limit_s=1.0)
        if ranks.rank == 0:
            time.sleep(3.0)
        attempt(lambda: ranks.share("next", patiently=True))
        if ranks.rank == 1:
            time.sleep(3.0)
        assert ranks.least([ranks.rank], patiently=True) == [0]
        ranks.share(None)

    ranks = said(call)
    for one in ranks:
        assert one["kinds"] == [], one
    assert ranks[-1]["seconds"] > 2


def test_ranks_meet_again_and_again():
    """Each group anew, whoever of them comes first."""

    def call():
        for number in range(20):
            ranks = joined()
            if number % 2 == ranks.rank:
                time.sleep(0.02)
            say(sum=ranks.sum(torch.tensor([float(number)])).item())
            ranks.leave()

    found = [json.loads(line)["sum"] for line in run_forks(call, 2).splitlines() if line.startswith("{")]
    assert sorted(found) == [2.0 * number for number in range(20) for _ in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, seed=1, num_hidden_layers=2)
    return directory


class Clock:
    """The time, but that asking for it once takes longer than ranks wait."""

    def __init__(self):
        self.hangs = False

    def __call__(self):
        if self.hangs:
            self.hangs = False
            time.sleep(2 * LIMIT_S)
        return time.perf_counter()


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_rank_that_hangs_in_a_round_ends_the_run_of_the_others(model, hanging):
    def call():
        clock = Clock()
        system = System(clock=clock, wait_limit_s=LIMIT_S)
        engine = Engine.load(model, device="cpu", dtype="float32", gpus=2, tiers=2, budget=32, system=system)
        run = engine.stream(random_tokens(100, seed=3), GREEDY, NEW_TOKENS, ignore_eos=True)
        next(run)  # the prompt
        clock.hangs = engine.target.ranks.rank == hanging
        attempt(lambda: list(run))

    found = said(call)
    waited, hung = found[1 - hanging], found[hanging]
    assert "HangError" in waited["kinds"], waited
    assert f"rank {1 - hanging} waited {LIMIT_S:.0f} s for the other ranks in all_reduce" in waited["message"]
    assert hung["kinds"][0] == "PeerError", hung


@pytest.mark.slow
def test_what_rank_0_begins_next_may_be_waited_for(model):
    prompt = random_tokens(100, seed=3)
    settings: Any = {"device": "cpu", "dtype": "float32", "tiers": 2, "budget": 32}

    def call():
        engine = Engine.load(model, gpus=2, **settings, system=System(wait_limit_s=LIMIT_S))
        texts = []
        if engine.target.ranks.rank == 0:
            for _ in range(2):
                time.sleep(1.5 * LIMIT_S)
                texts.append(engine.generate(prompt, GREEDY, NEW_TOKENS, ignore_eos=True).token_ids)
            engine.finish()
        else:
            while (run := engine.follow()) is not None:
                list(run)
        engine.close()
        say(texts=texts)

    leading, _ = said(call)
    want = Engine.load(model, **settings).generate(prompt, GREEDY, NEW_TOKENS, ignore_eos=True).token_ids
    assert leading["texts"] == [want] * 2


@pytest.mark.slow
def test_a_slow_disk_may_be_waited_for(model, tmp_path):
    """One rank takes longer than the limit to write its part of a context."""
    text = random_tokens(150, seed=3)

    def call():
        def hook(kind, *of):
            if kind == "sync" and os.environ["RANK"] == "1":
                time.sleep(1.5 * LIMIT_S)

        store = ContextStore(tmp_path, segment_tokens=128, disk=HookedDisk(hook))
        system = System(wait_limit_s=LIMIT_S)
        engine = Engine.load(model, device="cpu", dtype="float32", gpus=2, store=store, system=system)
        say(saved=engine.read(text, "book").saved)

    assert [one["saved"] for one in said(call)] == [len(text)] * 2


class Mark:
    """A mark behind what a device was given, which it comes to, or not."""

    def __init__(self, done):
        self.done = done

    def query(self):
        return self.done


@pytest.mark.parametrize("done", [True, False])
def test_what_a_gpu_does_not_finish_ends_the_process_and_is_named(done):
    ended: list[HangError] = []
    told = threading.Event()

    def end(error):
        ended.append(error)
        told.set()

    watch = DeviceWatch(1, 0.3, end)
    watch.note("broadcast", Mark(True))
    watch.note("a captured pass", Mark(done))
    watch.note("all_reduce", Mark(done))
    assert told.wait(1.0 if done else 30.0) is not done
    watch.stop()
    if not done:
        assert [type(error) for error in ended] == [HangError]
        assert "rank 1 waited 0 s for the other ranks in a captured pass" in str(ended[0])


def test_a_call_that_does_not_return_ends_the_process_too():
    told = threading.Event()
    watch = DeviceWatch(0, 0.3, lambda error: told.set())
    with watch.call("all_gather"):
        pass
    assert not told.wait(1.0)
    with watch.call("all_reduce"):
        assert told.wait(30.0)
    watch.stop()


@pytest.mark.parametrize("captures", [False, True])
def test_what_a_gpu_is_given_is_watched_but_not_what_is_captured(monkeypatch, captures):
    noted = []

    class Event(Mark):
        def __init__(self):
            super().__init__(done=True)

        def record(self, stream):
            noted.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    ranks = Ranks(0, 2, _watch=DeviceWatch(0, 60.0))
    ranks.note_replay(torch.device("cuda", 0))
    ranks.note_replay(torch.device("cpu"))
    Ranks(0, 2).note_replay(torch.device("cuda", 0))
    assert noted == ([] if captures else ["stream of cuda:0"])


def test_the_launcher_tells_who_waited_and_not_who_was_lost():
    lost = launch.Failure(0, PeerError.exit_code, "rank 0 lost the other ranks: one of them has ended", at=100)
    waited = launch.Failure(1, HangError.exit_code, "rank 1 waited 600 s for the other ranks in all_reduce", at=100)
    with pytest.raises(TriforceError, match=r"^rank 1 waited 600 s for the other ranks in all_reduce$"):
        launch._outcome([lost, waited])
    alone = launch.Failure(0, HangError.exit_code, "rank 0 waited 600 s for the other ranks in all_reduce", at=100)
    with pytest.raises(TriforceError, match=r"^rank 0 waited 600 s"):
        launch._outcome([alone])
    failed = launch.Failure(1, 1, "the disk is full", at=100)
    with pytest.raises(TriforceError, match=r"^rank 1: the disk is full$"):
        launch._outcome([alone, failed])


@pytest.mark.parametrize("fails", [{"exit_code": -9, "message": ""}, {"exit_code": 1, "message": "no disk"}])
def test_a_rank_that_the_launcher_had_to_kill_is_not_named_as_the_one_that_failed(fails):
    killed, failed = launch.Failure(0, -9, "", at=131), launch.Failure(1, **fails, at=100)
    with pytest.raises(TriforceError, match="rank 1"):
        launch._outcome(launch._of_ranks([killed, failed]))


@pytest.mark.parametrize("fits", [True, False])
def test_connections_do_not_take_cores_from_threads_that_run_where_these_have_one_each(fits):
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("there is one core, or another policy than usual")

    def policies() -> None:
        before = thread_ids()
        torch.set_num_threads(1 if fits else cores)
        Ranks.join(Place(int(os.environ["RANK"]), 2, int(os.environ["RANK"]), 2), torch.device("cpu")).least([0])
        found = {}
        for thread in thread_ids() - before:
            with contextlib.suppress(OSError):
                name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
                found[name] = os.sched_getscheduler(thread)
        os.write(1, (json.dumps([policy for name, policy in found.items() if name[:3] != "pt_"]) + "\n").encode())

    found = [set(json.loads(line)) for line in run_forks(policies, 2).splitlines()]
    assert found == [{os.SCHED_BATCH if fits else os.SCHED_OTHER}] * 2


def late_ranks(folder: Path, shared: dict[str, str], *, wrapped: bool) -> list[subprocess.Popen[bytes]]:
    """Two ranks of a group, each of which comes late once; rank 1 ends first."""
    script = folder / "late.py"
    script.write_text(
        """
import os, time, torch
from triforce.tp.parallel.place import Place
from triforce.tp.parallel.ranks import Ranks
place = Place.from_environment()
ranks = Ranks.join(place, torch.device("cpu"))
for late in (0, 1):
    time.sleep(2.5 * (place.rank == late))
    print(int(ranks.sum(torch.ones(1))), flush=True)
time.sleep(place.rank == 0)
os._exit(0)
"""
    )
    command = [sys.executable, str(script)]
    if wrapped:
        command = ["sh", "-c", f"{shlex.join(command)}; exit $?"]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, **shared, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.slow
def test_late_ranks_are_waited_for_whoever_has_started_them(tmp_path, wrapped):
    """Each rank's parent may be a shell of its own."""
    _store, shared = meeting(2)
    started = late_ranks(tmp_path, shared, wrapped=wrapped)
    try:
        ended = [(process, *process.communicate(timeout=60)) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [(process.returncode, out) for process, out, _ in ended] == [(0, b"2\n2\n")] * 2, ended
