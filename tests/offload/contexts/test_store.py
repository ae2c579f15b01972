"""The store: names, permissions, what contexts share, the quota, and several processes at once."""

import os
import random
import shutil
import threading
import time
from contextlib import suppress

import pytest
from hooked_disk import HookedDisk
from tiny import random_tokens
from tiny_contexts import NAME, NEW_TOKENS, QUESTION, SAMPLINGS, SEGMENT, TEXT, TinyContexts, assert_whole, store_at
from triforce.offload.contexts.manifest import ContextError
from triforce.offload.contexts.model import ContextRequest
from triforce.offload.contexts.store import ContextStore
from triforce.tp.errors import UsageError

OTHER = random_tokens(100, seed=21)

BAD_NAMES = [
    *("", ".", "..", "../../x", "/etc", "a/b", "a\\b", ".hidden", "-rf", " a", "a ", "a\nb", "a\0b", "a:b"),
    *("a" * 101, "文" * 100, "\udcff"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_impossible_names_are_refused_before_anything_is_touched(tiny, tmp_path, name):
    store = store_at(tmp_path / "contexts")
    for call in (store.load, store.remove, store.token_ids, lambda name: list(store.verify(name))):
        with pytest.raises(UsageError, match="cannot be the name of a context"):
            call(name)
    with pytest.raises(UsageError, match="cannot be the name of a context"):
        tiny.read(tmp_path / "contexts", name=name)
    with pytest.raises(UsageError, match="cannot be the name of a context"):
        tiny.ask(tmp_path / "contexts", name=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "Война и мир", "a" * 100, "é" * 100, "x.y-z_1+2@3=4", "fingerprints.json", "本"])
def test_names_of_many_kinds(tiny, tmp_path, name):
    root = tmp_path / "contexts"
    tiny.read(root, name=name)
    assert_whole(root, name=name)
    assert store_at(root).names() == [name]
    assert tiny.ask(root, name=name) == "whole"
    store_at(root).remove(name)
    assert store_at(root).names() == [] and not (root / name).exists()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777])
def test_everything_is_for_its_owner_only(tiny, tmp_path, umask):
    before = os.umask(umask)
    try:
        tiny.read(tmp_path / "above" / "contexts")
    finally:
        os.umask(before)
    modes = {
        path: path.stat().st_mode & 0o777
        for path in (tmp_path / "above").rglob("*")
        if path.is_dir() or path.suffix != ".lock"
    }
    wanted = {path: 0o700 if path.is_dir() else 0o600 for path in modes}
    assert modes == wanted
    assert (tmp_path / "above").stat().st_mode & 0o777 == 0o700
    locks = [path for path in (tmp_path / "above").rglob("*.lock") if path.stat().st_mode & 0o077]
    assert locks == []


def test_contexts_that_begin_alike_share_files(tiny, root):
    longer = [*TEXT[:130], *OTHER]
    tiny.read(root, longer, name="longer")
    store = store_at(root)
    files = {
        name: [root / name / s.parts[0].file for s in store.load(name).segments if s.tokens == SEGMENT]
        for name in (NAME, "longer")
    }
    assert len(files[NAME]) == 2 and len(files["longer"]) == 3
    for one, other in zip(files[NAME], files["longer"], strict=False):
        assert one.stat().st_ino == other.stat().st_ino
    apart = store.disk_bytes([NAME]) + store.disk_bytes(["longer"])
    shared = sum(path.stat().st_blocks * 512 for path in files[NAME])
    assert store.disk_bytes() == apart - shared
    store.remove(NAME)
    assert_whole(root, longer, name="longer")
    assert store.disk_bytes() == store.disk_bytes(["longer"])


def test_a_last_segment_that_is_not_full_is_superseded(tiny, root):
    partial = store_at(root).load(NAME).segments[-1].parts[0].file
    whole = store_at(root).load(NAME).segments[0].parts[0].file
    inode = (root / NAME / whole).stat().st_ino
    tiny.read(root, [*TEXT, *OTHER])
    assert_whole(root, [*TEXT, *OTHER])
    assert not (root / NAME / partial).exists()
    assert (root / NAME / whole).stat().st_ino == inode


def test_tidying_leaves_what_other_ranks_have_written_ahead(root):
    ahead = root / NAME / "000000150-000000214.h1-2.cafe0123.safetensors"
    half = root / NAME / ".000000214-000000278.h1-2.cafe0123.safetensors.new"
    killed = root / NAME / "000000150-000000214.h1-2.dead4567.safetensors"
    notes = root / NAME / "notes.txt"
    for path in (ahead, half, killed, notes):
        path.touch()
    store = store_at(root)
    store.tidy(NAME, store.load(NAME).segments, "cafe0123")
    assert [path.exists() for path in (ahead, half, killed, notes)] == [True, True, False, True]
    store.tidy(NAME, store.load(NAME).segments)
    assert [path.exists() for path in (ahead, half, notes)] == [False, False, True]


def test_reading_what_is_there_already_removes_what_a_kill_has_left(tiny, root):
    """Killed after the last manifest was written, before what it supersedes was removed."""
    for name in ("000000128-000000140.h0-2.dead4567.safetensors", ".x.safetensors.new", ".dead4567.probe"):
        (root / NAME / name).touch()
    tiny.read(root)
    assert_whole(root)


def test_the_end_of_a_text_may_be_cut_into_other_tokens_when_it_grows(tiny, root):
    grown = [*TEXT[:140], *OTHER]
    tiny.read(root, grown)
    assert_whole(root, grown)


def test_another_text_does_not_take_a_name(tiny, root):
    with pytest.raises(ContextError, match=f"(?s){NAME}.*another text.*token 100.*contexts rm"):
        tiny.read(root, [*TEXT[:100], *OTHER])
    assert_whole(root)


def test_a_shorter_text_is_there_already(tiny, root):
    tiny.read(root, TEXT[:90])
    assert_whole(root)


def test_a_text_that_is_in_memory_is_saved_up_to_where_it_is_asked_for(tiny, tmp_path):
    engine = tiny.on(tmp_path / "contexts")
    prompt = TEXT + QUESTION
    engine.generate(prompt, SAMPLINGS[0], NEW_TOKENS)
    save = ContextRequest(save=NAME, save_tokens=100)
    result = engine.generate(prompt, SAMPLINGS[0], NEW_TOKENS, contexts=save)
    assert result.stats["warnings"] == [] and result.stats["reused_tokens"] > 100
    assert_whole(tmp_path / "contexts", TEXT[:100])
    assert tiny.ask(tmp_path / "contexts") == "whole"


def save_three(tiny, root):
    """Three contexts that share nothing, used in the order a, c, b; the bytes of each."""
    for seed, name in enumerate("abc"):
        tiny.read(root, random_tokens(100, seed=30 + seed), name=name)
    for when, name in enumerate("acb"):
        os.utime(root / name / "manifest.json", (1000 + when, 1000 + when))
    return store_at(root).disk_bytes(["a"])


def test_prune_removes_what_was_used_longest_ago(tiny, tmp_path):
    each, store = save_three(tiny, tmp_path), store_at(tmp_path)
    assert store.prune(3 * each) == []
    assert store.prune(2 * each) == ["a"]
    assert store.prune(0, keep=["c"]) == ["b"]
    assert store.names() == ["c"]


def test_prune_leaves_what_is_locked(tiny, tmp_path):
    save_three(tiny, tmp_path)
    with store_at(tmp_path).locked("a"):
        with pytest.raises(ContextError, match="'a' is being saved or removed by another process"):
            store_at(tmp_path).remove("a")
        assert store_at(tmp_path).prune(0) == ["c", "b"]
    assert store_at(tmp_path).names() == ["a"]


def test_using_a_context_makes_it_the_last_to_go(tiny, tmp_path):
    each = save_three(tiny, tmp_path)
    ask = ContextRequest(name="a")
    tiny.on(tmp_path).generate(random_tokens(120, seed=30), SAMPLINGS[0], 2, contexts=ask)
    assert store_at(tmp_path).prune(each) == ["c", "b"]


def test_a_quota_makes_room_by_removing_and_never_for_what_would_not_fit(tiny, tmp_path):
    each = save_three(tiny, tmp_path)
    text = random_tokens(100, seed=40)
    engine = tiny.on(tmp_path, most_bytes=3 * each + 1000)
    result = engine.generate(text, SAMPLINGS[0], 2, contexts=ContextRequest(save="d"))
    assert "removed the context a" in " ".join(result.stats["warnings"])
    assert store_at(tmp_path).names() == ["b", "c", "d"]
    with pytest.raises(
        ContextError, match=r"context 'e' would exceed the quota of .*\(TRIFORCE_CONTEXTS_MAX\); raise it$"
    ):
        tiny.on(tmp_path, most_bytes=each).read(random_tokens(900, seed=41), "e")
    assert store_at(tmp_path).names() == ["b", "c", "d"], "nothing is removed in vain"
    assert not (tmp_path / "e" / "manifest.json").exists()


def test_reading_under_a_quota_succeeds_where_others_are_removed_for_it(tiny, tmp_path):
    each = save_three(tiny, tmp_path)
    text = random_tokens(100, seed=40)
    tiny.on(tmp_path, most_bytes=3 * each + 1000).read(text, "d")
    assert_whole(tmp_path, text, name="d")


@pytest.mark.slow
def test_two_processes_that_read_the_same_text_at_once(tiny, tmp_path):
    """One of them reads; the other one is told, or finds it read."""
    root, second = tmp_path / "contexts", TinyContexts(tiny.model)
    slow = HookedDisk(lambda *_: time.sleep(0.002))
    outcomes = []

    def read(one):
        try:
            one.read(root, disk=slow)
            outcomes.append("read")
        except ContextError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=read, args=(one,)) for one in (tiny, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "read" in outcomes
    assert all(one == "read" or f"'{NAME}' is being saved or removed by another process" in one for one in outcomes)
    assert_whole(root)
    assert tiny.ask(root) == "whole"


def test_a_name_that_another_process_saves_to_costs_a_warning_only(tiny, root):
    with store_at(root).locked("another"):
        with pytest.raises(ContextError, match="'another' is being saved or removed by another process"):
            tiny.read(root, OTHER, name="another")
        save = ContextRequest(name=NAME, save="another")
        result = tiny.on(root).generate(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=save)
        assert result.token_ids == tiny.want[0]
        assert "being saved or removed" in " ".join(result.stats["warnings"])
    tiny.read(root, OTHER, name="another")
    assert_whole(root, OTHER, name="another")


def test_removed_between_being_found_and_being_opened(tiny, root):
    """What it held is read again."""
    run = tiny.on(root).stream(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=ContextRequest(name=NAME))
    store_at(root).remove(NAME)
    list(run)
    assert run.statistics.token_ids == tiny.want[0]
    assert NAME in " ".join(run.warnings) and run.stats()["reused_tokens"] == 0


@pytest.mark.parametrize("name", [NAME, "another"])
def test_removed_before_it_is_gone_on_from(tiny, root, name):
    """A run that was to add to it, or to share its files, saves everything itself."""
    longer = [*TEXT, *OTHER]
    save = ContextRequest(save=name, required=True)
    run = tiny.on(root).stream(longer, SAMPLINGS[0], 1, tiers=1, contexts=save)
    assert run.saved and run.saved.prefix and run.saved.prefix.name == NAME
    restored = run.saved._restore

    def restore_then_lose(prefix, full):
        found = yield from restored(prefix, full)
        shutil.rmtree(root / NAME)
        return found

    run.saved._restore = restore_then_lose
    list(run)
    assert run.stats()["reused_tokens"] == len(TEXT)
    assert_whole(root, longer, name=name)


def test_a_context_is_not_removed_while_it_is_being_restored_and_files_that_are_open_stay_readable(tiny, root):
    run = tiny.on(root).stream(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=ContextRequest(name=NAME))
    blocks, restored = run.sequence.active.full.blocks, []
    restore = blocks.restore

    def remove_first(layer, stop, read):
        if not restored:
            restored.append(layer)
            with pytest.raises(ContextError, match="is being restored by another process"):
                store_at(root).remove(NAME)
            assert store_at(root).prune(0) == []
            shutil.rmtree(root / NAME)
        restore(layer, stop, read)

    blocks.restore = remove_first
    try:
        list(run)
    finally:
        del blocks.restore
    assert run.statistics.token_ids == tiny.want[0]
    assert run.stats()["reused_tokens"] == len(TEXT) and run.warnings == []
    assert not (root / NAME).exists()


def test_another_text_that_took_the_name_meanwhile_is_not_overwritten(tiny, tmp_path):
    root = tmp_path / "contexts"
    run = tiny.on(root).stream(TEXT, SAMPLINGS[0], 1, tiers=1, contexts=ContextRequest(save=NAME, required=True))
    TinyContexts(tiny.model).read(root, OTHER)
    with pytest.raises(ContextError, match="another text"):
        list(run)
    assert_whole(root, OTHER)
    assert store_at(root).names() == [NAME]


def test_a_name_is_free_again_as_soon_as_it_is_removed(tiny, root):
    """Whoever saves to it next must not lose files to the removal: both hold the same lock."""
    store = store_at(root)
    held = store.locked(NAME)
    with held, pytest.raises(ContextError):
        store.remove(NAME)
    store.remove(NAME)
    tiny.read(root, OTHER)
    assert_whole(root, OTHER)


def test_finding_needs_no_name_and_passes_over_what_is_damaged(tiny, root):
    find = ContextRequest(find=True)
    long = random_tokens(300, seed=50)
    tiny.read(root, long, name="long")
    (root / NAME / "manifest.json").write_bytes(b"{")
    result = tiny.on(root).generate(long + QUESTION, SAMPLINGS[0], 2, contexts=find)
    assert result.stats["context"] == "long" and result.stats["reused_tokens"] == 300
    (root / "long" / "manifest.json").unlink()
    result = tiny.on(root).generate(long + QUESTION, SAMPLINGS[0], 2, contexts=find)
    assert result.stats["context"] is None and result.stats["warnings"] == []


class CountingStore(ContextStore):
    """A store that remembers which manifests it has read."""

    loaded: list[str]

    def load(self, name):
        self.loaded.append(name)
        return super().load(name)


def counting_store(root):
    store = CountingStore(root, segment_tokens=SEGMENT)
    store.loaded = []
    return store


def test_a_search_finds_what_comparing_with_every_context_finds(tiny, tmp_path):
    """Contexts that differ from a prompt at once, behind whole segments, within one, and behind what is kept in memory;
    that change, are replaced, and are removed between two searches of the same store."""
    root, chance = tmp_path / "contexts", random.Random(7)
    store, contexts = counting_store(root), tiny.engine.contexts
    long = random_tokens(1300, seed=60)
    texts = [long[:cut] + random_tokens(150, seed=cut) for cut in (0, 3, SEGMENT, SEGMENT + 9, 1020, 1150)]
    texts += [long[:70], long[:1024], [*long[:1150], *random_tokens(150, seed=1)]]
    for number, text in enumerate(texts):
        tiny.read(root, text, name=f"c{number}")

    def compare():
        cuts = 1, 63, 64, 65, 1023, 1024, 1025
        prompts = [*texts, long, *(long[:cut] + random_tokens(40, seed=cut) for cut in cuts)]
        for prompt in chance.sample(prompts, len(prompts)):
            for least in (1, 64):
                every = []
                for name in store_at(root).names():
                    with suppress(ContextError):
                        found = store_at(root).prefix_of(name, contexts.fingerprint, contexts.shape, prompt)
                        if found and found.tokens >= least:
                            every.append((found.tokens, store.used(name), found))
                best = max(every, key=lambda one: one[:2], default=None)
                found = store.find(contexts.fingerprint, contexts.shape, prompt, least)
                assert (found and (found.name, found.tokens)) == (best and (best[2].name, best[2].tokens))

    compare()
    store.note_use("c5")  # of two alike, the one that was used last
    compare()
    store.remove("c0")
    tiny.read(root, [*texts[1], *random_tokens(80, seed=61)], name="c1")  # goes on
    store.remove("c2")
    tiny.read(root, long[:900], name="c2")  # another text
    next((root / "c7").glob("*.safetensors")).write_bytes(b"damaged")
    (root / "c6" / "manifest.json").write_bytes(b"{")
    compare()


def test_a_search_reads_the_manifests_that_have_changed_and_that_of_what_it_finds(tiny, tmp_path):
    root = tmp_path / "contexts"
    texts = {name: random_tokens(200, seed=ord(name)) for name in "abcd"}
    for name, text in texts.items():
        tiny.read(root, text, name=name)
    store, contexts = counting_store(root), tiny.engine.contexts

    def loaded_by_search():
        store.loaded.clear()
        found = store.find(contexts.fingerprint, contexts.shape, texts["b"], 64)
        assert found and found.name == "b"
        return sorted(store.loaded)

    assert loaded_by_search() == ["a", "b", "b", "c", "d"]
    assert loaded_by_search() == ["b"]
    store.note_use("c")
    assert loaded_by_search() == ["b", "c"]
    assert store.any_of_shape(contexts.shape) and store.of_operator() == ["a", "b", "c", "d"]
    assert sorted(store.loaded) == ["b", "c"]
    tiny.read(root, random_tokens(100, seed=62), name="e")
    store.loaded.clear()
    assert store.any_of_shape(contexts.shape) and store.loaded == ["e"]


def test_what_weights_hash_to_is_noted_and_done_without_where_it_cannot_be(tiny, tmp_path):
    from hooked_disk import read_only
    from triforce.offload import Engine

    root = tmp_path / "contexts"
    root.mkdir()
    note = root / ".fingerprints.json"
    for disk in (read_only(), None):
        engine = Engine.load(tiny.model, "none", device="cpu", dtype="float32", store=store_at(root, disk))
        assert engine.contexts
        assert engine.contexts.fingerprint == tiny.engine.contexts.fingerprint
        assert note.exists() == (disk is None)
    note.write_bytes(b"[1")
    engine = Engine.load(tiny.model, "none", device="cpu", dtype="float32", store=store_at(root))
    assert engine.contexts
    assert engine.contexts.fingerprint == tiny.engine.contexts.fingerprint
