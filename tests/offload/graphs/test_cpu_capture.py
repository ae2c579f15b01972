"""Passes that are captured on a CPU, with its compiled kernels: replays have the bits of passes as they come."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_files import Form, save_gguf
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from quantised import FORMATS, save_quantised
from recorder import PROMPT
from tiny import random_tokens, save_family, save_llama
from tiny_caches import append
from triforce.kernels.attention import PreparedStep
from triforce.kernels.cpu.library import AttentionCall, Level, cpu_level
from triforce.kernels.selection import use_kernels
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.hidden_states import HiddenStates
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import SLACK, StreamingCache
from triforce.offload.graphs.cpu import CpuCapture
from triforce.offload.graphs.passes import Graphs, JoinedPasses, Passes
from triforce.offload.held import held_bytes
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.tp.decoder import Decoder
from triforce.tp.weights.registry import find_model

pytestmark = pytest.mark.skipif(
    cpu_level() < Level.AVX512_BF16, reason="the compiled kernels are not installed, or not for this CPU"
)


@pytest.fixture(autouse=True)
def plain_pytorch() -> Iterator[None]:
    """In place of the one in conftest: compiled kernels are what is captured."""
    with use_kernels():
        yield


GATED = {"layer_types": ["full_attention"] * 4, "head_dim": 32}


@pytest.fixture(scope="module", params=["bfloat16", "float32", "awq", "gguf", "experts", "gated"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """In three of them, weights in few bits, of `gguf` the embedding too; `gated` has heads with gates, of which only
    some dimensions are rotated."""
    directory, kind = tmp_path_factory.mktemp("models") / "model", request.param
    if kind == "gguf":
        save_gguf(directory, "llama", lambda name: Form.Q4_K if "v_proj" not in name else Form.Q8_0)
        directory = find_model(directory.with_suffix(".gguf"))
    elif kind == "awq":
        save_quantised(directory, FORMATS["awq"], num_key_value_heads=2, head_dim=32)
    elif kind == "experts":
        save_quantised(directory, FORMATS["gptq"], "qwen3-moe", head_dim=32)
    elif kind == "gated":
        save_family(directory, "qwen3.5", **GATED)
    else:
        save_llama(directory, num_hidden_layers=2, num_key_value_heads=2, head_dim=32)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    return Decoder.load(directory, dtype=dtype, device=torch.device("cpu"))


def retrieval_cache(decoder: Decoder) -> RetrievalCache:
    full = FullCache.on_device(
        decoder.config, decoder.rope, dtype=decoder.dtype, device=decoder.device, capacity=500, chunk_size=4
    )
    append(decoder, full, random_tokens(90, seed=1))
    cache = RetrievalCache(full, decoder.rope, budget=24, chunk_size=4)
    cache.refresh()
    return cache


def streaming_cache(decoder: Decoder, slack: int = SLACK) -> StreamingCache:
    cache = StreamingCache(decoder, sinks=4, window=20, slack=slack)
    append(decoder, cache, random_tokens(40))
    return cache


def moving_cache(decoder: Decoder) -> StreamingCache:
    """Whose window moves every dozen tokens."""
    return streaming_cache(decoder, slack=12)


def replays_of(passes: Passes) -> int:
    return sum(captured.replay is not None for captured in passes._captures._captured.values())


steps = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=10, max_size=60)
"""Tokens of a pass, then tokens forgotten, again and again."""


@given(history=steps)
@examples(20)
@pytest.mark.parametrize("make", [retrieval_cache, moving_cache])
def test_replays_have_the_bits_of_passes_as_they_come(decoder, make, history):
    caches = make(decoder), make(decoder)
    captured, plain = Passes(decoder, caches[0], Graphs(CpuCapture())), Passes(decoder, caches[1])
    floor = caches[0].length
    source = iter(random_tokens(1000, seed=3))
    for n, forgotten in history:
        tokens = torch.tensor([next(source) for _ in range(n)])
        assert torch.equal(captured.forward(tokens, n), plain.forward(tokens, n))
        length = max(floor, caches[0].length - forgotten)
        for cache in caches:
            cache.rollback(length)
            if cache.length < length:
                append(decoder, cache, random_tokens(length))
    counts = [sum(n == wanted for n, _ in history) for wanted in (1, 2, 3)]
    if make is moving_cache:  # whose memory never moves
        assert replays_of(captured) == sum(count > CpuCapture.passes_before for count in counts)


def test_a_pass_is_captured_when_it_has_come_a_few_times_and_then_replayed(decoder):
    passes = Passes(decoder, streaming_cache(decoder), Graphs(CpuCapture()))
    found = []
    for token in random_tokens(CpuCapture.passes_before + 3, seed=4):
        passes.forward(torch.tensor([token]))
        found.append((replays_of(passes), passes.was_steady()))
    before = CpuCapture.passes_before
    assert found == [(0, False)] * before + [(1, False)] + [(1, True)] * 2


def again_and_again(passes: Passes, n: int) -> torch.Tensor:
    """The logits behind a token, computed `n` times."""
    logits, length = torch.zeros(0), passes.cache.length
    for _ in range(n):
        logits = passes.forward(torch.tensor([5])).clone()
        passes.cache.rollback(length)
    return logits


def test_a_replay_takes_the_threads_there_are_then(decoder):
    passes = Passes(decoder, streaming_cache(decoder), Graphs(CpuCapture()))
    before = again_and_again(passes, CpuCapture.passes_before + 2)
    captured = passes._captures._captured[1].replay
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(again_and_again(passes, 1), before)
        assert passes._captures._captured[1].replay is captured is not None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("chosen", [{"attention": "plain"}, {"layers": "plain"}, {"attention": "flash_cpu"}])
def test_other_kernels_run_as_they_come(decoder, chosen):
    passes, plain = (Passes(decoder, streaming_cache(decoder), Graphs(CpuCapture())) for _ in range(2))
    with use_kernels(**chosen):
        logits = again_and_again(passes, CpuCapture.passes_before + 2)
        assert replays_of(passes) == 0
    want = again_and_again(plain, CpuCapture.passes_before + 2)
    assert replays_of(plain) == 1
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_heads_that_the_kernels_do_not_take_run_as_they_come(tmp_path):
    save_llama(tmp_path, num_key_value_heads=2, head_dim=24)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    passes = Passes(decoder, streaming_cache(decoder), Graphs(CpuCapture()))
    again_and_again(passes, CpuCapture.passes_before + 2)
    assert replays_of(passes) == 0


def test_a_dropped_pass_is_not_replayed_in_silence():
    x = torch.zeros(3)
    capture = CpuCapture()
    with torch.inference_mode():
        (replay,), result = capture.capture(lambda _: x + 1, None)
        capture.clear()
        with pytest.raises(RuntimeError, match="dropped"):
            replay()
    assert result.tolist() == [1.0] * 3


def test_what_runs_between_two_pieces_is_not_repeated():
    x, between = torch.zeros(3), torch.zeros(3)

    def run(cut):
        y = x + 1
        cut()
        return y * between

    with torch.inference_mode():
        pieces, result = CpuCapture().capture(run, None)
        x.add_(1)
        pieces[0]()
        between.add_(5)
        pieces[1]()
    assert len(pieces) == 2 and result.tolist() == [10.0] * 3


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.max(dim=0).values,
        lambda x: x * (x > 0).nonzero().shape[0],
    ],
)
def test_what_another_pass_would_have_other_results_of_is_refused(run):
    with torch.inference_mode(), pytest.raises(RuntimeError):
        CpuCapture().capture(lambda _: run(torch.arange(3.0)), None)


def test_several_sequences_run_as_they_come_and_leave_no_capture_behind(decoder):
    caches, others = ([streaming_cache(decoder) for _ in range(2)] for _ in range(2))
    graphs = Graphs(CpuCapture())
    single = [Passes(decoder, cache, graphs) for cache in caches]
    again_and_again(single[0], CpuCapture.passes_before + 2)
    assert replays_of(single[0]) == 1
    joined = JoinedPasses(single)
    assert replays_of(single[0]) == 0
    alone = [Passes(decoder, cache) for cache in others]
    for i in range(20):
        counts = [1, 2] if i % 5 == 4 else [1, 1]
        tokens = torch.tensor(random_tokens(sum(counts), seed=i))
        got = joined.forward(tokens, counts, [1, 1])
        want = [passes.forward(part)[-1:] for passes, part in zip(alone, tokens.split(counts), strict=True)]
        assert torch.equal(got, torch.cat(want))
    assert joined._captures._captured == {}


def test_passes_that_leave_hidden_states_run_as_they_come(decoder) -> None:
    cache, graphs = filled(decoder, 30), Graphs(CpuCapture())
    states = HiddenStates(decoder)
    cache.leave_hidden_states_in(states)
    for token in random_tokens(6):
        Passes(decoder, cache, graphs).forward(torch.tensor([token]))
    assert states.known == range(30, 36)


def test_what_reads_numbers_is_not_captured(decoder, monkeypatch):
    cache = streaming_cache(decoder)
    whole = cache.attend

    def attend(layer, q, k, v):
        assert q.float().amax().item() < float("inf")
        return whole(layer, q, k, v)

    monkeypatch.setattr(cache, "attend", attend)
    graphs = Graphs(CpuCapture())
    passes, plain = Passes(decoder, cache, graphs), Passes(decoder, streaming_cache(decoder))
    for token in torch.tensor(random_tokens(10, seed=4)).split(1):
        assert torch.equal(passes.forward(token), plain.forward(token))
    assert graphs.warnings == [
        "drafting runs without captured passes, and is slower: the operation item reads numbers, which are not known "
        "when a pass is captured"
    ]


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_is_the_same_with_and_without(tmp_path: Path, tiers: int, temperature: float) -> None:
    save_llama(tmp_path / "target", head_dim=32)
    save_llama(tmp_path / "draft", num_hidden_layers=1, head_dim=32)
    lengths = {"draft_length": 3, "block_length": 6, "budget": 64, "tiers": tiers, "refresh": "round"}
    engine = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", dtype="bfloat16", **lengths)
    sampling = Sampling(temperature, seed=3)
    assert isinstance(engine._capture, CpuCapture)
    with_it = engine.generate(PROMPT, sampling, 80)
    engine._capture = None
    without = engine.generate(PROMPT, sampling, 80, reuse=0)
    assert with_it.token_ids == without.token_ids
    assert with_it.stats["acceptance"] == without.stats["acceptance"] and with_it.stats["warnings"] == []


def test_pytorchs_compiler_is_not_imported_for_it() -> None:
    script = """
import sys, torch
from triforce.offload.graphs.cpu import CpuCapture
with torch.inference_mode():
    x = torch.zeros(3)
    (replay,), result = CpuCapture().capture(lambda _: (x + 1).to(torch.float64), None)
    x += 1
    replay()
    assert result.tolist() == [2.0] * 3
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_plain_operations_of_any_kind_are_repeated(decoder) -> None:
    """Also those whose variants take scalars, or whose results are views."""
    x, flags = torch.arange(6.0), torch.tensor([True, False] * 3)

    def run() -> torch.Tensor:
        rows = torch.where(flags, x, float("-inf")).view(2, 3).softmax(-1)
        kept = torch.zeros(2, 3).index_copy_(0, torch.ones(1, dtype=torch.int64), rows[:1])
        return torch.cat((rows.transpose(0, 1).reshape(2, 3) * 2 + (x > 3).view(2, 3), kept))

    with torch.inference_mode():
        (replay,), result = CpuCapture().capture(lambda _: run(), None)
        for factor in (2.0, -1.0):
            x.mul_(factor)
            replay()
            assert torch.equal(result, run())


def filled(decoder: Decoder, n: int) -> FullCache:
    where = {"dtype": decoder.dtype, "device": decoder.device}
    cache = FullCache.on_device(decoder.config, decoder.rope, **where, capacity=900, chunk_size=4)
    append(decoder, cache, random_tokens(n, seed=n))
    return cache


passes_and_steps = st.lists(st.tuples(st.integers(1, CpuCapture.pieces_tokens + 2), st.integers(0, 4)), max_size=40)


@pytest.mark.parametrize("mass_rows", [0, 8])
@given(history=passes_and_steps)
@examples(12)
def test_all_but_attention_to_full_caches_is_captured(decoder, mass_rows, history) -> None:
    """With the bits of passes as they come, whatever lengths, rows that are taken back, and borders of blocks."""
    caches, graphs = [filled(decoder, 250) for _ in range(2)], Graphs(CpuCapture())
    captured, plain = Passes(decoder, caches[0], graphs), Passes(decoder, caches[1])
    for cache in caches:
        cache.keep_mass(mass_rows)
    source = iter(random_tokens(1000, seed=3))
    for n, forgotten in history:
        tokens = torch.tensor([next(source) for _ in range(n)])
        assert torch.equal(captured.forward(tokens, n), plain.forward(tokens, n))
        for cache in caches:
            cache.rollback(cache.length - min(n, forgotten))
    counts = [sum(n == wanted for n, _ in history) for wanted in range(1, CpuCapture.pieces_tokens + 1)]
    passes = graphs.pieces_of(decoder)._passes.values()
    assert sum(one.is_captured for one in passes) == sum(count > CpuCapture.passes_before for count in counts)
    assert caches[0].read_so_far().num_bytes == caches[1].read_so_far().num_bytes


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_prepared_for_a_cache(tmp_path, monkeypatch, family, dtype) -> None:
    """For layers that keep all tokens, whether they see all of them or not; again for another pass's rows, and given up
    where a pass fails between two layers."""
    save_family(tmp_path, family, head_dim=32)
    decoder = Decoder.load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    caches = [filled(decoder, 240) for _ in range(2)]
    plain, tokens = Passes(decoder, caches[1]), iter(torch.tensor(random_tokens(90, seed=5)).split(1))
    for cache in caches:
        cache.keep_mass(0)
    places = [caches[0].places[layer] is not None for layer in range(decoder.config.num_layers)]
    level, take = [named[0] for named in AttentionCall._fields_].index("level"), PreparedStep.__call__
    taken: list[int] = []
    fails = 0  # the step of a pass that does, as where there is no memory

    def counted(step, addresses):
        taken.append(step._numbers[0, level])
        step._numbers[:, level] = 99 if len(taken) == fails else taken[0]
        try:
            take(step, addresses)
        finally:
            step._numbers[:, level] = taken[0]

    monkeypatch.setattr(PreparedStep, "__call__", counted)
    made, make = [], PreparedStep.__init__
    monkeypatch.setattr(PreparedStep, "__init__", lambda step, *given: (made.append(step), make(step, *given))[1])
    windows = {decoder.config.sliding_window(layer) for layer, is_there in enumerate(places) if is_there}
    for graphs_before in range(2):
        graphs = Graphs(CpuCapture())  # with rows at other places
        captured = Passes(decoder, caches[0], graphs)
        for _, token in zip(range(40), tokens, strict=False):
            assert torch.equal(captured.forward(token, 1), plain.forward(token, 1))
        assert len(made) == (graphs_before + 1) * len(windows)  # once for all of these passes
        taken.clear()
        assert torch.equal(captured.forward(token := next(tokens), 1), plain.forward(token, 1))
        assert len(taken) == sum(places) > 0
        taken.clear()
        token, fails = next(tokens), sum(places)
        with pytest.raises(MemoryError, match="no memory for the temporaries of attention of 1 rows to"):
            captured.forward(token, 1)
        caches[0].break_off()
        fails = 0
        assert torch.equal(captured.forward(token, 1), plain.forward(token, 1))


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "wide", "mistral-window", "llama-bias", "gated", "few-bits"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_pieces_keep_is_planned(tmp_path, family, dtype) -> None:
    """All passes that can be captured, with what each has computed on the way; `wide` has an MLP that is no kernel."""
    if family == "few-bits":
        if dtype == torch.float32:
            pytest.skip("weights in few bits are captured in bfloat16")
        save_quantised(tmp_path, FORMATS["gptq"], "gemma3", head_dim=32)
    elif family == "gated":
        save_family(tmp_path, "qwen3.5", **GATED)
    else:
        wide = {"intermediate_size": 2048} if family == "wide" else {}
        save_family(tmp_path, "gemma3" if wide else family, head_dim=32, **wide)
    decoder = Decoder.load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    graphs, caches = Graphs(CpuCapture()), [filled(decoder, 30) for _ in range(CpuCapture.pieces_rows)]
    passes = [Passes(decoder, cache, graphs) for cache in caches]
    for n in range(1, CpuCapture.pieces_rows + 1):
        joined = JoinedPasses(passes[:n])
        for _ in range(CpuCapture.passes_before + 1):
            tokens = torch.tensor(random_tokens(n))
            joined.forward(tokens, [1] * n, [1] * n) if n > 1 else passes[0].forward(tokens)
            for cache in caches:
                cache.rollback(30)
    capture = graphs.capture
    assert isinstance(capture, CpuCapture) and len(graphs.pieces_of(decoder)._passes) == CpuCapture.pieces_rows
    taken = held_bytes(graphs.held())
    assert 0 < room_bytes(capture) < taken
    plan = make_plan(RunRequest(decoder.config, None, dtype, 900, Settings(tiers=1), sequences=len(caches)))
    assert taken <= plan.captured <= 3 * taken


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "wide", "mistral-window", "llama-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_whole_passes_keep_is_planned(tmp_path, family, dtype) -> None:
    """Of the target up to the longest one, and of the draft as many rows; `wide` has an MLP that is no kernel."""
    wide = {"intermediate_size": 2048} if family == "wide" else {}
    save_family(tmp_path, "gemma3" if wide else family, head_dim=32, **wide)
    decoder = Decoder.load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    graphs = Graphs(CpuCapture())
    passes = [Passes(decoder, make(decoder), graphs) for make in (retrieval_cache, streaming_cache)]
    for one, longest in zip(passes, (CpuCapture.most_tokens, 4), strict=True):
        length = one.cache.length
        for n in range(1, longest + 1):
            for _ in range(CpuCapture.passes_before + 1):
                one.forward(torch.tensor(random_tokens(n)), n)
                one.cache.rollback(length)
        assert replays_of(one) == longest
    taken = held_bytes(held for one in (*passes, graphs) for held in one.held() if not is_of(decoder.rope, held))
    plan = make_plan(RunRequest(decoder.config, decoder.config, dtype, 900, Settings()))
    assert sum(plan._captured_rows(CpuCapture.most_tokens)) == 55 + 10
    assert taken <= plan.captured - plan._captured_in_pieces() <= 3 * taken


def is_of(rope, held) -> bool:
    """Whether a captured pass has it of the table of rotations, which is counted where that is held."""
    return any(held[1].untyped_storage()._cdata == table.untyped_storage()._cdata for _, table in rope.held())


@pytest.mark.parametrize("draft", ["model", "model,lookup"])
def test_what_is_captured_in_a_run_is_held_and_planned(tmp_path, draft) -> None:
    """All that captured passes compute in, their results, and what they are given."""
    save_llama(tmp_path / "target", seed=1, num_key_value_heads=2, head_dim=32)
    save_llama(tmp_path / "model", seed=1, num_hidden_layers=1, head_dim=32)
    models = tmp_path / "target", f"{tmp_path}/{draft}"
    engine = Engine.load(*models, device="cpu", dtype="bfloat16", budget=64, block_length=7, draft_length=3)
    capture, most, replays = engine._capture, 0, list[int]()
    assert isinstance(capture, CpuCapture)
    run = engine.stream(PROMPT, Sampling(0.9, seed=1), 60, ignore_eos=True)
    for _ in run:
        held = held_bytes(engine.held(), "captured")
        assert room_bytes(capture) <= held <= run.sequence.active.plan.captured
        most = max(most, room_bytes(capture))
        replays = [replays_of(passes) for passes in run.sequence.active.passes.values()]
    assert most and sum(replays) > 2, "of several tiers"
    run.close()
    assert not held_bytes(engine.held(), "captured")


def room_bytes(capture: CpuCapture) -> int:
    """What captured passes compute in."""
    return sum(room.nbytes for room in {tape.room for tape in capture._tapes} if room)


def test_layers_compute_in_the_same_memory(tmp_path: Path) -> None:
    """So do operations whose results are needed by none of the next ones."""
    taken = []
    for layers in (1, 4):
        save_llama(tmp_path, num_hidden_layers=layers, head_dim=32)
        decoder = Decoder.load(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"))
        graphs, cache = Graphs(CpuCapture()), filled(decoder, 30)
        for token in random_tokens(CpuCapture.passes_before + 1):
            Passes(decoder, cache, graphs).forward(torch.tensor([token]))
        assert isinstance(graphs.capture, CpuCapture)
        taken.append(room_bytes(graphs.capture))
    assert taken[0] == taken[1] > 0
    x = torch.ones(1000)
    with torch.inference_mode():
        capture = CpuCapture()
        (replay,), result = capture.capture(lambda _: (((x + 1) * 2 - 1) / 3).sum(0), None)
        x.fill_(4)
        replay()
    assert result.item() == 3000 and room_bytes(capture) < 3 * x.nbytes


def test_steps_of_several_sequences_are_captured_in_pieces(decoder) -> None:
    """A token of each: with the bits of passes as they come, over a text that they share and their own."""
    graphs, tokens = Graphs(CpuCapture()), iter(random_tokens(900, seed=7))
    texts = [filled(decoder, 512) for _ in range(2)]
    caches = [[sharing(decoder, text, 12 * i) for i in range(1, 5)] for text in texts]
    captured, plain = (JoinedPasses([Passes(decoder, one, of) for one in some])
                       for some, of in zip(caches, (graphs, Graphs()), strict=True))  # fmt: skip
    for round_number in range(CpuCapture.passes_before + 6):
        counts = [2, 1, 1, 3] if round_number == CpuCapture.passes_before + 3 else [1] * 4
        some = torch.tensor([next(tokens) for _ in range(sum(counts))])
        assert torch.equal(captured.forward(some, counts, counts), plain.forward(some, counts, counts))
    passes = graphs.pieces_of(decoder)._passes
    assert [key for key, one in passes.items() if one.is_captured] == [(4, 4, False)]
    ours, theirs = ([one.read_so_far().num_bytes for one in some] for some in caches)
    assert ours == theirs
    with pytest.MonkeyPatch.context() as patch:  # a pass fails between two layers, and comes once more
        patch.setattr(PreparedStep, "__call__", fails_once(PreparedStep.__call__))
        some = torch.tensor([next(tokens) for _ in range(4)])
        with pytest.raises(MemoryError):
            captured.forward(some, [1] * 4, [1] * 4)
        for one in caches[0]:
            one.break_off()
        assert torch.equal(captured.forward(some, [1] * 4, [1] * 4), plain.forward(some, [1] * 4, [1] * 4))


def sharing(decoder: Decoder, text: FullCache, own: int) -> FullCache:
    """A cache that begins with all of `text`, and has so many tokens of its own."""
    where = {"dtype": decoder.dtype, "device": decoder.device}
    blocks = DeviceBlocks(decoder.config.full_layers, **where, capacity=400, block_size=256)
    cache = FullCache(decoder.config, decoder.rope, blocks, chunk_size=4, prefix=text, start=text.length)
    append(decoder, cache, random_tokens(own, seed=own))
    cache.keep_mass(0)
    return cache


def fails_once(call):
    """`call`, but for the second time it is called."""
    calls = iter(range(100))

    def failing(*args):
        if next(calls) == 1:
            raise MemoryError("none left")
        return call(*args)

    return failing
