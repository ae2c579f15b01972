"""Manifests that somebody made up, and directories that are not ours: one of them spoils nothing for others."""

import json
import os
import random
import shutil
import time

import pytest
import xxhash
from command import TEXT, Fork, run_here
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from profiles import examples
from served import Process

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**12, 10**400, 0.0, 1.5, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "a", "\ud800", "\0", "../x", "/etc/passwd", "\x1b[2J", "a" * 100_000, "0" * 32),
    *([], [None], [[]], [0, 10**12], [0, 1, 2], {}, {"a": 1}),
]


@pytest.fixture(scope="module")
def store(pair, tmp_path_factory):
    """A store with two contexts, and a server of it."""
    home, forks = tmp_path_factory.mktemp("home"), list[Fork]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(home))
        server = Process(pair, home / "log", forks)
        for name in ("book", "other"):
            assert server.upload(name, f"{name}: {TEXT}").status == 201
        yield home / "contexts", server
    for fork in forks:
        fork.kill()


@pytest.fixture
def crafted(store, capfd):
    """Puts bytes in place of a manifest, and sees that everybody gets their answers."""
    root, server = store
    path = root / "book" / "manifest.json"
    kept = path.read_bytes()

    def check(raw=None):
        if raw is not None:
            path.write_bytes(raw)
        listed = run_here(capfd, "contexts", "--json", "-")
        assert listed.code == 0, listed.err
        told = server.ask("GET", "/v1/contexts")
        assert told.status == 200, told
        for document in (json.loads(listed.out, parse_constant=pytest.fail), told.json["data"]):
            assert {one["name"]: "damaged" in one for one in document}["other"] is False
        assert run_here(capfd, "contexts").code == 0
        assert server.complete(f"book: {TEXT}", max_tokens=1).status == 200
        assert server.complete("So", context="other", max_tokens=1).status == 200
        assert server.complete("So", context="book", max_tokens=1).status in (200, 400)
        return next(one for one in json.loads(listed.out) if one["name"] == "book")

    yield check
    if not path.is_file() or path.is_symlink():
        (shutil.rmtree if path.is_dir() else os.unlink)(path)
    path.write_bytes(kept)


def sealed(described):
    """A manifest with the checksum of what it says."""
    described.pop("checksum", None)
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    return json.dumps(described | {"checksum": checksum}).encode()


def places(value, at=()):
    """The ways to all values within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield (*at, key)
        yield from places(one, (*at, key))


def mutate(described, draw):
    """Changes a value somewhere, leaves it out, or has it twice."""
    *way, last = draw.choice(list(places(described)))
    for key in way:
        described = described[key]
    kind = draw.choice(["set", "set", "set", "remove", "repeat"])
    if kind == "remove":
        del described[last]
    elif kind == "repeat" and isinstance(described, list):
        described.append(described[last])
    else:
        described[last] = draw.choice(VALUES)


@pytest.mark.slow
@examples(75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_changed_manifest_spoils_nothing_for_others(store, crafted, seed):
    draw = random.Random(seed)
    described = json.loads((store[0] / "other" / "manifest.json").read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        mutate(described, draw)
    crafted(sealed(described))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(created=float("nan")),
        lambda one: one.update(created=1e300),
        lambda one: one.update(tokens=float(one["tokens"])),
        lambda one: one.update(model="\ud800"),
        lambda one: one["shape"].update(num_kv_heads=10**12),
        lambda one: one["segments"][0]["parts"][0].update(kv_heads=[0, 10**12]),
        lambda one: one["segments"][0]["parts"].append(dict(one["segments"][0]["parts"][0])),
        lambda one: one.update(format=True),
    ],
    ids=["nan", "date", "float", "surrogate", "heads", "part", "overlap", "format"],
)
def test_a_crafted_manifest_is_one_damaged_context(store, crafted, change):
    described = json.loads((store[0] / "book" / "manifest.json").read_bytes())
    change(described)
    assert "is damaged" in crafted(sealed(described))["damaged"]


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b'"a"', b"[" * 200_000, b"\xff" * 100, b"9" * 10_000])
def test_a_manifest_may_hold_anything(crafted, raw):
    assert "is damaged" in crafted(raw)["damaged"]


def test_a_manifest_without_end_is_not_read(store, crafted):
    path = store[0] / "book" / "manifest.json"
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert "more than 16,777,216 bytes" in crafted()["damaged"]
    path.unlink()
    os.mkfifo(path)
    assert "it is not a file" in crafted()["damaged"]
    path.unlink()
    path.mkdir()
    assert "is damaged" in crafted()["damaged"]


@pytest.mark.parametrize("name", ["ends with a space ", "x" * 101, "é" * 121, "\udcff"])
def test_other_directories_are_no_contexts(store, crafted, name):
    root, _ = store
    os.makedirs(root / name)
    shutil.copy(root / "other" / "manifest.json", root / name)
    try:
        crafted()
    finally:
        shutil.rmtree(root / name)


def test_what_is_not_a_context_is_not_removed(pair, capfd, tmp_path, monkeypatch):
    """A user's own directory in the store's place, before and after a text is saved to it."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text(TEXT)
    notes = tmp_path / "contexts" / "notes"
    notes.mkdir(parents=True)
    for name in ("mine.txt", "weights.safetensors", ".hidden"):
        (notes / name).write_text("mine")
    (notes / "folder").mkdir()
    mine = sorted(path.name for path in notes.iterdir())

    def triforce(*arguments, expect=0):
        outcome = run_here(capfd, *arguments)
        assert outcome.code == expect, outcome.err
        return outcome

    long_ago = time.time() - 7200

    def age():
        for place in (tmp_path / "contexts").iterdir():
            os.utime(place, (long_ago, long_ago))

    age()
    triforce("contexts", "prune", "--keep", 0)
    assert "holds nothing" in triforce("contexts", "rm", "notes", expect=1).err
    assert sorted(path.name for path in notes.iterdir()) == mine
    triforce("read", tmp_path / "book.txt", "--as", "notes", "--model", pair[0], "--device", "cpu")
    triforce("contexts", "rm", "notes")
    age()
    triforce("contexts", "prune", "--keep", 0)
    left = {path.name for path in notes.iterdir()}
    assert left - set(mine) <= {".triforce-context"} and left >= set(mine)


def test_what_is_left_of_a_context_is_removed(pair, capfd, tmp_path, monkeypatch):
    """Its removal was broken off an hour ago."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text(TEXT)
    book = tmp_path / "contexts" / "book"
    assert run_here(capfd, "read", tmp_path / "book.txt", "--model", pair[0], "--device", "cpu").code == 0
    (book / "manifest.json").unlink()
    assert run_here(capfd, "contexts", "prune", "--keep", 0).code == 0 and book.exists(), "it may just be copied here"
    long_ago = time.time() - 7200
    os.utime(book, (long_ago, long_ago))
    assert run_here(capfd, "contexts", "prune", "--keep", 0).code == 0 and not book.exists()
