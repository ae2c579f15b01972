"""Captured passes give what passes give as they come, and a draft does not wait for the device.

CUDA graphs need a GPU (`test_gpu`). Here a recorder takes their place: it notes the operations of a pass with the
tensors they work on and repeats them on the same memory, so that whatever a pass takes from the host's numbers is
repeated too, and shows.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from recorder import FAMILIES, PROMPT, NoWaiting, Recorder, Tape, count_waits, recorded_engine
from tiny import random_tokens, save_llama
from tiny_caches import append, moving_cache, retrieval_cache, streaming_cache
from torch.utils._python_dispatch import _disable_current_modes
from triforce.cli.session.report import report_statistics
from triforce.kernels.selection import use_kernels
from triforce.offload import Request, Sampling
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.token_slots import TokenSlots
from triforce.offload.graphs.passes import Graphs, Passes, _CapturedPass
from triforce.offload.planning.cost_model import Assumptions
from triforce.offload.settings import Settings
from triforce.offload.shape_steps import ShapeSteps
from triforce.offload.speculation.lengths import PassCost
from triforce.offload.speculation.sampler import Sampler
from triforce.offload.transfer.bandwidth import REPEATS
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.parallel.ranks import Ranks

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
LENGTHS: dict[str, Any] = {"draft_length": 3, "block_length": 7}


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("llama-3",))
def test_captured_passes_emit_the_tokens_of_transformers(pairs, family, tiers):
    engine, recorder = recorded_engine(pairs[family], tiers=tiers)
    result = engine.generate(PROMPT, GREEDY, 50)
    assert result.token_ids == pairs[family][2]
    assert recorder.replays > 30, recorder.counts
    assert result.stats["warnings"] == []


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("llama-3",))
def test_captured_passes_of_a_batch_emit_what_each_sequence_has_alone(pairs, family, tiers):
    """Sequences reach the draft's steady part at other times, and leave at others."""
    engine, recorder = recorded_engine(pairs[family], tiers=tiers)
    lengths = (42, 14, 26)
    requests = [
        Request(PROMPT[: 300 - 40 * i], Sampling(1.0, 0.9, seed=i) if i else GREEDY, n, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    batch = engine.batch(requests)
    for _ in batch:
        pass
    assert recorder.replays > 30 and batch.warnings == [], recorder.counts
    texts = [sequence.statistics.token_ids for sequence in batch.sequences]
    assert texts[0] == pairs[family][2][: lengths[0]]
    engine._capture = None
    for request, text in zip(requests, texts, strict=True):
        given = request.prompt_ids, request.sampling, request.max_new_tokens
        assert engine.generate(*given, ignore_eos=True, reuse=0, tiers=1).token_ids == text


@pytest.mark.parametrize("refresh", ["round", 3, "never"])
@pytest.mark.slow
def test_captured_passes_emit_the_sampled_tokens_of_passes_as_they_come(pairs, refresh):
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=6)
    engine, recorder = recorded_engine(pairs["llama"], refresh=refresh)
    got = engine.generate(PROMPT, sampling, 60)
    engine._capture = None
    want = engine.generate(random_tokens(5), sampling, 1), engine.generate(PROMPT, sampling, 60)
    assert got.token_ids == want[1].token_ids
    assert got.stats["acceptance"] == want[1].stats["acceptance"]
    assert recorder.replays > 50, recorder.counts


steps = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=5, max_size=40)
"""Tokens of a pass, then tokens forgotten, again and again."""


@given(history=steps)
@examples(25)
@pytest.mark.parametrize("make", [retrieval_cache, moving_cache])
def test_replays_equal_passes_as_they_come_after_any_history(decoder, make, history):
    recorder = Recorder()
    caches = make(decoder), make(decoder)
    captured, plain = Passes(decoder, caches[0], Graphs(recorder)), Passes(decoder, caches[1])
    if make is moving_cache:
        for cache in caches:
            append(decoder, cache, random_tokens(40))
    floor = caches[0].length
    source = iter(random_tokens(1000, seed=3))
    for n, forgotten in history:
        tokens = torch.tensor([next(source) for _ in range(n)])
        got, want = captured.forward(tokens, n), plain.forward(tokens, n)
        error = (got - want).abs().max()
        assert error < 1e-5, f"logits differ by {error} after {recorder.replays} replays"
        length = max(floor, caches[0].length - forgotten)
        for cache in caches:
            cache.rollback(length)
            if cache.length < length:
                append(decoder, cache, random_tokens(length))
        assert caches[0].length == caches[1].length
    assert recorder.warm_ups + recorder.replays == len(history)


def test_steps_of_a_shape_are_timed_as_replays(decoder):
    recorder = Recorder()
    lengths = Settings(tiers=3, budget=64, chunk_size=8, **LENGTHS)
    where: Any = {"dtype": torch.float32, "device": CPU, "context": 300}
    steps = ShapeSteps(decoder.config, decoder.config, lengths, **where, make_capture=lambda _: recorder)
    times = steps.at(300, Assumptions())
    assert len(times.draft) == len(times.retrieval) == REPEATS
    replays = 4 * (REPEATS + 1) + 1  # and one that chunks are chosen by
    assert recorder.counts == {"warm_ups": 4, "captures": 4, "replays": replays}
    assert steps.graphs.failure is None


def test_what_a_capture_takes_says_nothing_of_a_pass(pairs, monkeypatch):
    engine, recorder = recorded_engine(pairs["llama"])
    run = engine.stream(PROMPT, GREEDY, 60)
    next(run)
    draft, tokens, observed, after_each = run.batch.tiers[-1], run.sequence.active, [], []
    tokens.fill_drafting_caches(looks_up=False, chooses=True)
    monkeypatch.setattr(PassCost, "observe", lambda *given: observed.append(given))
    for _ in range(4):
        draft._step_without_draft([tokens], 1)
        draft.rollback(tokens, len(tokens.context) - 1)
        after_each.append(len(observed))
    assert recorder.warm_ups == recorder.captures == 1
    assert after_each == [0, 0, 1, 2]


def test_memory_that_moves_is_captured_anew(decoder):
    cache = retrieval_cache(decoder)
    recorder = Recorder()
    passes, want = Passes(decoder, cache, Graphs(recorder)), Passes(decoder, retrieval_cache(decoder))
    for token in random_tokens(100, seed=5):  # more than the first room for a tail
        memory, captures = cache.memory, recorder.captures
        got = passes.forward(torch.tensor([token]))
        assert torch.allclose(got, want.forward(torch.tensor([token])), atol=1e-5)
        assert recorder.captures <= captures + 1
        assert cache.memory is memory or recorder.captures == captures
    assert (recorder.warm_ups, recorder.captures, recorder.replays) == (2, 2, 98)


def test_the_table_of_rotations_may_grow_between_replays(decoder, tmp_path):
    save_llama(tmp_path, num_hidden_layers=2, num_key_value_heads=2)
    fresh = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    cache, other = streaming_cache(fresh), streaming_cache(fresh)
    passes, want = Passes(fresh, cache, Graphs(Recorder())), Passes(fresh, other)
    for each in (cache, other):
        append(fresh, each, random_tokens(40))
    for i, token in enumerate(random_tokens(20, seed=5)):
        fresh.rope.reserve(4000 * (i + 1))
        got = passes.forward(torch.tensor([token]))
        assert torch.allclose(got, want.forward(torch.tensor([token])), atol=1e-5)


def test_early_and_long_passes_run_as_they_come(decoder):
    recorder = Recorder()
    cache = streaming_cache(decoder)
    passes = Passes(decoder, cache, Graphs(recorder))
    for tokens in (random_tokens(3), random_tokens(3), random_tokens(60), random_tokens(60)):
        passes.forward(torch.tensor(tokens))
    assert recorder.counts == {"warm_ups": 0, "captures": 0, "replays": 0}


def test_the_recorder_notices_positions_that_the_host_gives(decoder, monkeypatch):
    def run(self):
        (cache,) = self._caches
        cache.at = cache.token_slots(len(self._token_ids))
        try:
            return self._decoder.forward(self._token_ids, cache, num_logits=len(self._token_ids))
        finally:
            cache.at = None

    monkeypatch.setattr(_CapturedPass, "run", run)
    passes = Passes(decoder, retrieval_cache(decoder), Graphs(Recorder()))
    plain = Passes(decoder, retrieval_cache(decoder))
    same = [
        torch.allclose(passes.forward(token), plain.forward(token), atol=1e-5)
        for token in torch.tensor(random_tokens(4)).split(1)
    ]
    assert same == [True, True, False, False]  # warmed up, captured at the place it stands at, replayed elsewhere


def test_a_draft_never_waits_for_the_device_before_its_tokens_are_read(pairs):
    engine, recorder = recorded_engine(pairs["llama"])
    run = engine.stream(PROMPT, Sampling(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=1), 50)
    for _ in range(5):
        next(run)
    _, retrieval, draft = run.batch.tiers
    sequence = run.sequence.active
    length, replays = len(sequence.context) - 1, recorder.replays
    for tier in (draft, retrieval):
        with torch.inference_mode(), NoWaiting():
            tokens, rows, _, _ = tier._drawn([sequence], 6, False)
        assert tokens.shape == (1, 6)
        assert rows.shape == (1, 6, 97)
        tier.rollback(sequence, length)
    assert recorder.replays > replays
    for tier, waits in ((draft, 1), (retrieval, 2)):  # one of the draft's own, one of the test of its tokens
        with torch.inference_mode(), count_waits() as calls:
            tier.step([sequence], [4])
        assert calls == ["tolist"] * waits, tier.name
        tier.rollback(sequence, length)
    assert len(list(itertools.islice(run, 3))) == 3, "it goes on"


def test_a_draft_that_ends_the_text_is_cut_there(pairs):
    engine, _ = recorded_engine(pairs["llama"], tiers=2)
    run = engine.stream(PROMPT, GREEDY, 80)
    next(run)
    retrieval = run.batch.tiers[1]
    with torch.inference_mode():
        sequence = run.sequence.active
        ((tokens, rows),) = retrieval.extend([sequence], [8])
        end = next(i for i in range(2, 7) if tokens[i] not in tokens[:i])
        sequence.sampler = Sampler(GREEDY, sequence.sampler.noise, frozenset({tokens[end]}))
        retrieval.rollback(sequence, len(sequence.context) - 1)
        ((cut, cut_rows),) = retrieval.extend([sequence], [8])
    assert cut == tokens[: end + 1]
    assert torch.equal(cut_rows, rows[: end + 1])
    assert sequence.passes["retrieval"].cache.length == len(sequence.context) + end


def test_logits_of_a_draft_that_are_no_numbers_are_an_error_when_read(pairs):
    engine, _ = recorded_engine(pairs["llama"], tiers=2)
    run = engine.stream(PROMPT, GREEDY, 80)
    next(run)
    engine.target._norm.fill_(float("inf"))
    with pytest.raises(ModelError, match="not finite numbers"):
        next(run)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.slow(keep=("2",))
def test_a_capture_that_fails_leaves_no_trace_but_a_warning(pairs, monkeypatch, layer, capsys):
    from rich.console import Console

    whole = RetrievalCache.attend

    def attend(self, index, q, k, v):
        if Tape.current is not None and index == layer:
            q.amax().item()
        return whole(self, index, q, k, v)

    monkeypatch.setattr(RetrievalCache, "attend", attend)
    engine, recorder = recorded_engine(pairs["llama"])
    result = engine.generate(PROMPT, GREEDY, 24)
    assert result.token_ids == pairs["llama"][2][:24]
    warning = "drafting runs without captured passes, and is slower: item waits for the device"
    assert result.stats["warnings"] == [warning]
    assert recorder.captures <= 2, "the first failure is the last try"
    report_statistics(Console(width=200), result.stats)
    assert [line for line in capsys.readouterr().out.splitlines() if "warning" in line] == [f"warning   {warning}"]
    monkeypatch.setattr(RetrievalCache, "attend", whole)
    assert engine.generate(PROMPT, GREEDY, 10).stats["warnings"] == []


class OneFails(Ranks):
    """Two ranks, of which the other one has failed."""

    def sum(self, x, kind="all_reduce"):
        return x + 1.0


def test_what_one_rank_cannot_capture_none_replays(decoder):
    recorder, graphs = Recorder(), Graphs(Recorder(), OneFails())
    graphs._capture = recorder
    passes, plain = Passes(decoder, retrieval_cache(decoder), graphs), Passes(decoder, retrieval_cache(decoder))
    for token in torch.tensor(random_tokens(5)).split(1):
        assert torch.allclose(passes.forward(token), plain.forward(token), atol=1e-5)
    assert recorder.counts == {"warm_ups": 1, "captures": 1, "replays": 0}
    assert graphs.failure == "another rank could not capture it"


def test_tokens_stand_where_their_slots_say():
    rows = torch.randn(2, 3, 4)
    by_number, by_tensor = torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)
    TokenSlots(0, 5).put(by_number, rows)
    slots = TokenSlots(0, torch.tensor([5, 6, 7]))
    slots.put(by_tensor, rows)
    assert torch.equal(by_number, by_tensor)
    assert torch.equal(by_number[:, 5:8], rows)
    assert slots.diagonal == TokenSlots(0, 5).diagonal == 5


def as_one_operation(launch):
    """The launch of a kernel as the recorder sees it: one operation, whatever the interpreter does."""

    @functools.wraps(launch)
    def call(*args, **kwargs):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if Tape.current is None:
                return launch(*args, **kwargs)
            return Tape.current.run(launch, args, kwargs, mutates=True)

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton's kernels are compiled")
@pytest.mark.parametrize("make", [retrieval_cache, streaming_cache])
@pytest.mark.slow
def test_replays_through_triton_equal_the_plain_path(decoder, make, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.interpreter import GridExecutor
    from triton_runs import OLD_INTERPRETER

    if OLD_INTERPRETER:
        pytest.skip("Triton's interpreter before 3.7 fails with numpy 2.4")
    caches = make(decoder), make(decoder)
    for cache in caches:
        if make is streaming_cache:
            append(decoder, cache, random_tokens(40))
    passes, plain = Passes(decoder, caches[0], Graphs(Recorder())), Passes(decoder, caches[1])
    tokens = torch.tensor(random_tokens(12, seed=5)).split(2)
    want = [plain.forward(pair, 2) for pair in tokens]
    monkeypatch.setattr(GridExecutor, "__call__", as_one_operation(GridExecutor.__call__))
    for pair, logits in zip(tokens, want, strict=True):
        with use_kernels(attention="triton", layers="plain"):
            error = (passes.forward(pair, 2) - logits).abs().max()
        assert error < 1e-4, f"logits differ by {error}"
