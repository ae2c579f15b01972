"""What is saved survives power cuts, kills and full disks; and what was being saved leaves no trace."""

import errno
import random
import shutil

import pytest
from hooked_disk import HOWS, HookedDisk, PowerCut, full_after, read_only, recording
from killed_reader import check_killed
from small_disk import NoDiskError, small_disk
from tiny_contexts import MARKER, NAME, NEW_TOKENS, QUESTION, SAMPLINGS, SEGMENT, TEXT, assert_whole, store_at
from tiny_disk import check_full_disk
from triforce.offload import ContextError, ContextRequest


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    """What reading 100 tokens and then 150 does to a disk, and the store that it was done to."""
    root = tmp_path_factory.mktemp("recorded") / "contexts"
    disk, events = recording()
    tiny.read(root, TEXT[:100], disk=disk)
    tiny.read(root, TEXT, disk=disk)
    return root, events


def manifests_synced(root, events):
    """How many manifests are sure to be on the disk."""
    placed = synced = 0
    for kind, *of in events:
        placed += kind == "rename" and of[1] == root / NAME / "manifest.json"
        synced = placed if kind == "sync_directory" and of[0] == root / NAME else synced
    return synced


TOKENS_AFTER = (0, 0, SEGMENT, 100, 2 * SEGMENT, len(TEXT))
"""Tokens that are saved once so many manifests are written, of which the first names no segment yet."""


def test_whenever_the_power_is_cut_what_was_saved_is_there(recorded, tmp_path):
    """After every change of a name, with what was not synced lost in several ways."""
    root, events = recorded
    cuts = [at + 1 for at, event in enumerate(events) if event[0] in ("rename", "sync_directory", "remove")]
    for cut in cuts:
        sure = TOKENS_AFTER[manifests_synced(root, events[:cut])]
        for how in HOWS[:4]:
            place = tmp_path / f"{cut}-{how}"
            PowerCut(root.parent, events[:cut]).leave(place, how, random.Random(0))
            store = store_at(place / "contexts")
            found = [wrong for name in store.names() for _, wrong in store.verify(name) if wrong]
            assert found == [], f"after {cut} of {len(events)} events, {how}"
            assert not sure or store.load(NAME).saved >= sure, f"after {cut} of {len(events)} events, {how}"
            shutil.rmtree(place)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("seed", range(60))
def test_after_a_power_cut_what_was_saved_is_there_and_reading_goes_on(tiny, recorded, tmp_path, seed):
    root, events = recorded
    rng = random.Random(seed)
    cut, how = rng.randrange(len(events) + 1), rng.choice(HOWS)
    PowerCut(root.parent, events[:cut]).leave(tmp_path / "disk", how, rng)
    left = tmp_path / "disk" / "contexts"
    store = store_at(left)
    sure = TOKENS_AFTER[manifests_synced(root, events[:cut])]
    if sure:
        assert store.load(NAME).saved >= sure
    for name in store.names():
        if (left / name / "manifest.json").exists():
            assert [wrong for _, wrong in store.verify(name) if wrong] == []
            assert tiny.ask(left) == "whole"
    tiny.read(left)
    assert_whole(left)
    assert tiny.ask(left) == "whole"


@pytest.mark.parametrize("how", HOWS[:4])
def test_what_read_has_returned_from_survives_any_power_cut(recorded, tmp_path, how):
    root, events = recorded
    PowerCut(root.parent, events).leave(tmp_path / "disk", how, random.Random(0))
    store = store_at(tmp_path / "disk" / "contexts")
    assert store.load(NAME).complete
    assert [wrong for _, wrong in store.verify(NAME) if wrong] == []


@pytest.mark.parametrize("room", [0, 3000, 30_000, 47_000, 90_000, 120_000])
def test_a_full_disk_takes_no_answer_away(tiny, tmp_path, room):
    root = tmp_path / "contexts"
    engine = tiny.on(root, full_after(room))
    save = ContextRequest(save=NAME)
    result = engine.generate(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=save)
    assert result.token_ids == tiny.want[0]
    assert "No space left" in " ".join(result.stats["warnings"])
    with pytest.raises(ContextError, match="No space left"):
        tiny.read(root, disk=full_after(0))
    if (root / NAME / "manifest.json").exists():
        assert [wrong for _, wrong in store_at(root).verify(NAME) if wrong] == []
        assert tiny.ask(root) == "whole"
    left = {path.name for path in (root / NAME).glob(".*")}
    assert left <= {MARKER}, "what could not be written must not fill the disk"
    tiny.read(root)
    assert_whole(root)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("size", [24_576, 65_536, 81_920, 114_688, 147_456, 200_704])
def test_a_full_file_system_takes_no_answer_away(tiny, tmp_path, size):
    try:
        with small_disk(tmp_path / "small", size) as place:
            check_full_disk(tiny, place / "contexts")
    except NoDiskError as error:
        pytest.skip(f"no small file system can be mounted here: {error}")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(8))
def test_a_reader_that_is_killed_loses_nothing(tiny, tmp_path, seed):
    check_killed(tiny, tmp_path / "contexts", random.Random(seed))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written_is_read_and_refuses_to_save(tiny, root, number):
    assert tiny.ask(root, disk=read_only(number)) == "whole"
    longer = TEXT + QUESTION
    with pytest.raises(ContextError, match=r"[Rr]ead-only|[Pp]ermission"):
        tiny.read(root, longer, disk=read_only(number))
    request = ContextRequest(name=NAME, save="another")
    result = tiny.on(root, read_only(number)).generate(longer, SAMPLINGS[0], NEW_TOKENS, contexts=request)
    assert result.token_ids == tiny.want[0]
    assert "nothing is saved" in " ".join(result.stats["warnings"])
    assert result.stats["reused_tokens"] == len(TEXT)
    assert_whole(root)


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename", "sync_directory", "remove", "link"])
def test_a_disk_that_fails_at_any_call_loses_nothing(tiny, root, kind):
    other = [*TEXT[:130], *QUESTION]

    def fail(called, *_):
        if called == kind:
            raise OSError(errno.EIO, "Input/output error")

    try:
        tiny.read(root, other, name="another", disk=HookedDisk(fail))
    except ContextError as error:
        assert "Input/output error" in str(error)
    assert_whole(root)
    assert tiny.ask(root) == "whole"
    tiny.read(root, other, name="another")
    assert_whole(root, other, name="another")


def test_a_save_that_was_broken_off_goes_on_where_it_was(tiny, tmp_path):
    root = tmp_path / "contexts"

    class Killed(BaseException):
        pass

    def kill(kind, *of):
        if kind == "rename" and "000000064-000000128" in of[1].name:
            raise Killed

    with pytest.raises(Killed):
        tiny.read(root, disk=HookedDisk(kill))
    assert store_at(root).load(NAME).saved == SEGMENT
    engine = tiny.on(root)
    run = engine.stream(TEXT, SAMPLINGS[0], 1, tiers=1, contexts=ContextRequest(save=NAME))
    list(run)
    assert run.stats()["reused_tokens"] == SEGMENT
    assert_whole(root)
