"""Blocks that exceed host memory are on a disk: the same bits, whatever is done with them, and clear errors."""

import errno
import fcntl
import os
import random
import threading
from contextlib import suppress

import pytest
import torch
from oracles import kv_block
from tiny import save_llama
from tiny_caches import CAPACITY, SIZE, Twin, Twins, bits
from triforce.offload.limits import LIMITS
from triforce.offload.transfer.link import ThreadLink
from triforce.offload.transfer.staged.block_file import ALIGNMENT, BlockFile, DiskError, DiskSpace
from triforce.tp.decoder import Decoder
from triforce.tp.errors import CapacityError

CPU = torch.device("cpu")


@pytest.fixture(params=["direct", "over a link"])
def link(request):
    """Whether blocks are used where they were read, or cross a link after that."""
    link = ThreadLink(1e12 if request.param == "over a link" else None)
    yield link
    link.close()


@pytest.fixture
def space(tmp_path):
    space = DiskSpace(tmp_path / "contexts")
    yield space
    space.pool.shutdown()


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, num_key_value_heads=2, num_hidden_layers=2)
    return Decoder.load(directory, dtype=torch.bfloat16, device=CPU).part


@pytest.mark.parametrize("kind", ["normal", "any bits"])
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.slow(keep=8)
def test_blocks_on_a_disk_are_those_in_memory_whatever_is_done_with_them(part, link, space, kind, seed):
    chance = random.Random(seed)
    twins = (
        Twin(disk=chance.choice([1, 5, 99])),
        Twin(True, chance.choice([1, 4, 99]), together=chance.choice([1, 2, 4])),
        Twin(),
    )
    made = Twins(part, link, chance.choice([0, 1, 3]), kind, seed, twins, space)
    for _ in range(14):
        made.step()
    for blocks in made.all:
        blocks.drain()
    assert [bool(blocks.footprint.disk) for blocks in made.all] == [True, True, False]


@pytest.mark.parametrize("disk", [3, 99])
def test_a_pass_reads_each_block_on_the_disk_once(part, link, space, disk):
    twins = Twins(part, link, 1, "normal", 1, (Twin(disk=disk), Twin()), space)
    twins.add(1300)
    blocks, whole = twins.all[0], 1300 // SIZE
    blocks.drain()
    before = blocks.traffic()
    twins.add(1)
    read = blocks.traffic().since(before)
    block_bytes = SIZE * part.kv_bytes_per_token(torch.bfloat16) // part.num_layers
    assert read.disk_bytes_in == part.num_layers * min(disk, whole - 1) * block_bytes
    assert read.disk_bytes_out == 0 < before.disk_bytes_out
    in_memory = max(0, whole - 1 - disk)
    crossed = whole - 1 if not link.direct else in_memory
    assert read.bytes_in == (crossed + whole - 1) * part.num_layers * block_bytes, "the other one's are all in memory"
    assert blocks.footprint.host < twins.all[1].footprint.host + blocks._staging.memory.nbytes
    assert read.disk_busy_s > 0


def test_going_back_into_a_block_of_more_layers_than_there_are_buffers(tmp_path, link, space):
    save_llama(tmp_path, num_key_value_heads=2, num_hidden_layers=LIMITS.disk_buffers + 2)
    deep = Decoder.load(tmp_path, dtype=torch.bfloat16, device=CPU).part
    twins = Twins(deep, link, 0, "normal", 1, (Twin(disk=99), Twin()), space)
    twins.add(5 * SIZE + 9)
    for length in (4 * SIZE + 3, 3 * SIZE - 1, 5):
        for blocks in twins.all:
            blocks.rollback(length)
        twins.length = length
        twins.add(SIZE // 2)
    for blocks in twins.all:
        blocks.drain()


def test_nothing_is_left_in_the_folder_and_only_its_owner_can_read_it(part, link, space):
    twins = Twins(part, link, 0, "normal", 1, (Twin(disk=5),), space)
    twins.add(900)
    assert list(space.folder.iterdir()) == []
    found = os.fstat(twins.all[0]._homes.file._descriptor)
    assert found.st_nlink == 0 and found.st_mode & 0o077 == 0 and space.folder.stat().st_mode & 0o077 == 0
    assert found.st_blocks * 512 >= twins.all[0].footprint.disk, "its space is taken from the start"


def test_a_disk_without_room_is_an_error_before_anything_is_computed(part, link, space, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=rf"{space.folder}.*No space left.*TRIFORCE_HOME"):
        Twins(part, link, 0, "normal", 1, (Twin(disk=5),), space)


def test_a_folder_that_cannot_be_made_is_an_error(space):
    space.folder.write_text("a file")
    with pytest.raises(CapacityError, match="TRIFORCE_HOME"):
        BlockFile(space, 2, ALIGNMENT)


def test_a_folder_that_cannot_be_looked_into_is_an_error_with_a_remedy(space):
    space.folder /= 300 * "x"
    with pytest.raises(CapacityError, match=r"File name too long.* free.*TRIFORCE_HOME"):
        BlockFile(space, 2, ALIGNMENT)


def failing(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("broken", ["reading", "writing", "shrunk"])
def test_a_disk_that_fails_is_an_error_that_names_it_and_nothing_hangs(part, link, space, monkeypatch, broken):
    twins = Twins(part, link, 0, "normal", 1, (Twin(disk=99),), space)
    twins.add(1100)
    blocks = twins.all[0]
    blocks.drain()
    if broken == "shrunk":
        os.ftruncate(blocks._homes.file._descriptor, blocks.footprint.disk // 2)
    else:
        monkeypatch.setattr(os, "preadv" if broken == "reading" else "pwritev", failing)
    why = "ends too early" if broken == "shrunk" else "Input/output error"
    what = "writing" if broken == "writing" else "reading"
    with pytest.raises(DiskError, match=rf"{what} a block.*{space.folder} failed: .*{why}.*--host-memory"):
        for _ in range(4):
            twins.add(60)
    with pytest.raises(DiskError):  # as long as nobody was told
        blocks._ring.begin(blocks._sources(1, *blocks._range(1)))
        list(blocks._ring.next_blocks(9))
        blocks.drain()
    with suppress(DiskError):  # as whoever gives a broken cache back
        blocks.drain()
    monkeypatch.undo()
    if broken != "shrunk":
        blocks.rollback(0)
        twins.length = 0
        twins.add(900)
        twins.add(3)


def read_without_direct(refused, descriptor, buffers, start, preadv=os.preadv):
    """What a file system does that agrees to direct reads and then refuses each."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        refused.append(start)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return preadv(descriptor, buffers, start)


@pytest.mark.parametrize("direct", ["yes", "no", "refused for reads"])
def test_a_file_gives_back_what_was_written_with_and_without_the_page_cache(space, monkeypatch, direct):
    if direct == "no":
        monkeypatch.delattr(os, "O_DIRECT")
    file = BlockFile(space, 5, 3 * ALIGNMENT - 100)
    assert file.slot_bytes == 3 * ALIGNMENT and (direct != "no" or not file.direct)
    refused = []
    if direct == "refused for reads" and file.direct:
        monkeypatch.setattr(os, "preadv", lambda *given: read_without_direct(refused, *given))
    link = ThreadLink()
    blocks = link.host_memory((5, file.slot_bytes), torch.uint8)
    blocks.copy_(torch.randint(256, blocks.shape, dtype=torch.uint8))
    threads = [threading.Thread(target=file.write, args=(i, blocks[i])) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = link.host_memory((file.slot_bytes,), torch.uint8)
    for i in (3, 0, 4, 1, 2):
        file.read(i, found)
        assert torch.equal(found, blocks[i])
    assert len(refused) == (direct == "refused for reads" and not file.direct)
    assert space.traffic().disk_bytes_out == file.num_bytes
    link.close()


def test_blocks_that_do_not_pack_are_kept_in_memory(part, link, space):
    twins = Twins(part, link, 0, "any bits", 1, (Twin(True, 99), Twin()), space)
    twins.add(900)
    assert twins.all[0]._overflow.blocks == part.num_layers * (900 // SIZE)
    twins.kv = kv_block("normal", tuple(twins.kv.shape), 2)
    twins.length = 0
    for blocks in twins.all:
        blocks.rollback(0)
    twins.add(900)
    assert len(twins.all[0]._overflow._free) == twins.all[0]._overflow.blocks
    assert bits(twins.kv).numel() and CAPACITY > 900
