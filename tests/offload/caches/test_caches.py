"""Rollback is exact: after any pattern of appending and forgetting, a cache equals one that only saw what is left."""

import itertools
import mmap
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tiny import random_tokens, save_family, save_llama
from tiny_caches import append, full_cache, moving_cache, streaming_cache
from triforce.kernels.attention import StepPiece, StepRows, prepared_step
from triforce.kernels.cpu.library import Level, cpu_level
from triforce.kernels.layers import steps_are_compiled
from triforce.kernels.selection import use_kernels
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import MASS_ROWS, RECENT_ROWS, FullCache, MassPart, RecentMass
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache, prefill_streaming
from triforce.offload.caches.synthetic import fill_with_zeros
from triforce.offload.caches.together import JoinedFullCache, together
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.offload.transfer.link import ThreadLink
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder
from triforce.tp.pages import HUGE_PAGE, has_huge_pages

CPU = torch.device("cpu")
PROBE = torch.tensor([1, 2, 3])

forgotten_tokens = st.one_of(st.integers(0, 12), st.integers(0, 60))
steps = st.lists(st.tuples(st.integers(1, 30), forgotten_tokens), min_size=1, max_size=14)
"""Tokens appended, then tokens forgotten, again and again."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, num_hidden_layers=2, num_key_value_heads=2)
    return Decoder.load(directory, dtype=torch.float32, device=CPU)


def play(decoder, cache, history, seed=0, floor=0):
    """Runs `history` on a cache; the tokens that are left. Never forgets below `floor` tokens."""
    tokens = []
    source = iter(random_tokens(1000, seed=seed))
    for appended, forgotten in history:
        new = [next(source) for _ in range(appended)]
        append(decoder, cache, new)
        tokens += new
        tokens = tokens[: max(floor, len(tokens) - forgotten)]
        cache.rollback(len(tokens))
        if cache.length < len(tokens):  # allowed to forget more, as long as it says so
            append(decoder, cache, tokens[cache.length :])
    return tokens


def probe(decoder, cache):
    return decoder.forward(PROBE, cache, num_logits=3)


@given(history=steps)
@examples(80)
@pytest.mark.parametrize("make", [full_cache, moving_cache])
def test_rollback_equals_replay(decoder, make, history):
    cache, replayed = make(decoder), make(decoder)
    tokens = play(decoder, cache, history)
    append(decoder, replayed, tokens)
    assert cache.length == replayed.length == len(tokens)
    error = (probe(decoder, cache) - probe(decoder, replayed)).abs().max()
    assert error < 1e-4, f"logits differ by {error} after {len(tokens)} tokens"


@given(history=steps, prompt_length=st.integers(1, 120), added=st.integers(0, 20))
@examples(60)
def test_retrieval_rollback_equals_replay(decoder, history, prompt_length, added):
    def start():
        full = full_cache(decoder)
        append(decoder, full, random_tokens(prompt_length, seed=1))
        cache = RetrievalCache(full, decoder.rope, budget=24, chunk_size=4)
        cache.refresh()
        append(decoder, full, random_tokens(added, seed=2))
        return full, cache

    full, cache = start()
    floor = cache.length
    tokens = random_tokens(0)
    source = iter(random_tokens(1000, seed=3))
    for appended, forgotten in history:
        new = [next(source) for _ in range(appended)]
        append(decoder, cache, new)
        tokens = (tokens + new)[: max(0, len(tokens) + appended - forgotten)]
        cache.rollback(floor + len(tokens))
    _, replayed = start()
    append(decoder, replayed, tokens)
    assert cache.length == replayed.length
    assert (probe(decoder, cache) - probe(decoder, replayed)).abs().max() < 1e-4
    # After a verification the full cache's own keys and values replace those of the draft tokens.
    for each in (cache, replayed):
        each.rollback(floor)
        each.update_tail()
    assert cache.length == replayed.length == full.length
    assert (probe(decoder, cache) - probe(decoder, replayed)).abs().max() < 1e-4


def test_the_window_of_these_tests_moves_and_forgets_everything_at_times(decoder):
    cache = moving_cache(decoder)
    append(decoder, cache, random_tokens(200))
    assert cache._origins[0] > 4
    cache.rollback(195)
    assert cache.length == 195
    cache.rollback(100)
    assert cache.length == 0


@pytest.mark.parametrize("head_dim", [16, 32])  # the compiled kernels take heads of 32
@pytest.mark.parametrize("parts", [(100,), (90, 1, 1, 5, 3), (20, 33, 40, 7), (60, 25, 1, 2)])
def test_recent_mass_is_the_attention_transformers_reports(tmp_path, parts, head_dim):
    """The mean over the rows of the last passes, each by its number of rows; each part is followed by tokens that are
    rolled back, as a verification's rejected ones are."""
    model = save_llama(tmp_path, num_key_value_heads=2, head_dim=head_dim)
    model.set_attn_implementation("eager")
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    full, known = full_cache(decoder), random_tokens(sum(parts))
    want = [torch.zeros(2, 40) for _ in range(3)]
    taken = 0
    for n in parts:
        tokens = known[: taken + n] + random_tokens(3, seed=n)
        append(decoder, full, tokens[taken:])
        rows = n + 3 if n + 3 <= MASS_ROWS else RECENT_ROWS
        weight = min(1.0, rows / RECENT_ROWS)
        with torch.inference_mode():
            attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
        for mass, attention in zip(want, attentions, strict=True):
            mass[:, -(-taken // 4) :] = 0  # of tokens that were rolled back
            by_head = F.pad(attention[0, :, -rows:], (0, 160 - len(tokens))).unflatten(-1, (-1, 4)).sum(-1)
            mass.lerp_(by_head.unflatten(0, (2, 2)).mean(dim=(1, 2)), weight)
        taken += n
        full.rollback(taken)
        for layer, mass in enumerate(want):
            got = full.recent_mass(layer)
            error = (got - mass[:, : taken // 4]).abs().max()
            assert error < 1e-5, f"after {taken} tokens, layer {layer}: shares differ by {error}"


def test_attention_that_is_not_finite_does_not_stay():
    """A draft token whose numbers overflow is rejected; what came of it must not be added to for ever."""
    mass, lse = RecentMass(1, num_kv_heads=1, max_chunks=4, chunk_size=4), torch.zeros(2, 2)
    good = torch.tensor([[[0.5, 0.5, 0.0, 0.0]] * 2] * 2)
    mass.add(0, 0, [MassPart(0, good, lse)], lse)
    mass.add(0, 2, [MassPart(0, good * torch.tensor([[1.0], [float("nan")]]), lse)], lse)
    mass.add(0, 3, [MassPart(0, good, lse)], lse)
    assert mass.recent(0, 16).isfinite().all() and mass.recent(0, 16)[0, 0] > 0.25


@pytest.mark.parametrize("head_dim", [16, 32])  # the compiled kernels take heads of 32
def test_sequences_that_share_a_text_keep_the_mass_that_each_has_alone(tmp_path, head_dim):
    save_llama(tmp_path, num_key_value_heads=2, head_dim=head_dim)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    text, rest = random_tokens(512, seed=1), [random_tokens(20 + 30 * i, seed=5 + i) for i in range(3)]
    first = sized_cache(decoder, 640)
    append(decoder, first, text + rest[0])
    caches = [first, *(sized_cache(decoder, 640, first) for _ in rest[1:])]
    for cache, tokens in zip(caches[1:], rest[1:], strict=True):
        append(decoder, cache, tokens)
    new = [random_tokens(count, seed=count) for count in (3, 1, 4)]
    joined = together(caches)
    joined.counts = [len(tokens) for tokens in new]
    append(decoder, joined, [token for tokens in new for token in tokens])
    for cache, tokens, added in zip(caches, rest, new, strict=True):
        alone = sized_cache(decoder, 640)
        append(decoder, alone, text + tokens)
        append(decoder, alone, added)
        for layer in range(decoder.config.num_layers):
            got, want = (one.recent_mass(layer) for one in (cache, alone))
            assert got.shape == want.shape
            assert (got - want).abs().max() < 1e-5 * want.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "mistral-window", "qwen2-window"])
def test_steps_of_several_sequences_have_the_bits_that_each_has_alone(tmp_path, dtype, family):
    """Whether the kernels are asked once for all layers of a pass or not: it is not where a block is entered, and of
    layers with windows."""
    save_family(tmp_path, family, head_dim=32, max_position_embeddings=2048)
    decoder, rng = Decoder.load(tmp_path, dtype=dtype, device=CPU), torch.Generator().manual_seed(3)
    sizes = decoder.part.num_heads, decoder.part.num_kv_heads, decoder.part.num_kv_heads

    def rows(heads, count):
        return torch.randn(count, heads, 32, generator=rng).to(dtype).transpose(0, 1)

    first = sized_cache(decoder, 1024, dtype=dtype)
    caches = [first, *(sized_cache(decoder, 1024, first, dtype=dtype) for _ in range(2))]
    alone = [sized_cache(decoder, 1024, dtype=dtype) for _ in caches]
    text = [tuple(rows(heads, 512) for heads in sizes) for _ in range(decoder.config.num_layers)]
    for cache in (first, *alone):
        cache.keep_mass(0)
        attended(cache, text)
    prepared = 0
    for cache in caches[1:]:
        cache.keep_mass(0)
        cache.copy_from(first, 512)
    for counts in ([250, 100, 30], [1, 1, 1], [3, 2, 4], [2, 1, 1], [1, 5, 1], [1, 1, 250], [1, 1, 1]):
        given = [
            [tuple(rows(heads, count) for heads in sizes) for count in counts] for _ in range(decoder.config.num_layers)
        ]
        joined = together(caches)
        assert isinstance(joined, JoinedFullCache)
        joined.counts = counts
        got = attended(joined, [tuple(torch.cat(part, 1) for part in zip(*layer, strict=True)) for layer in given])
        held = len([*joined.held()])
        prepared += held > len(joined.rotation())
        want = [attended(cache, [layer[i] for layer in given]) for i, cache in enumerate(alone)]
        for ours, theirs in zip(got, zip(*want, strict=True), strict=True):
            assert torch.equal(ours, torch.cat(theirs, 1))
    assert (prepared > 0) == (cpu_level() >= Level.AVX512_BF16 and family != "mistral-window")
    for layer in range(decoder.config.num_layers):
        for cache, other in zip(caches, alone, strict=True):
            start = cache.start
            assert all(
                map(torch.equal, cache.slice(layer, start, cache.length), other.slice(layer, start, other.length))
            )


@torch.inference_mode()
def attended(cache, layers):
    """What each layer's queries, keys and values give, in a pass of their own."""
    cache.prepare(layers[0][0].shape[1])
    return [cache.attend(layer, *rows).clone() for layer, rows in enumerate(layers)]


def test_retrieval_caches_of_several_sequences_have_the_bits_that_each_has_alone(tmp_path):
    save_llama(tmp_path, num_key_value_heads=2, head_dim=32)
    decoder, rng = Decoder.load(tmp_path, dtype=torch.bfloat16, device=CPU), torch.Generator().manual_seed(3)
    texts = [random_tokens(count, seed=count) for count in (300, 120, 40)]

    def caches():
        for text in texts:
            full = sized_cache(decoder, 512, dtype=torch.bfloat16)
            append(decoder, full, text)
            found = RetrievalCache(full, decoder.rope, budget=64, chunk_size=4)
            found.refresh()
            yield full, found

    both, others = [*caches()], [*caches()]
    for counts in ([1, 1, 1], [3, 1, 2], [1, 4, 1]):
        given = [
            [tuple(torch.randn(h, n, 32, generator=rng).bfloat16() for h in (4, 2, 2)) for n in counts]
            for _ in range(decoder.config.num_layers)
        ]
        joined = together([found for _, found in both])
        joined.counts = counts
        got = attended(joined, [tuple(torch.cat(part, 1) for part in zip(*layer, strict=True)) for layer in given])
        want = [attended(found, [layer[i] for layer in given]) for i, (_, found) in enumerate(others)]
        for ours, theirs in zip(got, zip(*want, strict=True), strict=True):
            assert torch.equal(ours, torch.cat(theirs, 1))
    assert [found.length for _, found in both] == [found.length for _, found in others]


def test_nothing_is_prepared_where_a_processor_has_no_kernel_that_copies_rows():
    """That kernel is compiled for AVX-512 BF16: another processor would end the process."""
    q, k = torch.randn(1, 4, 32).transpose(0, 1), torch.randn(1, 2, 32).transpose(0, 1)
    caches, piece = [(torch.zeros(2, 64, 32), torch.zeros(2, 64, 32))], StepPiece(slice(0, 1), 0, 0, 64, 3)

    def prepared():
        return prepared_step(StepRows.like(q, k), caches, [[piece]], [(0, 3, slice(0, 1))], scale=0.2)

    assert (prepared() is not None) == steps_are_compiled(CPU, torch.float32, 32)
    with use_kernels(layers="plain"):
        assert prepared() is None


@pytest.mark.skipif(cpu_level() == Level.NONE, reason="needs the compiled kernels")
def test_mass_is_added_by_the_compiled_kernels_as_by_pytorch():
    rng = torch.Generator().manual_seed(1)
    for group, rows, chunks, parts in ((1, 1, 700, 1), (2, 3, 700, 3), (5, 8, 90, 2), (3, 13, 1300, 2)):
        lse = torch.randn(2 * group, rows, generator=rng)
        borders = [round(chunks * i / parts) for i in range(parts + 1)]
        ours, theirs = (RecentMass(1, num_kv_heads=2, max_chunks=chunks + 5, chunk_size=4) for _ in range(2))
        for start in (0, 4 * chunks - 9, 2 * chunks, 4 * chunks - 1):
            wide = torch.rand(2 * group, rows + 2, chunks, generator=rng)
            wide[0, 1, 3], wide[0, 1, 4] = float("nan"), float("inf")
            given = [
                MassPart(first, wide[:, 1 : 1 + rows, first:stop], torch.randn(2 * group, rows, generator=rng))
                for first, stop in pairwise(borders)
            ]
            ours.add(0, start, given, lse)
            with use_kernels(layers="plain"):
                theirs.add(0, start, given, lse)
            got, want = (one.recent(0, 4 * chunks) for one in (ours, theirs))
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
            assert got.isfinite().all()


def test_sequences_that_share_a_text_may_have_blocks_of_other_sizes(tmp_path):
    """Those of 264 tokens are no whole tiles of the compiled kernels, those of 768 are."""
    save_llama(tmp_path, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)

    def cache(block_size, prefix=None):
        config, start = decoder.config, 768 if prefix else 0
        blocks = DeviceBlocks(config, dtype=torch.float32, device=CPU, capacity=1536, block_size=block_size)
        return FullCache(config, decoder.rope, blocks, chunk_size=24, prefix=prefix, start=start)

    text, rest = random_tokens(768, seed=1), random_tokens(300, seed=2)
    first, alone = cache(768), cache(768)
    second = cache(264, first)
    append(decoder, first, [*text, 5])
    append(decoder, second, rest)
    append(decoder, alone, text + rest)
    joined = together([first, second])
    joined.counts = [1, 3]
    got = decoder.forward(torch.tensor([7, 8, 9, 10]), joined, num_logits=3)
    want = decoder.forward(torch.tensor([8, 9, 10]), alone, num_logits=3)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("middle", [0, 256, 500])
@pytest.mark.parametrize("own", [0, 3, 4, 21, 300])
def test_chunks_are_gathered_from_texts_that_others_hold_and_from_its_own_tokens(tmp_path, own, middle):
    """Each head has as many of each as it happens; a part of a choice may have none, or nothing but its own. Holders go
    on with texts of their own."""
    save_llama(tmp_path, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    second = 512 + middle // 256 * 256  # where the last one begins with its own tokens
    tokens = random_tokens(second + own, seed=1)
    cache, alone = sized_cache(decoder, 600), sized_cache(decoder, 1200)
    append(decoder, cache, [*tokens[:512], *random_tokens(30, seed=3)])
    append(decoder, alone, tokens)
    if middle:
        cache = sized_cache(decoder, 1200, cache)
        append(decoder, cache, [*tokens[512:second], *random_tokens(middle % 256, seed=4)])
    cache = sized_cache(decoder, 1200, cache, start=second)
    append(decoder, cache, tokens[second:])
    generator, length = torch.Generator().manual_seed(own), len(tokens) // 4
    for count in (1, 4, 40, length):
        chosen = torch.stack([torch.randperm(length, generator=generator)[:count].sort().values for _ in "ab"])
        for some in (chosen, chosen[:, :2], chosen[:, -3:]):
            for layer in range(decoder.config.num_layers):
                for got, want in zip(cache.gather(layer, some), alone.gather(layer, some), strict=True):
                    assert got.shape == (2, 4 * some.shape[1], 32) and (got - want).abs().max() < 1e-4


def sized_cache(decoder, capacity, prefix=None, dtype=torch.float32, start=512):
    """On the CPU in blocks of 256 tokens; the first `start` of them may be those of `prefix`."""
    config, start = decoder.config, start if prefix else 0
    blocks = DeviceBlocks(config.full_layers, dtype=dtype, device=CPU, capacity=capacity - start, block_size=256)
    return FullCache(config, decoder.rope, blocks, chunk_size=4, prefix=prefix, start=start)


@pytest.mark.parametrize("length", [3, 64, 200])
@pytest.mark.parametrize("streams", [False, True])
def test_a_cache_filled_with_zeros_holds_zeros_up_to_its_length(decoder, streams, length):
    link = ThreadLink()
    full = full_cache(decoder)
    if streams:
        place = Placement.streaming(500, 64, num_resident=1, chunk_size=4)
        blocks = StreamedBlocks(decoder.config, link, place, dtype=torch.float32, device=CPU)
        full = FullCache(decoder.config, decoder.rope, blocks, chunk_size=4)
    append(decoder, full, random_tokens(300))
    full.rollback(0)
    fill_with_zeros(full, length)
    assert full.length == length
    chunks = torch.arange(-(-length // 4)).expand(decoder.config.num_kv_heads, -1)
    for layer in range(decoder.config.num_layers):
        for held in full.blocks.gather(layer, chunks, 4):
            assert held[:, :length].abs().max() == 0
    link.close()


def test_an_updated_tail_holds_the_full_caches_own_keys_and_values(decoder):
    full = full_cache(decoder)
    append(decoder, full, random_tokens(61))
    cache = RetrievalCache(full, decoder.rope, budget=16, chunk_size=4)
    cache.refresh()
    append(decoder, cache, random_tokens(9, seed=1))
    cache.rollback(61)
    append(decoder, full, random_tokens(9, seed=1))
    cache.update_tail()
    for layer in range(2):
        keys, values = cache._buffers[layer]
        want_keys, want_values = full.blocks.slice(layer, 60, 70)
        assert torch.equal(keys[:, 16:26], want_keys)
        assert torch.equal(values[:, 16:26], want_values)


@pytest.mark.parametrize("budget", [500, 64])
def test_refreshed_retrieval_with_room_for_all_equals_full(decoder, budget):
    full = full_cache(decoder)
    append(decoder, full, random_tokens(150))
    cache = RetrievalCache(full, decoder.rope, budget=budget, chunk_size=4)
    cache.refresh()
    equal = torch.allclose(probe(decoder, cache), probe(decoder, full), atol=1e-4)
    assert equal == (budget == 500)


@pytest.mark.parametrize("n", [5, 30, 300, 900])
def test_streaming_prefill_of_the_reachable_tokens_equals_all_tokens(decoder, n):
    tokens = random_tokens(n)
    short, long = streaming_cache(decoder), streaming_cache(decoder)
    prefill_streaming(decoder, short, tokens)
    append(decoder, long, tokens)
    for forgotten in (0, 3, 40):
        if forgotten < n:
            for cache in (short, long):
                cache.rollback(n - forgotten)
                if cache.length < n - forgotten:
                    append(decoder, cache, tokens[cache.length : n - forgotten])
        assert torch.allclose(probe(decoder, short), probe(decoder, long), atol=1e-4)
        for cache in (short, long):
            cache.rollback(min(n, n - forgotten))


def test_streaming_attends_to_sinks_and_window_only(decoder):
    """Against a plain softmax over the kept tokens, each at its distance within the window, for one layer."""
    cache = streaming_cache(decoder)
    config, rope = decoder.config, decoder.rope
    g = torch.Generator().manual_seed(4)
    n = 70
    q = torch.randn(config.num_heads, n, config.head_dim, generator=g)
    k = torch.randn(config.num_kv_heads, n, config.head_dim, generator=g)
    v = torch.randn(config.num_kv_heads, n, config.head_dim, generator=g)
    got = [cache.attend(layer, q, k, v) for layer in range(config.num_layers)][-1]
    for t in range(n):
        kept = [j for j in range(t + 1) if j < 4 or j > t - 20]
        place = {j: i for i, j in enumerate(kept)}  # positions within the cache
        rotated = torch.cat([rope.rotate(0, k[:, j : j + 1], place[j]) for j in kept], dim=1)
        query = rope.rotate(0, q[:, t : t + 1], place[t])
        group = config.num_heads // config.num_kv_heads
        scores = query @ rotated.repeat_interleave(group, 0).transpose(1, 2) * config.head_dim**-0.5
        want = scores.softmax(-1) @ v[:, kept].repeat_interleave(group, 0)
        assert torch.allclose(got[:, t : t + 1], want, atol=1e-4), f"row {t}"


@pytest.mark.slow
def test_after_a_sampled_run_every_cache_equals_a_replay(tmp_path):
    save_llama(tmp_path / "target", seed=1)
    save_llama(tmp_path / "draft", seed=2, num_hidden_layers=1)
    engine = Engine.load(
        tmp_path / "target", tmp_path / "draft", device="cpu", budget=32, draft_length=3, block_length=6, refresh=4
    )
    assert engine.draft is not None
    prompt = random_tokens(100)
    run = engine.stream(prompt, Sampling(temperature=1.5, top_p=1.0, seed=3), 150)
    tokens = list(prompt)
    for event in run:
        tokens += event.tokens
        assert run.sequence.active.full.length == len(tokens) - 1
        assert run.sequence.active.drafting_filled == (event.index > 0), "caches are filled for the first round"
        if event.index % 7 or not event.index:
            continue
        assert run.sequence.active.retrieval and run.sequence.active.streaming
        fresh = FullCache.on_device(
            engine.target.config, engine.target.rope, dtype=torch.float32, device=CPU, capacity=500
        )
        append(engine.target, fresh, tokens[:-1])
        for layer in range(3):
            for got, want in zip(
                run.sequence.active.full.blocks.slice(layer, 0, fresh.length),
                fresh.blocks.slice(layer, 0, fresh.length),
                strict=True,
            ):
                assert torch.allclose(got, want, atol=1e-4)
        assert run.sequence.active.retrieval.length == fresh.length
        assert run.sequence.active.streaming.length <= fresh.length
        replayed = StreamingCache(engine.draft)
        append(engine.draft, replayed, tokens[: run.sequence.active.streaming.length])
        kept = run.sequence.active.streaming.length
        got, want = probe(engine.draft, run.sequence.active.streaming), probe(engine.draft, replayed)
        run.sequence.active.streaming.rollback(kept)
        assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("capacity", [16, 600, 12_000])  # small memory, new pages, huge pages
def test_whatever_is_restored_all_values_behind_tokens_stay_finite(decoder, capacity):
    """Attention hides them by a weight of 0, which does not help against NaN."""
    size = min(256, capacity)

    def tokens(first, stop):
        for layer in range(config.num_layers):
            shape = config.num_kv_heads, stop - first, config.head_dim
            blocks.append(layer, first, torch.ones(shape), torch.ones(shape))

    def restore(stop, value):
        def read(pieces):
            for piece in pieces:
                piece.fill_(value)

        for layer in range(config.num_layers):
            blocks.restore(layer, stop, read)

    def check(stop):
        for whole in blocks._layers:
            begun = whole[: -(-stop // size)]
            assert begun.isfinite().all()
            several = begun.permute(1, 2, 0, 3, 4).flatten(2, 3)
            assert (several[:, :, :stop] != 0).all()

    config = decoder.part
    for order in itertools.permutations(((capacity, 5), (capacity // 2 + 3, capacity // 2), (3, 0))):
        blocks = DeviceBlocks(config, dtype=torch.float32, device=CPU, capacity=capacity, block_size=size)
        tokens(0, 2)
        check(2)
        for damaged, intact in order:
            restore(damaged, float("nan"))
            restore(intact, 1.0)
            check(intact)
            for stop in {min(capacity, intact + 1), min(capacity, intact + size + 1), capacity}:
                restore(intact, 1.0)
                tokens(intact, stop)
                check(stop)


@pytest.mark.parametrize("huge", [False, True])
def test_bytes_that_no_token_has_touched_are_those_of_pages_without_one(decoder, huge):
    config, capacity = decoder.part, 8192 if huge else 700
    blocks = DeviceBlocks(config, dtype=torch.float32, device=CPU, capacity=capacity, block_size=256)
    whole = sum(layer.nbytes for layer in blocks._layers)
    assert (blocks._layers[0].nbytes >= HUGE_PAGE) == huge
    before, page = whole, HUGE_PAGE if huge and has_huge_pages() else mmap.PAGESIZE
    assert blocks.footprint.untouched == whole
    for first, stop in ((0, 1), (1, 200), (200, 257), (257, 700)):
        for layer in range(config.num_layers):
            shape = config.num_kv_heads, stop - first, config.head_dim
            blocks.append(layer, first, torch.ones(shape), torch.ones(shape))
        written = stop * 2 * config.num_kv_heads * config.head_dim * 4 * config.num_layers
        planes = 2 * config.num_kv_heads * config.num_layers
        untouched = blocks.footprint.untouched
        assert untouched <= before and whole - written >= untouched >= whole - written - (planes + 1) * page
        before = untouched
    blocks.rollback(0)
    assert blocks.footprint.untouched == before, "what was touched stays so"
