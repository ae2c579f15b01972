"""What only a GPU can show: copies beside computation, and a CPU's tokens. Its kernels are in `test_triton`."""

from typing import Any

import pytest
import torch
from quantised import FORMATS, save_quantised
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.transfer.host_blocks import Ring
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder

pytestmark = pytest.mark.gpu

BLOCK = (2, 4, 256, 64)
LENGTHS: dict[str, Any] = {"budget": 64, "draft_length": 3, "block_length": 7}


@pytest.fixture
def link(request):
    from triforce.offload.transfer.cuda_link import CudaLink

    link = CudaLink(torch.device("cuda"), **getattr(request, "param", {}))
    yield link
    link.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    model = save_llama(root / "target", seed=1, num_key_value_heads=2, head_dim=32)
    prompt = random_tokens(900, seed=3)
    return root, prompt, greedy_oracle(model, prompt, 60)


def test_blocks_come_in_order_and_are_whole(link):
    host = link.host_memory((40, *BLOCK), torch.float32)
    host.copy_(torch.arange(40.0).view(-1, 1, 1, 1, 1).expand(40, *BLOCK))
    ring = Ring(link, [torch.empty(BLOCK, device="cuda") for _ in range(3)])
    ring.begin(iter(host))
    sums = [block.mean() for block in ring.next_blocks(40)]  # nothing waits on the host until the end
    assert torch.stack(sums).tolist() == list(map(float, range(40)))
    torch.cuda.synchronize()
    traffic = link.traffic()
    assert traffic.bytes_in == host.numel() * 4
    assert traffic.busy_s > 0


def test_fetch_sees_what_was_stored_before(link):
    host = link.host_memory(BLOCK, torch.float32)
    stored = torch.rand(BLOCK, device="cuda")
    link.store(stored, host)
    buffer = torch.empty(BLOCK, device="cuda")
    link.fetch(host, buffer).wait()
    assert torch.equal(buffer, stored)
    link.wait_for_stores()
    assert torch.equal(host, stored.cpu())


def test_host_memory_is_page_locked(link):
    assert link.host_memory((3, 5, 7), torch.bfloat16).is_pinned()


@pytest.mark.parametrize("link", [{"largest_piece": 3 * 2**20}], indirect=True)
def test_blocks_of_memory_locked_in_several_pieces_are_copied_whole(link):
    host = link.host_memory((9, 2, 4, 100, 64), torch.float32)  # blocks of 200 KiB
    host.copy_(torch.arange(9.0).view(-1, 1, 1, 1, 1).expand(host.shape))
    buffer = torch.empty(host.shape[1:], device="cuda")
    for index, block in enumerate(host):
        link.fetch(block, buffer).wait()
        assert torch.all(buffer == index)


def test_an_error_that_was_cleared_does_not_come_back(link):
    assert link._runtime.lock_pages(1, 4096) != 0
    link._runtime.clear_error()
    assert torch.zeros(3, device="cuda").add(1).sum().item() == 3


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("resident", [None, 0.0])
def test_greedy_tokens_equal_transformers_on_a_cpu(models, tiers, resident):
    root, prompt, want = models
    engine = Engine.load(
        root / "target", root / "draft", device="cuda", dtype="float32", tiers=tiers, resident=resident, budget=64
    )
    result = engine.generate(prompt, Sampling(temperature=0.0), 60)
    assert result.token_ids == want
    assert (result.stats["link"]["bytes_streamed"] > 0) == (resident is not None)
    assert result.stats["memory"]["device_peak_bytes"] > 0


def test_streamed_logits_equal_those_at_hand(models, link):
    root, prompt, _ = models
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=torch.device("cuda"))
    given = {"dtype": torch.float32, "device": decoder.device}
    blocks = StreamedBlocks(decoder.part, link, Placement.streaming(1400, 64, 2, 4), **given)
    streamed = FullCache(decoder.part, decoder.rope, blocks, chunk_size=4)
    all_on_device = FullCache.on_device(decoder.part, decoder.rope, **given, capacity=1400, chunk_size=4)
    tokens = torch.tensor(prompt + prompt[:400], device="cuda")
    for start, stop in ((0, 800), (800, 805), (805, 869), (869, 1200)):
        got, want = (decoder.forward(tokens[start:stop], cache, num_logits=4) for cache in (streamed, all_on_device))
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("tiers", [1, 3])
def test_blocks_that_stream_packed_change_no_token(models, tiers):
    root, prompt, _ = models
    prompt, found, streamed = prompt * 3, [], []
    for pack in ("auto", "off"):
        engine = Engine.load(
            root / "target", root / "draft", device="cuda", dtype="bfloat16", resident=0, tiers=tiers, pack=pack,
            refresh="round", **LENGTHS,
        )  # fmt: skip
        runs = [engine.generate(prompt + more, Sampling(0.0), 60, ignore_eos=True) for more in ([], prompt[:90])]
        found.append([run.token_ids for run in runs])
        streamed.append(runs[-1].stats["link"]["bytes_streamed"])
        assert runs[-1].stats["settings"]["packed"] == (pack == "auto")
    assert found[0] == found[1] and 0 < streamed[0] < 0.8 * streamed[1]


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "fp8"])
def test_quantised_weights_give_the_tokens_of_their_numbers(models, tmp_path, name):
    root, prompt, _ = models
    want = greedy_oracle(save_quantised(tmp_path, FORMATS[name], seed=1), prompt, 40)
    for tiers, resident in ((1, None), (3, 0.0)):
        engine = Engine.load(
            tmp_path, root / "draft", device="cuda", dtype="float32", tiers=tiers, resident=resident, budget=64
        )
        assert engine.generate(prompt, Sampling(temperature=0.0), 40).token_ids == want


@pytest.fixture
def captures(monkeypatch):
    """A list that grows with every pass that is captured, by the number of its pieces."""
    from triforce.offload.graphs.cuda import CudaCapture

    capture, done = CudaCapture.capture, []

    def noted(*given):
        found = capture(*given)
        done.append(len(found[0]))
        return found

    monkeypatch.setattr(CudaCapture, "capture", noted)
    return done


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_change_no_token(models, captures, tiers, temperature):
    root, prompt, want = models
    sampling = Sampling(temperature, 0.95, seed=5)
    engine = Engine.load(root / "target", root / "draft", device="cuda", dtype="float32", tiers=tiers, **LENGTHS)
    captured = engine.generate(prompt, sampling, 60)
    assert captured.stats["warnings"] == []
    assert captures.count(1) >= tiers - 1 and max(captures) > 1
    engine._capture = None
    plain = engine.generate(prompt, sampling, 60, reuse=0)  # or other rows say which chunks matter
    assert captured.token_ids == plain.token_ids
    assert captured.token_ids == want or temperature > 0


def test_a_draft_does_not_wait_for_the_gpu(models, captures):
    root, prompt, _ = models
    engine = Engine.load(root / "target", root / "draft", device="cuda", dtype="bfloat16", **LENGTHS)
    run = engine.stream(prompt, Sampling(0.8, 0.9, 40, seed=1), 60)
    next(run)
    sequence = run.sequence.active
    with torch.inference_mode():
        for tier in (run.batch.tiers[2], run.batch.tiers[1]):
            for mode in ("default", "default", "error"):  # warmed up, captured, replayed
                torch.cuda.set_sync_debug_mode(mode)
                try:
                    tokens, _, _, _ = tier._drawn([sequence], 4, False)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert tokens.shape == (1, 4)
                tier.rollback(sequence, len(sequence.context) - 1)
    assert len(captures) >= 2
    assert run.warnings == []


def test_a_capture_that_fails_leaves_the_tokens_and_a_warning(models, monkeypatch):
    root, prompt, want = models
    attend = RetrievalCache.attend

    def waiting(self, layer, q, k, v):
        if layer == 1 and torch.cuda.is_current_stream_capturing():
            q.amax().item()
        return attend(self, layer, q, k, v)

    monkeypatch.setattr(RetrievalCache, "attend", waiting)
    engine = Engine.load(root / "target", root / "draft", device="cuda", dtype="float32", **LENGTHS)
    stats = engine.generate(prompt, Sampling(temperature=0.0), 60).stats
    assert stats["token_ids"] == want
    assert len(stats["warnings"]) == 1
    assert "without captured passes" in stats["warnings"][0]
    assert "\n" not in stats["warnings"][0]
    torch.cuda.empty_cache()  # which PyTorch refuses while it takes a capture to be under way


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_gpus_capture_their_sums(models, temperature):
    root, prompt, want = models
    job = {"model": str(root / "target"), "draft": str(root / "draft"), "device": "cuda", "prompt": prompt}
    job |= {"new_tokens": 60, "temperature": temperature, "seed": 5, "settings": LENGTHS}
    (reports,) = run_jobs([job], 2)
    assert [report["warnings"] for report in reports] == [[], []]
    assert reports[0]["token_ids"] == reports[1]["token_ids"]
    assert reports[0]["token_ids"] == want or temperature > 0
    assert reports[0]["collectives"]["all_reduce_graphs"] >= 2  # asked of each other after a capture


def test_memory_that_runs_out_is_explained(models):
    root, prompt, _ = models
    engine = Engine.load(root / "target", device="cuda", dtype="float32")
    run = engine.stream(prompt, Sampling(temperature=0.0), 60)
    next(run)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
    try:
        torch.cuda.empty_cache()
        with pytest.raises(Exception, match="GPU memory ran out"):
            list(run)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
