"""Damage to saved contexts by chance: what disks, copies and curious people do to files."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from decoded import flags_of, halves
from tiny import random_tokens
from tiny_contexts import HEAD_DIM, MARKER, NAME, TEXT, TinyContexts
from triforce.offload.contexts.manifest import VERSION

ALIKE = [*TEXT[:100], *random_tokens(40, seed=13)]
"""The text of another context, which begins like the first."""


def save_generations(tiny: TinyContexts, place: Path) -> Path:
    """Writes to `place` a store `now` with two contexts that begin alike, and `before`, as it was some tokens ago."""
    tiny.read(place / "now", TEXT[:100])
    tiny.read(place / "now", ALIKE[:120], name="alike")
    shutil.copytree(place / "now", place / "before")
    tiny.read(place / "now", TEXT)
    tiny.read(place / "now", ALIKE, name="alike")
    return place


def damage(generations: Path, place: Path, rng: random.Random) -> str:
    """Copies the store `now` to `place` and damages something of its context `book`; what was done."""
    shutil.copytree(generations / "now", place)
    kind = rng.choice(list(_KINDS))
    return f"{kind}: {_KINDS[kind](place / NAME, generations / 'before' / NAME, rng)}"


def leaves_as_it_was(generations: Path, place: Path) -> bool:
    """Whether every file of the damaged context that matters is as it was, but perhaps for padding."""
    return all(_matters(path) == _matters(place / NAME / path.name) for path in (generations / "now" / NAME).iterdir())


def _matters(path: Path) -> bytes | None:
    """What counts of a file: all but the padding of its tensors."""
    if not path.is_file():
        return None
    raw = path.read_bytes()
    if path.suffix != ".safetensors":
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(raw)).encode()  # white space does not matter
        return raw
    try:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        metadata, at = header["__metadata__"], 8 + length
        tokens, packed = int(metadata["tokens"]), "packed" in header
        first, stop = map(int, metadata["kv_heads"].split(" ")[0].split(":"))
        heads, layers = stop - first, sum(one.startswith("layer.") for one in header)
        flags = torch.empty(0)
        if packed:
            content = raw[at + header["packed"]["data_offsets"][0] :]
            flags = flags_of(torch.frombuffer(bytearray(content), dtype=torch.uint8), layers, heads, tokens)
        kept = [raw[:at]]
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            first, last = tensor["data_offsets"]
            content = raw[at + first : at + last]
            if name == "token_ids":
                content = content[: 4 * tokens]
            elif name == "checksums":
                content = content[: 8 * heads * layers * -(-tokens // (512 if packed else 1024))]
            elif name == "packed":
                content = content[: 2 * heads * layers * -(-tokens // 512)]
            elif packed:
                used = halves(flags[int(name.removeprefix("layer."))], tokens, HEAD_DIM)
                content = b"".join(content[one.start : one.start + one.size] for one in used)
            else:
                rows = tensor["shape"][2]
                row = len(content) // (2 * tensor["shape"][0] * rows)
                places = range(0, len(content), rows * row)
                content = b"".join(content[place : place + tokens * row] for place in places)
            kept.append(content)
        return b"".join(kept) + str(len(raw)).encode()
    except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError, AttributeError, RuntimeError):
        return raw


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name != MARKER)


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _replace(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # the file may have several names
    path.write_bytes(content)


def _flip(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    raw = bytearray(path.read_bytes())
    places = [rng.randrange(len(raw)) for _ in range(rng.choice([1, 1, 1, 3]))]
    for at in places:
        raw[at] ^= 1 << rng.randrange(8)
    _replace(path, bytes(raw))
    return f"{path.name} at {places}"


def _scribble(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    size = rng.choice([1, 8, 512, 4096, len(raw)])
    fill = rng.choice([bytes, rng.randbytes, lambda count: b"\xff" * count])  # which are NaNs
    raw[at : at + size] = fill(len(raw[at : at + size]))
    _replace(path, bytes(raw))
    return f"{path.name}, {size} bytes at {at}"


def _truncate(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    size = rng.choice([0, 1, 7, 8, 4095, 4096, rng.randrange(path.stat().st_size)])
    _replace(path, path.read_bytes()[:size])
    return f"{path.name} to {size}"


def _append(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    more = rng.randbytes(rng.choice([1, 100, 4096]))
    _replace(path, path.read_bytes() + more)
    return f"{len(more)} bytes to {path.name}"


def _swap(one: Path, other: Path) -> str:
    first, second = one.read_bytes(), other.read_bytes()
    _replace(one, second)
    _replace(other, first)
    return f"{one.name} and {other.parent.name}/{other.name}"


def _swap_within(directory: Path, before: Path, rng: random.Random) -> str:
    return _swap(*rng.sample(_files(directory), 2))


def _swap_contexts(directory: Path, before: Path, rng: random.Random) -> str:
    other = directory.parent / "alike"
    if rng.random() < 0.2:
        return _swap(directory / "manifest.json", other / "manifest.json")
    return _swap(rng.choice(_segments(directory)), rng.choice(_segments(other)))


def _older(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    old = before / path.name if (before / path.name).exists() else rng.choice(_segments(before))
    _replace(path, old.read_bytes())
    return f"{path.name} by the older {old.name}"


def _delete(directory: Path, before: Path, rng: random.Random) -> str:
    path = rng.choice(_files(directory))
    path.unlink()
    if rng.random() < 0.2:
        path.mkdir()
        return f"{path.name}, a directory in its place"
    if rng.random() < 0.2:
        os.symlink(path.name, path)
        return f"{path.name}, a link to itself in its place"
    return path.name


def _edit(directory: Path, before: Path, rng: random.Random) -> str:
    path = directory / "manifest.json"
    raw = json.loads(path.read_bytes())
    places = list(_places(raw))
    holder, key = rng.choice(places)
    value = holder[key]
    holder[key] = new = _other(value, rng)
    _replace(path, json.dumps(raw).encode())
    return f"{key!r} from {value!r} to {new!r}"[:200]


def _places(raw: Any) -> Any:
    """Every field in a JSON document, as what holds it and its key."""
    for key in range(len(raw)) if isinstance(raw, list) else raw:
        yield raw, key
        if isinstance(raw[key], list | dict):
            yield from _places(raw[key])


def _other(value: Any, rng: random.Random) -> Any:
    choices = [None, 0, -1, 10**9, "", "x", [], {}, True]
    if isinstance(value, int):
        choices += [value + 1, value - 1, float(value) + 0.5] * 4
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        choices += [value[:at] + rng.choice("0af.z") + value[at + 1 :], value[:-1]] * 4
    return rng.choice([one for one in choices if one != value or type(one) is not type(value)])


def _newer(directory: Path, before: Path, rng: random.Random) -> str:
    path = directory / "manifest.json"
    raw = json.loads(path.read_bytes()) | {"format": rng.choice([VERSION + 1, 7, 10**6])}
    _replace(path, json.dumps(raw).encode())
    return f"format {raw['format']}"


def _nonsense(directory: Path, before: Path, rng: random.Random) -> str:
    texts = ["", "null", "[]", "{}", '"x"', "1", "[" * 5000, '{"checksum": 1}', '{"format": 1, "checksum": []}', "\xff"]
    text = rng.choice(texts)
    _replace(directory / "manifest.json", text.encode("latin-1"))
    return text[:40]


_KINDS: dict[str, Callable[[Path, Path, random.Random], str]] = {
    "flip": _flip,
    "scribble": _scribble,
    "truncate": _truncate,
    "append": _append,
    "swap within": _swap_within,
    "swap contexts": _swap_contexts,
    "older": _older,
    "delete": _delete,
    "edit": _edit,
    "newer": _newer,
    "nonsense": _nonsense,
}


def check_damaged(tiny: TinyContexts, generations: Path, place: Path, rng: random.Random, *, mend: bool) -> str:
    """Damages a store and asks it: no other tokens, and what is damaged is found. The outcome in a word."""
    done = damage(generations, place, rng)
    try:
        return _check(tiny, generations, place, rng, mend)
    except Exception as error:
        raise AssertionError(f"{done}: {type(error).__name__}: {error}") from error


def _check(tiny: TinyContexts, generations: Path, place: Path, rng: random.Random, mend: bool) -> str:
    from tiny_contexts import assert_whole, store_at
    from triforce.offload import ContextError

    same = leaves_as_it_was(generations, place)
    outcome = tiny.ask(place, which=rng.randrange(2), undamaged=generations / "now")
    store = store_at(place)
    try:
        wrong = [reason for _, reason in store.verify(NAME) if reason]
        complete = store.load(NAME).complete
    except ContextError:
        wrong, complete = ["its manifest"], False
    assert (outcome == "whole") == (not wrong), (outcome, wrong)
    assert same or wrong or not complete or _is_older(generations, place), "damage that was not found"
    if mend:
        try:
            tiny.read(place)
        except ContextError as error:
            # A manifest that cannot be read, or is of another text, is not overwritten: who knows what it is of.
            assert "contexts rm" in str(error) or "newer" in str(error), error
            assert outcome == "refused" or "another text" in str(error) or "cannot be told" in str(error), error
        else:
            assert_whole(place)
            assert tiny.ask(place) == "whole"
    return outcome


def _is_older(generations: Path, place: Path) -> bool:
    """Whether the manifest is the one of some tokens ago, which is whole."""
    old = generations / "before" / NAME / "manifest.json"
    return (place / NAME / "manifest.json").read_bytes() == old.read_bytes()
