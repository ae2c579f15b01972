"""An embedding that is not the output head too is in host memory where a GPU computes: the same logits and tokens, what
is planned and held, and what comes of it where the system locks no memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cuda_simulator import Simulator
from gguf_files import Form, save_gguf
from simulated_gpu import simulated_system
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.kernels import use_kernels
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.held import bytes_by_part
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.tp.decoder import Decoder
from triforce.tp.weights.registry import find_model

pytest.importorskip("triton", reason="Triton is not installed; pip install triton adds it on Linux")

CPU = torch.device("cpu")
PROMPT, NEW_TOKENS = random_tokens(40, seed=3), 6
BYTES = 97 * 64 * 4
"""Of the embedding of a tiny model in float32."""


@pytest.fixture(autouse=True)
def on_a_gpu():
    with use_kernels(attention="plain", as_gpu={"triton"}):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target with an embedding of its own, and one that has it as output head; and a draft of either kind."""
    root = tmp_path_factory.mktemp("models")
    for name, tied in (("apart", False), ("tied", True)):
        save_llama(root / name, seed=1, num_key_value_heads=2, tie_word_embeddings=tied)
        save_llama(root / f"{name}-draft", seed=2, num_hidden_layers=1, hidden_size=32, tie_word_embeddings=tied)
    return root


def engine_of(target, draft="none", *, locked=2**30, **settings):
    """An engine on a GPU whose memory alone is simulated, of which the system locks so many bytes of the host's."""
    simulator = Simulator()
    simulator.most_locked = locked
    system = simulated_system(simulator, device_bytes=2**33)
    return Engine.load(target, draft, device="cpu", dtype="float32", system=system, **settings), simulator


def logits_of(decoder, tokens):
    blocks = DeviceBlocks(decoder.part, dtype=decoder.dtype, device=CPU, capacity=64, block_size=64)
    cache = FullCache(decoder.part, decoder.rope, blocks, chunk_size=8)
    return decoder.forward(torch.tensor(tokens), cache, num_logits=len(tokens))


def on_host(shape, dtype):
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_the_same_bit_by_bit(tmp_path, family, dtype):
    save_family(tmp_path, family, tie_word_embeddings=False)
    held, there = (Decoder.load(tmp_path, dtype=dtype, device=CPU, host_memory=made) for made in (on_host, None))
    assert torch.equal(logits_of(held, PROMPT), logits_of(there, PROMPT))
    sizes = [sum(tensor.nbytes for part, tensor in one.held() if part == "weights") for one in (held, there)]
    assert sizes[1] - sizes[0] == held.matrices.embedding_bytes(dtype) == 97 * 64 * dtype.itemsize
    assert there.has_embedding_to_spare and not held.has_embedding_to_spare


@pytest.mark.parametrize("form", [Form.Q4_K, Form.Q8_0, Form.Q4_0, Form.BF16], ids=lambda form: form.name)
def test_logits_of_an_embedding_in_few_bits_are_the_same(tmp_path, form):
    save_gguf(tmp_path / "m", "llama", lambda name: form if "embed" in name else Form.F32, num_hidden_layers=1)
    directory = find_model(tmp_path / "m.gguf")
    both = (Decoder.load(directory, dtype=torch.float32, device=CPU, host_memory=made) for made in (on_host, None))
    held, there = both
    assert torch.equal(logits_of(held, PROMPT), logits_of(there, PROMPT))
    sizes = [sum(tensor.nbytes for part, tensor in one.held() if part == "weights") for one in (held, there)]
    assert sizes[1] - sizes[0] == held.matrices.embedding_bytes(torch.float32) > 0


@pytest.mark.parametrize("resident", [None, 0])
def test_tokens_are_those_of_transformers_and_what_is_held_is_planned(models, resident):
    model = save_llama(models / "apart", seed=1, num_key_value_heads=2, tie_word_embeddings=False)
    engine, simulator = engine_of(models / "apart", models / "apart-draft", resident=resident, budget=16)
    assert engine.draft
    embeddings = sum(one.matrices.embedding_bytes(torch.float32) for one in (engine.target, engine.draft))
    assert sum(simulator.locked.values()) == embeddings == BYTES * 3 // 2
    plan = engine.plan(len(PROMPT) + NEW_TOKENS)
    assert plan.embedding == embeddings and plan.request.host_embedding
    assert bytes_by_part(engine.held())["weights"] == plan.weights
    elsewhere = make_plan(replace(plan.request, locks_embedding=False))
    assert elsewhere.embedding == 0
    assert elsewhere.weights == plan.weights + embeddings
    assert elsewhere.device_total == plan.device_total + embeddings
    assert elsewhere.host_total == plan.host_total - embeddings
    found = engine.generate(PROMPT, Sampling(0.0), NEW_TOKENS, ignore_eos=True)
    assert found.token_ids == greedy_oracle(model, PROMPT, NEW_TOKENS)
    engine.close()


def test_host_memory_that_it_has_is_there_for_the_next_run(models, monkeypatch):
    """What is free on the host is less by an embedding that is loaded, and plans count it again."""
    engine, _ = engine_of(models / "apart")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**34))
    plan = engine.plan(64)
    assert plan.request.host_bytes == 2**34 + plan.request.process_bytes + BYTES
    assert plan.host_total == plan.request.process_bytes + BYTES


def test_where_host_memory_is_short_it_is_on_the_gpu(models, monkeypatch):
    """If that has room for it: a run that fits so begins."""
    short = engine_of(models / "apart")[0].plan(64).request.process_bytes + BYTES // 2
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=short))
    engine, simulator = engine_of(models / "apart")
    plan = engine.plan(64)
    assert plan.fits and plan.embedding == 0 == sum(simulator.locked.values())
    assert bytes_by_part(engine.held())["weights"] == plan.weights
    assert engine.generate(PROMPT, Sampling(0.0), 2).token_ids


def test_an_output_head_stays_on_the_gpu(models):
    engine, simulator = engine_of(models / "tied", models / "tied-draft")
    plan = engine.plan(64)
    assert plan.embedding == 0 == sum(simulator.locked.values())
    assert bytes_by_part(engine.held())["weights"] == plan.weights


def test_where_the_system_locks_too_little_it_is_on_the_gpu_and_planned_there(models):
    engine, simulator = engine_of(models / "apart", models / "apart-draft", locked=BYTES - 1)
    assert sum(simulator.locked.values()) == BYTES // 2, "the draft's"
    plan = engine.plan(64)
    assert plan.embedding == 0 and not plan.request.host_embedding
    assert bytes_by_part(engine.held())["weights"] == plan.weights - BYTES // 2
    assert engine.generate(PROMPT, Sampling(0.0), 2).token_ids


def test_a_gpu_without_triton_has_it(models):
    with use_kernels(as_gpu=()):
        engine, simulator = engine_of(models / "apart")
        assert engine.plan(64).embedding == 0 == sum(simulator.locked.values())
        assert bytes_by_part(engine.held())["weights"] == engine.plan(64).weights


def test_a_cpu_has_it_among_its_weights(models):
    with use_kernels():
        engine = Engine.load(models / "apart", "none", device="cpu", dtype="float32")
        plan = engine.plan(64)
        assert plan.embedding == 0 and bytes_by_part(engine.held())["weights"] == plan.weights
