"""Passes over full caches, captured in the pieces between their attention, give what such passes give as they come."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from recorder import PROMPT, Recorder, recorded_engine
from tiny import random_tokens, save_family
from tiny_caches import append, full_cache
from triforce.kernels.selection import use_kernels
from triforce.offload import Request, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.graphs.passes import MOST_PIECES_SIZES, Graphs, JoinedPasses, Passes
from triforce.tp.decoder import Decoder

GREEDY = Sampling(temperature=0.0)


def filled(decoder: Decoder, n: int, seed: int = 1) -> FullCache:
    cache = full_cache(decoder)
    append(decoder, cache, random_tokens(n, seed=seed))
    return cache


steps = st.lists(st.tuples(st.sampled_from([1, 2, 5, 9]), st.integers(0, 9)), min_size=6, max_size=20)
"""Tokens of a pass, then tokens forgotten, again and again."""


@given(history=steps)
@examples(15)
def test_a_replayed_pass_has_the_bits_of_one_as_it_comes_after_any_history(decoder, history):
    recorder = Recorder()
    ours, others = filled(decoder, 70), filled(decoder, 70)
    captured, plain = Passes(decoder, ours, Graphs(recorder)), Passes(decoder, others)
    source = iter(random_tokens(1000, seed=3))
    for n, forgotten in history:
        tokens = torch.tensor([next(source) for _ in range(n)])
        assert torch.equal(captured.forward(tokens, n), plain.forward(tokens, n))
        for cache in (ours, others):
            cache.rollback(max(60, cache.length - forgotten))
        assert ours.length == others.length
        for layer in range(decoder.config.num_layers):
            assert torch.equal(ours.recent_mass(layer), others.recent_mass(layer))
    kinds = {n for n, _ in history if sum(other == n for other, _ in history) > 1}
    assert recorder.captures == len(kinds)
    assert recorder.replays == len(history) - len({n for n, _ in history})


def test_all_sequences_replay_the_same_pieces(decoder):
    recorder = Recorder()
    graphs = Graphs(recorder)
    for seed in (1, 2, 3):
        ours, others = filled(decoder, 40 * seed, seed), filled(decoder, 40 * seed, seed)
        passes, plain = Passes(decoder, ours, graphs), Passes(decoder, others)
        for tokens in torch.tensor(random_tokens(12, seed=seed)).split(4):
            assert torch.equal(passes.forward(tokens, 2), plain.forward(tokens, 2))
    assert recorder.counts == {"warm_ups": 1, "captures": 1, "replays": 8}


@pytest.mark.parametrize("counts", [(4, 4), (1, 7), (3, 1)])
def test_rows_of_several_sequences_are_captured_by_how_many_there_are(decoder, counts):
    recorder = Recorder()
    graphs = Graphs(recorder)
    ours, others = ([filled(decoder, 90, 1), filled(decoder, 33, 2)] for _ in range(2))
    joined = JoinedPasses([Passes(decoder, cache, graphs) for cache in ours])
    apart = [Passes(decoder, cache) for cache in others]
    total = sum(counts)
    for i in range(4):
        these = counts if i % 2 else counts[::-1]  # as many together
        tokens = torch.tensor(random_tokens(total, seed=i))
        got = joined.forward(tokens, these, these)
        parts = zip(apart, tokens.split(list(these)), strict=True)
        want = torch.cat([passes.forward(part, len(part)) for passes, part in parts])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert recorder.counts == {"warm_ups": 1, "captures": 1, "replays": 3}


def test_long_passes_run_as_they_come(decoder):
    recorder = Recorder()
    passes = Passes(decoder, full_cache(decoder), Graphs(recorder))
    for seed in range(3):
        passes.forward(torch.tensor(random_tokens(recorder.pieces_rows + 1, seed=seed)))
    assert recorder.captures == 0


def test_what_was_captured_is_held_until_it_is_dropped(decoder):
    recorder = Recorder()
    graphs = Graphs(recorder)
    passes = Passes(decoder, full_cache(decoder), graphs)
    steady = []
    for token in torch.tensor(random_tokens(4)).split(1):
        passes.forward(token)
        steady.append(passes.was_steady())
    assert steady == [False, False, True, True]  # as it comes, captured, replayed
    parts = [part for part, _ in graphs.held()]
    assert parts and set(parts) == {"captured"} and recorder.alive == decoder.config.num_layers + 1
    graphs.clear()
    assert list(graphs.held()) == [] and recorder.alive == 0
    passes.forward(torch.tensor(random_tokens(1)))
    assert recorder.captures == 1


@pytest.mark.parametrize("num_logits", [0, 5])
def test_more_logits_than_tokens_and_none_are_those_of_a_pass_as_it_comes(decoder, num_logits):
    recorder = Recorder()
    passes, plain = Passes(decoder, filled(decoder, 30), Graphs(recorder)), Passes(decoder, filled(decoder, 30))
    for tokens in torch.tensor(random_tokens(8)).split(2):
        assert torch.equal(passes.forward(tokens, num_logits), plain.forward(tokens, num_logits))
    assert recorder.captures == 0


def test_no_more_than_some_sizes_are_captured(decoder):
    recorder = Recorder()
    passes, plain = Passes(decoder, full_cache(decoder), Graphs(recorder)), Passes(decoder, full_cache(decoder))
    for n in range(1, MOST_PIECES_SIZES + 3):
        for seed in (1, 2):
            tokens = torch.tensor(random_tokens(n, seed=seed))
            assert torch.equal(passes.forward(tokens, n), plain.forward(tokens, n))
    assert recorder.captures == MOST_PIECES_SIZES


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "qwen3-bias", "llama-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_families_have_the_bits_of_passes_as_they_come(tmp_path, family, dtype, padded):
    save_family(tmp_path, family, seed=1)
    decoder, graphs = Decoder.load(tmp_path, dtype=dtype, device=torch.device("cpu")), Graphs(Recorder())
    where = {"dtype": dtype, "device": decoder.device, "capacity": 300, "chunk_size": 4}
    caches = [FullCache.on_device(decoder.config, decoder.rope, **where) for _ in range(2)]
    for cache in caches:
        append(decoder, cache, random_tokens(80, seed=2))
    captured, plain = Passes(decoder, caches[0], graphs, padded=padded), Passes(decoder, caches[1], padded=padded)
    for tokens in torch.tensor(random_tokens(25, seed=3)).split(5):
        assert torch.equal(captured.forward(tokens, 5), plain.forward(tokens, 5))


def test_a_pass_that_is_broken_off_between_two_pieces_can_be_made_again(decoder, monkeypatch):
    graphs, attend = Graphs(Recorder()), FullCache.attend_rotated
    ours, others = filled(decoder, 30), filled(decoder, 30)
    passes, plain = Passes(decoder, ours, graphs), Passes(decoder, others)
    for token in torch.tensor(random_tokens(3)).split(1):
        assert torch.equal(passes.forward(token), plain.forward(token))

    def failing(self, layer, q):
        if layer == 0:
            raise MemoryError
        return attend(self, layer, q)

    token = torch.tensor(random_tokens(1, seed=5))
    with monkeypatch.context() as patched:
        patched.setattr(FullCache, "attend_rotated", failing)
        with pytest.raises(MemoryError):
            passes.forward(token)
    ours.break_off()
    assert torch.equal(passes.forward(token), plain.forward(token))


class Refusing(Recorder):
    """Fails to capture what is in pieces."""

    def capture(self, run, pool):
        def cut():
            raise RuntimeError("no capture within a capture\nand more")

        return super().capture(lambda _: run(cut), pool)


def test_a_capture_that_fails_leaves_the_pass_and_a_warning(decoder):
    graphs = Graphs(Refusing())
    ours, others = filled(decoder, 30), filled(decoder, 30)
    passes, plain = Passes(decoder, ours, graphs), Passes(decoder, others)
    for token in torch.tensor(random_tokens(4)).split(1):
        assert torch.equal(passes.forward(token), plain.forward(token))
    assert graphs.warnings == ["verifications run without captured passes, and are slower: no capture within a capture"]


@pytest.mark.parametrize("tiers", [1, 3])
def test_a_streamed_run_has_the_text_of_passes_as_they_come(pairs, tiers):
    """One, and a batch with a shared beginning, greedy and drawn."""
    engine, recorder = recorded_engine(pairs["qwen3-bias"], resident=0.0, link_gbps=50.0, tiers=tiers)
    requests = [Request([*PROMPT, i], Sampling(1.0, seed=i) if i else GREEDY, 24, ignore_eos=True) for i in range(3)]

    def alone(request: Request, **given: Any) -> list[int]:
        return engine.generate(request.prompt_ids, request.sampling, 24, ignore_eos=True, reuse=0, **given).token_ids

    with use_kernels(attention="plain", as_gpu=()):
        captured = [alone(requests[0])]
        batch = engine.batch(requests)
        for _ in batch:
            pass
        captured += [sequence.statistics.token_ids for sequence in batch.sequences]
        assert recorder.replays > 30, recorder.counts
        engine._capture = None
        assert captured == [alone(request, tiers=1) for request in (requests[0], *requests)]
