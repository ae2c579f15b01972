"""Blocks flow through the ring in order, no faster than it has room, and a failed copy is the run's error."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from triforce.offload.transfer.host_blocks import RawBlocks, Ring
from triforce.offload.transfer.link import LinkError, ThreadLink
from triforce.tp.errors import CapacityError

BLOCK = (2, 4, 64, 16)


@pytest.fixture
def link():
    link = ThreadLink()
    yield link
    link.close()


def blocks(count):
    return [torch.full(BLOCK, float(i)) for i in range(count)]


LEAVES = """
import threading, weakref
import torch
from triforce.offload.transfer.link import ThreadLink

weakref.finalize(torch.empty, lambda: print([thread.name for thread in threading.enumerate()]))
link = ThreadLink()
memory, buffers = link.host_memory((20, 2**20), torch.float32), torch.empty(20, 2**20)
for source, buffer in zip(memory, buffers):
    link.fetch(source, buffer)
"""


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_blocks_come_in_order_however_many_buffers(link, depth):
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(depth)])
    ring.begin(iter(blocks(20)))
    seen = [float(block.mean()) for part in (3, 0, 17) for block in ring.next_blocks(part)]
    assert seen == list(map(float, range(20)))


def test_block_is_untouched_while_it_is_in_use(link):
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(2)])
    ring.begin(iter(blocks(6)))
    for i, block in enumerate(ring.next_blocks(6)):
        time.sleep(0.02)  # more than enough for the link to run ahead
        assert torch.all(block == i), f"block {i} was overwritten"


def test_no_more_is_copied_ahead_than_there_are_buffers(link):
    sources = blocks(8)
    num_bytes = sources[0].numel() * sources[0].element_size()
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(3)])
    ring.begin(iter(sources))
    for i, _ in enumerate(ring.next_blocks(8)):
        time.sleep(0.02)
        assert link.traffic().bytes_in == min(8, i + 3) * num_bytes


def test_beginning_anew_drops_what_was_under_way(link):
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(3)])
    ring.begin(iter(blocks(9)))
    next(ring.next_blocks(1))
    ring.begin(iter([torch.full(BLOCK, 100.0 + i) for i in range(5)]))
    assert [float(block.mean()) for block in ring.next_blocks(5)] == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_failing_copy_is_raised_where_its_block_is_taken(link):
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(2)])
    ring.begin(iter([torch.zeros(BLOCK), torch.zeros(3, 5), torch.ones(BLOCK)]))
    taken = ring.next_blocks(3)
    next(taken)
    with pytest.raises(LinkError, match="KV cache"):
        next(taken)


def test_a_ring_that_is_stopped_waits_for_all_copies_also_where_some_failed():
    link = ThreadLink(bytes_per_s=160e3)  # 0.2 s for a block
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(3)])
    ring.begin(iter([torch.zeros(3, 5), torch.zeros(3, 5), torch.ones(BLOCK)]))
    last: Any = ring._under_way[-1][2]
    ring.stop()
    assert last.done.is_set()
    ring.begin(iter(blocks(4)))
    assert [float(block.mean()) for block in ring.next_blocks(4)] == [0.0, 1.0, 2.0, 3.0]
    link.close()


def test_failing_store_is_raised_when_all_stores_settle():
    link = ThreadLink(bytes_per_s=160e3)
    link.store(torch.zeros(4), torch.zeros(3))
    last: Any = link.store(torch.ones(BLOCK), torch.zeros(BLOCK))
    with pytest.raises(LinkError):
        link.wait_for_stores()
    assert last.done.is_set()
    link.wait_for_stores()
    link.close()


class Full(RawBlocks):
    """Blocks of which one has no room."""

    def leave(self, index, block, buffer):
        if index == 3:
            raise CapacityError("no room")
        return super().leave(index, block, buffer)


def test_a_block_without_room_takes_no_buffer_along():
    link, host = ThreadLink(bytes_per_s=160e3), Full(torch.zeros(5, *BLOCK))
    ring = Ring(link, [torch.empty(BLOCK) for _ in range(3)])
    for index in range(3):
        ring.send(torch.full(BLOCK, float(index)), host, index)
    with pytest.raises(CapacityError):
        ring.send(torch.full(BLOCK, 3.0), host, 3)
    ring.send(torch.full(BLOCK, 4.0), host, 4)
    ring.wait_for_stores()
    assert [float(block.mean()) for block in host.blocks] == [0.0, 1.0, 2.0, 0.0, 4.0]
    link.close()


def test_fetch_sees_what_was_stored_before(link):
    host, buffer = torch.zeros(BLOCK), torch.empty(BLOCK)
    link.store(torch.full(BLOCK, 7.0), host)
    link.fetch(host, buffer).wait()
    assert torch.all(buffer == 7)
    assert link.traffic().bytes_out == host.numel() * 4


@pytest.mark.alone
def test_limited_link_carries_its_bandwidth_and_computation_hides_behind_it():
    """The least time of up to 12 passes: what else the machine does comes on top of the floor, never off it."""
    source = torch.zeros(1 << 20)  # 4 MiB
    floor, seconds = 12 * source.numel() * 4 / 100e6, 0.0
    for _ in range(12):
        link = ThreadLink(bytes_per_s=100e6)
        ring = Ring(link, [torch.empty_like(source) for _ in range(3)])
        computing = []
        began = time.perf_counter()
        ring.begin(source for _ in range(12))
        for _ in ring.next_blocks(12):
            arrived = time.perf_counter()
            time.sleep(0.025)  # computation, shorter than the 42 ms of a copy
            computing.append(time.perf_counter() - arrived)
        seconds = time.perf_counter() - began
        traffic = link.traffic()
        link.close()
        assert floor <= seconds, f"{seconds:.3f} s for a floor of {floor:.3f} s"
        if seconds <= 1.05 * floor + computing[-1]:  # which nothing hides
            break
    else:
        pytest.fail(f"the last pass took {seconds:.3f} s for a floor of {floor:.3f} s")
    assert traffic.busy_s == pytest.approx(floor, rel=0.05)
    assert traffic.waited_s == pytest.approx(seconds - sum(computing), abs=0.03)


def test_a_process_that_ends_while_something_is_copied_ends_the_thread_first():
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stdout, left.stderr) == (0, "['MainThread']\n", "")
