"""The decoder computes what transformers computes, fed in any parts, from one weight file or shards."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import SHAPES, random_tokens, save_llama
from triforce.kernels.selection import STEP_ROWS
from triforce.offload.caches.full import FullCache
from triforce.tp.decoder import (
    PREFILL_ROWS,
    PREFILL_TOKENS,
    TAIL_ROWS,
    TILING,
    Decoder,
    Tiling,
)

CPU = torch.device("cpu")
tiles, prefill_stops, shareable = TILING.tiles, TILING.prefill_stops, TILING.shareable


def load(directory, tiling=TILING):
    decoder = Decoder.load(directory, dtype=torch.float32, device=CPU, tiling=tiling)
    cache = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=600)
    return decoder, cache


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(tmp_path, shape):
    model = save_llama(tmp_path, **SHAPES[shape])
    decoder, cache = load(tmp_path)
    tokens = random_tokens(500)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    got = decoder.forward(torch.tensor(tokens), cache, num_logits=500)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("parts", [[500], [1] * 20 + [480], [100, 3, 297, 100], [70, 13, 417]])
def test_the_parts_a_text_comes_in_do_not_matter(tmp_path, parts):
    model = save_llama(tmp_path, num_key_value_heads=2)
    decoder, cache = load(tmp_path)
    tokens = random_tokens(500)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    start = 0
    for n in parts:
        got = decoder.forward(torch.tensor(tokens[start : start + n]), cache, num_logits=n)
        assert (got - want[start : start + n]).abs().max() < 1e-4
        start += n
    assert cache.length == 500


def test_layer_major_prefill_splits_rows_without_a_trace(tmp_path):
    save_llama(tmp_path)
    tokens = torch.tensor(random_tokens(500))
    decoder, whole = load(tmp_path)
    want = decoder.forward(tokens, whole, num_logits=5)
    decoder, split = load(tmp_path, Tiling(prefill_rows=33, tail_rows=33))
    assert torch.allclose(decoder.forward(tokens, split, num_logits=5), want, atol=1e-4)


def test_progress_of_a_prefill_rises_to_one(tmp_path):
    save_llama(tmp_path)
    decoder, cache = load(tmp_path, Tiling(prefill_rows=100, tail_rows=100))
    shares = []
    decoder.forward(torch.tensor(random_tokens(500)), cache, on_progress=shares.append)
    assert len(shares) == 3 * 5
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == pytest.approx(1.0)


def test_weights_in_shards_equal_weights_in_one_file(tmp_path):
    model = save_llama(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="150KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    tokens = torch.tensor(random_tokens(50))
    logits = []
    for name in ("one", "shards"):
        decoder, cache = load(tmp_path / name)
        logits.append(decoder.forward(tokens, cache))
    assert torch.equal(*logits)


@given(length=st.integers(1, 30_000), start=st.integers(0, 29))
def test_a_part_of_a_prefill_does_not_depend_on_where_reading_began(length, start):
    """As long as it began where a part begins, and more than the rows of a step are left."""
    start *= TAIL_ROWS
    whole = list(itertools.accumulate(tiles(0, length), initial=0))
    assert whole[-1] == length
    if start in whole and length - start > STEP_ROWS:
        assert list(itertools.accumulate(tiles(start, length - start), initial=start)) == whole[whole.index(start) :]


@given(start=st.integers(0, 200_000), n=st.integers(1, 1_200_000))
def test_a_long_prompt_is_read_in_passes_with_the_tiles_of_one(start, n):
    stop = start + n
    ends = prefill_stops(start, stop)
    passes = list(itertools.pairwise([start, *ends]))
    assert ends[-1] == stop and all(0 < end - first <= PREFILL_TOKENS + PREFILL_ROWS for first, end in passes)
    assert len(ends) == 1 or all(end - first > STEP_ROWS for first, end in passes[1:])
    whole = tiles(start, n)
    assert whole == [size for first, end in passes for size in tiles(first, end - first, stop)]


def test_a_long_prompt_read_in_passes_gives_the_bits_of_one(tmp_path):
    save_llama(tmp_path)
    tokens = torch.tensor(random_tokens(1250))
    decoder, _ = load(tmp_path, Tiling(prefill_rows=300, tail_rows=100, prefill_tokens=300))
    whole, parts = (
        FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=1250) for _ in "wp"
    )
    want = decoder.forward(tokens, whole, num_logits=5)
    logits = torch.empty(0)
    ends = decoder.tiling.prefill_stops(0, 1250)
    assert ends == [300, 600, 900, 1250]
    for end in ends:
        logits = decoder.forward(tokens[parts.length : end], parts, num_logits=5, stop=1250)
    assert torch.equal(logits, want)
    for layer in range(decoder.config.num_layers):
        for one, other in zip(parts.slice(layer, 0, 1250), whole.slice(layer, 0, 1250), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(parts.recent_mass(layer), whole.recent_mass(layer))


@given(length=st.integers(1, 30_000), cut=st.integers(1, 7))
def test_a_part_of_a_prefill_does_not_depend_on_where_a_pass_ends(length, cut):
    cut *= PREFILL_ROWS
    if length - cut > STEP_ROWS:
        assert tiles(0, cut, length) + tiles(cut, length - cut) == tiles(0, length)


@pytest.mark.parametrize("length", [8192, 32_768, 8192 + 5, 9000])
def test_questions_about_one_text_take_little_from_what_they_share(length):
    text = length - 32
    assert text - shareable(text, length, length) < TAIL_ROWS


@given(lengths=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)), common=st.integers(0, 20_000))
def test_prompts_share_parts_that_both_have(lengths, common):
    common = min(common, *lengths)
    shared = shareable(common, *lengths)
    assert 0 <= shared <= common
    ends = [set(itertools.accumulate(tiles(0, length), initial=0)) for length in lengths]
    if min(lengths) > STEP_ROWS:
        assert shared in ends[0] and shared in ends[1]
        up_to = [sorted(end for end in of if end <= shared) for of in ends]
        assert up_to[0] == up_to[1]
    assert common - shared < PREFILL_ROWS + TAIL_ROWS


BY_ROWS = replace(TILING, end_rows=256)
"""Where rows of a step do not depend on one another."""


@given(length=st.integers(1, 30_000), start=st.integers(0, 30_000))
def test_the_last_parts_are_steps_where_rows_are_independent(length, start):
    """And the others are those that they were."""
    start = min(start, length - 1)
    last = length // TAIL_ROWS * TAIL_ROWS
    found, before = BY_ROWS.tiles(start, length - start), tiles(start, length - start)
    ends = [start + sum(found[:i]) for i in range(len(found) + 1)]
    assert ends[-1] == length
    if length - start <= STEP_ROWS:
        assert found == before
        return
    assert all(size <= 256 for end, size in zip(ends[1:], found, strict=True) if end > last)
    kept = [end for end in ends[1:] if end <= last]
    assert kept == [end for end in itertools.accumulate(before, initial=start) if start < end <= last]


@given(text=st.integers(1, 30_000), own=st.integers(1, 2000), other=st.integers(1, 2000))
def test_prompts_that_end_in_the_same_rows_share_all_that_they_begin_with(text, own, other):
    length, further = text + own, text + other
    found = BY_ROWS.shareable(text, length, further)
    assert found == BY_ROWS.shareable(text, further, length) <= text
    last = length // TAIL_ROWS * TAIL_ROWS
    if last == further // TAIL_ROWS * TAIL_ROWS and text >= last:
        assert found == text
    else:
        assert found == shareable(text, length, further)
