"""Damaged contexts: never another token, always a word about it, and reading the text again mends it."""

import random
import shutil

import pytest
from corruptions import check_damaged, save_generations
from tiny_contexts import NAME, NEW_TOKENS, QUESTION, SAMPLINGS, SEGMENT, TEXT, assert_whole, store_at
from triforce.offload import ContextError, ContextRequest


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


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '"x"', "1", "[" * 5000, '{"checksum": 1}', "\xff", "{"])
def test_a_manifest_of_nonsense_is_refused_by_name(tiny, root, content):
    (root / NAME / "manifest.json").write_bytes(content.encode("latin-1"))
    assert tiny.ask(root) == "refused"
    with pytest.raises(ContextError, match=f"(?s){NAME}.*damaged.*contexts rm {NAME}"):
        tiny.read(root)
    store_at(root).remove(NAME)
    tiny.read(root)
    assert_whole(root)


def test_another_models_context_is_refused_with_both_names(tiny, root, tmp_path):
    from tiny import save_llama
    from triforce.offload import Engine

    save_llama(tmp_path / "other", seed=2, num_hidden_layers=2, num_key_value_heads=2)
    for directory, dtype in ((tmp_path / "other", "float32"), (tiny.model, "bfloat16")):
        engine = Engine.load(directory, "none", device="cpu", dtype=dtype, store=store_at(root))
        with pytest.raises(ContextError, match=rf"(?s){NAME}.*a different model.*{tiny.model}.*--dtype"):
            engine.generate(TEXT, max_new_tokens=1, contexts=ContextRequest(name=NAME))
        with pytest.raises(ContextError, match="a different model"):
            engine.read(TEXT, NAME)
        assert engine.generate(TEXT, max_new_tokens=1, contexts=ContextRequest(find=True)).stats["reused_tokens"] == 0
