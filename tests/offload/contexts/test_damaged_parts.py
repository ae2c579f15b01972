"""Damage in each part of a saved context, and manifests that were written by hand."""

import json

import pytest
from tiny_contexts import NAME, assert_whole, store_at
from triforce.offload import ContextError
from triforce.offload.contexts.manifest import VERSION
from triforce.offload.contexts.segments.layout import PackedLayout


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(bytes(raw))


PARTS = ["header", "keys", "token ids", "checksums"]


@pytest.mark.parametrize(
    ("part", "packed"), [*((part, False) for part in PARTS), *((part, True) for part in [*PARTS, "packed"])]
)
def test_damage_in_any_part_of_a_segment_is_mended_by_reading_again(request, tmp_path, part, packed):
    tiny = request.getfixturevalue("tiny_packed" if packed else "tiny")
    root = tmp_path / "contexts"
    tiny.read(root)
    manifest = store_at(root).load(NAME)
    segment = manifest.segments[1]
    with manifest.open(root / NAME, segment, segment.parts[0]) as file:
        at = {"header": 40, "keys": file.layout.data_start}
        at |= {"token ids": file.layout.ids_start, "checksums": file.layout.sums_start}
        if isinstance(file.layout, PackedLayout):
            at["packed"] = file.layout.flags_start
    flip(root / NAME / segment.parts[0].file, at[part])
    assert [reason is not None for _, reason in store_at(root).verify(NAME)] == [False, True, False]
    first = (root / NAME / manifest.segments[0].parts[0].file).stat().st_ino
    tiny.read(root)
    assert_whole(root)
    kept = store_at(root).load(NAME).segments[0].parts[0].file
    assert (root / NAME / kept).stat().st_ino == first, "what was not damaged stays"


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "manifest.json", "a/b.safetensors", ""])
def test_a_manifest_names_files_of_its_own_directory_only(root, name):
    from triforce.offload.contexts import manifest

    path = root / NAME / "manifest.json"
    raw = json.loads(path.read_bytes())
    raw["segments"][0]["parts"][0]["file"] = name
    del raw["checksum"]
    path.write_text(json.dumps(raw | {"checksum": manifest._checksum(raw)}))
    with pytest.raises(ContextError, match="damaged"):
        store_at(root).load(NAME)


def test_a_newer_format_is_refused_by_name(tiny, root):
    path = root / NAME / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": VERSION + 1}))
    with pytest.raises(ContextError, match=f"(?s){NAME}.*newer.*update triforce"):
        tiny.read(root)
    assert tiny.ask(root) == "refused"
