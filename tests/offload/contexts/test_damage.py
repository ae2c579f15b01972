"""Damaged contexts: never another token, always a word about it, and reading the text again mends it."""

import json
import random
import shutil

import pytest
from corruptions import check_damaged, save_generations
from tiny_contexts import NAME, NEW_TOKENS, QUESTION, SAMPLINGS, SEGMENT, TEXT, assert_whole, store_at
from triforce.offload import ContextError, ContextRequest
from triforce.offload.contexts.manifest import VERSION
from triforce.offload.contexts.segments.layout import PackedLayout


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "packed"])
def generations(request, tiny, tiny_packed, tmp_path_factory):
    """What is damaged, and the engine that asks it."""
    one = tiny_packed if request.param else tiny
    return one, save_generations(one, tmp_path_factory.mktemp("generations"))


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("seed", range(40))
def test_no_damage_gives_another_token(generations, tmp_path, seed):
    one, undamaged = generations
    rng = random.Random(seed)
    for case in range(8):
        check_damaged(one, undamaged, tmp_path / str(case), rng, mend=case % 3 == 0)
        shutil.rmtree(tmp_path / str(case))


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("index", range(3))
def test_a_damaged_segment_is_named_and_only_from_it_on_is_read_again(tiny, root, index):
    segment = store_at(root).load(NAME).segments[index]
    file = segment.parts[0].file
    flip(root / NAME / file, 4096 + 5000)
    result = tiny.on(root).generate(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=ContextRequest(name=NAME))
    assert result.token_ids == tiny.want[0]
    assert result.stats["reused_tokens"] == index * SEGMENT
    (warning,) = result.stats["warnings"]
    for words in (
        NAME,
        file,
        f"positions {segment.first:,} to {segment.stop:,}",
        "read the text again under this name",
    ):
        assert words in warning
    assert [reason is not None for _, reason in store_at(root).verify(NAME)] == [one == index for one in range(3)]
    tiny.read(root)
    assert_whole(root)


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


def test_damage_that_another_context_shares_does_not_come_back(tiny, root):
    """Both contexts name the same file; mending one writes a new one for it alone."""
    tiny.read(root, TEXT[:130], name="another")
    shared = store_at(root).load(NAME).segments[0].parts[0].file
    flip(root / NAME / shared, 4096 + 5000)
    tiny.read(root)
    assert_whole(root)
    assert tiny.ask(root, name="another") == "damaged"
    tiny.read(root, TEXT[:130], name="another")
    assert_whole(root, TEXT[:130], name="another")


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


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '"x"', "1", "[" * 5000, '{"checksum": 1}', "\xff", "{"])
def test_a_manifest_of_nonsense_is_refused_by_name(tiny, root, content):
    (root / NAME / "manifest.json").write_bytes(content.encode("latin-1"))
    assert tiny.ask(root) == "refused"
    with pytest.raises(ContextError, match=f"(?s){NAME}.*damaged.*contexts rm {NAME}"):
        tiny.read(root)
    store_at(root).remove(NAME)
    tiny.read(root)
    assert_whole(root)


def test_a_newer_format_is_refused_by_name(tiny, root):
    path = root / NAME / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": VERSION + 1}))
    with pytest.raises(ContextError, match=f"(?s){NAME}.*newer.*update triforce"):
        tiny.read(root)
    assert tiny.ask(root) == "refused"


def test_another_models_context_is_refused_with_both_names(tiny, root, tmp_path):
    from tiny import save_llama
    from triforce.offload import Engine

    save_llama(tmp_path / "other", seed=2, num_hidden_layers=2, num_key_value_heads=2)
    for directory, dtype in ((tmp_path / "other", "float32"), (tiny.model, "bfloat16")):
        engine = Engine.load(directory, "none", device="cpu", dtype=dtype, store=store_at(root))
        with pytest.raises(ContextError, match=rf"(?s){NAME}.*another model.*{tiny.model}.*--dtype"):
            engine.generate(TEXT, max_new_tokens=1, contexts=ContextRequest(name=NAME))
        with pytest.raises(ContextError, match="another model"):
            engine.read(TEXT, NAME)
        assert engine.generate(TEXT, max_new_tokens=1, contexts=ContextRequest(find=True)).stats["reused_tokens"] == 0
