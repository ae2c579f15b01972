"""Saved contexts of models with linear attention: runs start where a segment ends, from the states behind it, and texts
stay those of transformers."""

import json
from dataclasses import replace

import pytest
import torch
import xxhash
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import ContextError, ContextRequest, ContextStore, Engine, Sampling
from triforce.offload.caches.states import States
from triforce.offload.contexts.model import _states
from triforce.offload.contexts.segments.state_rows import as_rows, from_rows
from triforce.tp.decoder import Decoder, _LinearAttention
from triforce.tp.model.config import ModelConfig
from triforce.tp.model.linear_attention import LinearAttention, LinearNames

CPU = torch.device("cpu")
SEGMENT = 64
TEXT = random_tokens(420, seed=3)
END = [*TEXT[:400], *TEXT[40:70]]
"""The saved text and a question."""

GREEDY = Sampling(0.0)
BOOK, FIND = ContextRequest("book"), ContextRequest(find=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrids")
    save_llama(root / "draft", seed=4, num_hidden_layers=1)
    return root, {family: save_family(root / family, family, seed=1) for family in ("qwen3-next", "qwen3.5")}


@pytest.fixture
def store(tmp_path):
    return ContextStore(tmp_path / "contexts", segment_tokens=SEGMENT)


def engine(models, store, family="qwen3-next", **settings):
    root, _ = models
    given = {"device": "cpu", "dtype": "float32", "budget": 64, "tiers": 3, "store": store}
    return Engine.load(root / family, root / "draft", **given | settings)


def answer(asked, prompt, contexts=None, n=12):
    """The tokens, how many of the prompt were there, and the warnings."""
    stats = asked.generate(prompt, GREEDY, n, ignore_eos=True, contexts=contexts).stats
    return stats["token_ids"], stats["reused_tokens"], stats["warnings"]


def files(store, name="book"):
    """Those with states, in the order of segments."""
    return sorted((store.root / name).glob("*.s[0-9]*.safetensors"))


def flip(path, at=4096):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3-next", {}), ("qwen3.5", {"resident": 0.0}), ("qwen3.5", {"tiers": 1})],
    ids=["resident", "streamed", "one tier"],
)
def test_a_saved_text_is_restored_up_to_the_end_of_a_segment(models, store, family, settings):
    model = models[1][family]
    saved = engine(models, store, family, **settings).read(TEXT[:400], "book")
    assert saved.complete and [wrong for _, wrong in store.verify("book") if wrong] == []
    assert saved.kv_bytes <= store.disk_bytes(["book"])
    short, partly, other = TEXT[:400], [*TEXT[:300], *TEXT[10:60]], [*TEXT[:50], *TEXT[:30]]
    cases = [(END, BOOK, 400), (short, BOOK, 384), (partly, FIND, 256), (TEXT[:260], FIND, 192), (other, BOOK, 0)]
    for prompt, contexts, expected in cases:
        got = answer(engine(models, store, family, **settings), prompt, contexts)
        assert got == (greedy_oracle(model, prompt, 12), expected, [])


def test_a_second_question_goes_on_from_memory(models, store):
    """The states behind what was restored stay."""
    model = models[1]["qwen3-next"]
    engine(models, store).read(TEXT[:300], "book")
    asked = engine(models, store)
    for first in (10, 40):
        prompt = [*TEXT[:300], *TEXT[first : first + 20]]
        text, reused, _ = answer(asked, prompt, BOOK)
        assert text == greedy_oracle(model, prompt, 12, text) and reused == 300
        for path in files(store):
            path.unlink()  # nobody needs them any more


def test_a_text_that_grew_is_saved_with_the_states_behind_all_its_segments(models, store):
    model = models[1]["qwen3-next"]
    for tokens in (100, 103, 300, 400):
        grown = engine(models, store).read(TEXT[:tokens], "book")
        assert grown.saved == tokens and len(files(store)) == len(grown.segments)
        assert [wrong for _, wrong in store.verify("book") if wrong] == []
    assert answer(engine(models, store), END, BOOK) == (greedy_oracle(model, END, 12), 400, [])


def test_what_was_read_before_is_read_again_to_be_saved(models, store):
    """Behind its first segments the states are gone."""
    model, asked = models[1]["qwen3-next"], engine(models, store)
    answer(asked, TEXT[:400])
    _, reused, warnings = answer(asked, TEXT[:400], ContextRequest(save="book", required=True))
    assert (reused, warnings) == (0, []) and store.load("book").complete
    assert answer(engine(models, store), END, BOOK) == (greedy_oracle(model, END, 12), 400, [])


def test_another_context_of_a_text_that_begins_alike_shares_its_files(models, store):
    engine(models, store).read(TEXT[:400], "book")
    other = [*TEXT[:330], *TEXT[:50]]
    engine(models, store).read(other, "other")
    inodes = [{path.stat().st_ino for path in files(store, name)} for name in ("book", "other")]
    assert len(inodes[0] & inodes[1]) == 5
    shorter = ContextRequest(find=True, save="shorter", save_tokens=300)
    assert answer(engine(models, store), END, shorter)[2] == []
    assert store.load("shorter").complete and [wrong for _, wrong in store.verify("shorter") if wrong] == []


@pytest.mark.parametrize("damaged", [6, 5, 0])
def test_damaged_states_are_found_and_read_again(models, store, damaged):
    engine(models, store).read(TEXT[:400], "book")
    name = files(store)[damaged]
    flip(name)
    wrong = [index for index, (_, reason) in enumerate(store.verify("book")) if reason]
    assert wrong == [damaged]
    until = min(SEGMENT * (damaged + 1), 400)
    prompt = [*TEXT[:until], *TEXT[40:70]]
    text, reused, warnings = answer(engine(models, store), prompt, BOOK)
    assert text == greedy_oracle(models[1]["qwen3-next"], prompt, 12, text)
    assert reused == SEGMENT * damaged and name.name in warnings[0] and "is damaged in positions" in warnings[0]
    engine(models, store).read(TEXT[:400], "book")
    assert [reason for _, reason in store.verify("book") if reason] == []
    assert answer(engine(models, store), prompt, BOOK)[1:] == (until, [])


@pytest.mark.parametrize("damage", ["gone", "cut", "another's", "nan"])
def test_states_that_are_not_those_of_the_segment_are_never_used(models, store, damage):
    engine(models, store).read(TEXT[:400], "book")
    last, before = files(store)[-1], files(store)[-2]
    if damage == "gone":
        last.unlink()
    elif damage == "cut":
        last.write_bytes(last.read_bytes()[:-4096])
    elif damage == "another's":
        last.write_bytes(before.read_bytes())
    else:
        raw = bytearray(last.read_bytes())
        raw[4096:8192] = b"\xff" * 4096
        last.write_bytes(bytes(raw))
    text, reused, warnings = answer(engine(models, store), END, BOOK)
    assert text == greedy_oracle(models[1]["qwen3-next"], END, 12, text) and reused == 384 and len(warnings) == 1


def test_a_text_of_one_segment_is_mended(models, store):
    """None of it can be restored."""
    engine(models, store).read(TEXT[:40], "book")
    flip(files(store)[0])
    engine(models, store).read(TEXT[:40], "book")
    assert [reason for _, reason in store.verify("book") if reason] == []
    assert engine(models, store).read(TEXT[:43], "book").saved == 43


def test_restored_in_16_bits_is_as_read(models, store):
    for pack in ("off", "on"):
        reads = engine(models, store, dtype="bfloat16", pack=pack)
        reads.read(TEXT[:400], pack)
        kept = answer(reads, END)
        assert kept == answer(engine(models, store, dtype="bfloat16"), END, ContextRequest(pack))
        assert kept[1:] == (400, [])


def test_any_number_of_ranks_restores_what_others_wrote(models, tmp_path):
    root, of_family = models
    job = {"model": str(root / "qwen3-next"), "draft": str(root / "draft"), "prompt": TEXT[:400], "new_tokens": 12}
    job |= {"context": "book", "settings": {"budget": 64}}
    stores = {name: ContextStore(tmp_path / name, segment_tokens=SEGMENT) for name in ("one", "two")}
    want = greedy_oracle(of_family["qwen3-next"], TEXT[:400], 12)
    engine(models, stores["one"]).read(TEXT[:400], "book")
    jobs = [job | {"store": str(stores["one"].root)}, job | {"store": str(stores["two"].root), "read": "book"}]
    (restored, written) = run_jobs(jobs, 2)
    for rank in restored:
        assert (rank["token_ids"], rank["reused_tokens"], rank["warnings"]) == (want, 384, [])
    assert all(rank["token_ids"] == want for rank in written)
    (segment, *_) = stores["two"].load("book").segments
    assert [part.kv_heads for part in segment.states] == [(0, 1), (1, 2)]
    assert [reason for _, reason in stores["two"].verify("book") if reason] == []
    assert answer(engine(models, stores["two"]), TEXT[:400], BOOK) == (want, 384, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["shape"].pop("states"),
        lambda one: one["shape"]["states"].update(numbers=10**12),
        lambda one: one["shape"]["states"].update(key_heads="2"),
        lambda one: one["shape"].update(states=[2, 2, 2]),
        lambda one: one["segments"][1].pop("states"),
        lambda one: one["segments"][1].update(states=[]),
        lambda one: one["segments"][1]["states"].append(dict(one["segments"][1]["states"][0])),
        lambda one: one["segments"][1]["states"][0].update(kv_heads=[0, 1]),
        lambda one: one["segments"][1]["states"][0].update(file="../x.safetensors"),
        lambda one: one["segments"][1]["states"][0].update(file=one["segments"][1]["parts"][0]["file"]),
    ],
)
def test_a_crafted_manifest_is_refused(models, store, change):
    engine(models, store).read(TEXT[:150], "book")
    path = store.root / "book" / "manifest.json"
    described = json.loads(path.read_bytes())
    assert described["format"] == 4
    del described["checksum"]
    change(described)
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    path.write_text(json.dumps(described | {"checksum": checksum}))
    with pytest.raises(ContextError, match=r"manifest of the context 'book' is damaged"):
        answer(engine(models, store), END, BOOK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_come_back_as_they_were_in_parts_by_key_head(models, dtype):
    root, _ = models
    config = ModelConfig.load(root / "qwen3-next")
    decoder = Decoder.load(root / "qwen3-next", dtype=dtype, device=CPU)
    linear, shape = config.linear, _states(config)
    assert linear and shape
    states, back = States(linear, dtype, CPU), States(linear, dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for layer in range(len(linear.layers)):
        inputs = torch.randn(20, linear.channels, generator=generator).to(dtype)
        gates = torch.randn(20, 2 * linear.value_heads, generator=generator).to(dtype)
        if not layer:
            states.begin(0, 20)
        attention = decoder._layers[linear.layers[layer]].attention
        assert isinstance(attention, _LinearAttention)
        states.advance(layer, inputs, gates, attention.delta)
    assert states.holds(20) and not states.holds(19)
    for layer, (one, other) in enumerate(zip(states._working, back._committed, strict=True)):
        numbers = states.export(layer, 20)()
        assert numbers.shape == (linear.key_heads, linear.key_head_numbers)
        rows = as_rows(numbers)
        of_heads = [from_rows(rows[:, [head]], shape) for head in range(linear.key_heads)]
        back.restore(layer, 20, torch.cat(of_heads))
        assert torch.equal(one.state, other.state) and torch.equal(one.past, other.past)
    back.restored(20)
    assert back.reachable(25) == 20 and back.length == 20


def test_tiled_value_heads_are_saved_by_key_head():
    """As neighbouring ones are, so that files do not depend on how many ranks have written them."""
    names = LinearNames.of("qkv", "z", "b", "a")
    apart = LinearAttention((0,), key_heads=2, value_heads=6, key_dim=3, value_dim=5, kernel=4, names=names)
    tiled = replace(apart, tiled=True)
    order = [0, 3, 1, 4, 2, 5]  # of the tiled ones, those that are neighbours else
    assert [tiled.by_key_head[i] for i in range(6)] == [0, 2, 4, 1, 3, 5]
    states = [States(one, torch.float32, torch.device("cpu")) for one in (apart, tiled)]
    held, other = (one._committed[0] for one in states)
    held.state.normal_()
    held.past.normal_()
    held.position = other.position = 9
    q_k, v = held.past.split((12, 30), dim=1)
    other.state.copy_(held.state[order])
    other.past.copy_(torch.cat((q_k, v.unflatten(1, (6, 5))[:, order].flatten(1)), dim=1))
    exported = states[0].export(0, 9)()
    assert torch.equal(states[1].export(0, 9)(), exported)
    for one, linear in zip(states, (apart, tiled), strict=True):
        again = States(linear, torch.float32, torch.device("cpu"))
        again.restore(0, 9, exported)
        assert torch.equal(again._committed[0].state, one._committed[0].state)
        assert torch.equal(again._committed[0].past, one._committed[0].past)
