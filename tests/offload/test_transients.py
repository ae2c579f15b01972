"""What lasts for a part of a pass only is planned too: runs of true shapes take as much as their plan says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from computing_nothing import ComputingNothing, UnwrittenWeights, launching_nothing
from cuda_simulator import Simulator
from simulated_gpu import simulated_system
from triforce.kernels import use_kernels
from triforce.offload import Engine, Request, Sampling
from triforce.offload.held import bytes_by_part
from triforce.offload.planning.run_plan import RunPlan, make_plan
from triforce.offload.settings import Settings
from triforce.offload.speculation.tiers import Tier
from triforce.tp.decoder import Decoder
from triforce.tp.devices import DeviceMemory
from triforce.tp.model.config import ModelConfig

CPU = torch.device("cpu")
TOKENS, NEW_TOKENS = 32768, 27
SHORT = 4096
PLENTY = 2**42

SAMPLED = Sampling(0.8, top_p=0.9)
MIXED = {"alike": (SAMPLED,), "filters": (SAMPLED, Sampling(0.6, top_k=50), Sampling(0.0), Sampling(1.0, seed=3))}
"""How tokens are drawn, of one sequence after another."""

COMMON = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "bos_token_id": 1}
COMMON |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "eos_token_id": 2}
DRAFT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}
HYBRID |= {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "num_key_value_heads": 4}
SHAPES = {  # of two layers, and with the vocabulary, of Llama 2 7B, Llama 3.1 8B, Qwen3 32B and Qwen3.5 27B
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "vocab_size": 151936},
    "27B": {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "vocab_size": 248320} | HYBRID,
}
SHAPES["8B"]["num_key_value_heads"] = SHAPES["32B"]["num_key_value_heads"] = 8
SHAPES["32B"]["head_dim"] = 128


def config(directory, **shape):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(COMMON | shape))
    return ModelConfig.load(directory)


@dataclass
class Taken:
    """Bytes that a prefill and the rounds took at most beside what is held from round to round."""

    plan: RunPlan
    prefill: int
    rounds: list[int]


@contextmanager
def engine_of(directory, name, dtype, resident, packages=("triton",)) -> Iterator[tuple[Engine, Simulator]]:
    """An engine that computes nothing, and the simulator that counts."""
    simulator = Simulator()
    vocabulary = SHAPES[name]["vocab_size"]
    shapes = config(directory / "target", **SHAPES[name]), config(directory / "draft", vocab_size=vocabulary, **DRAFT)
    system = replace(simulated_system(simulator), device_memory=lambda device: DeviceMemory(PLENTY, PLENTY, 0))

    def host_memory(shape, dtype):
        memory = torch.empty(*shape, dtype=dtype)
        simulator.put(simulator.memory(memory), True)
        return memory

    with launching_nothing(), use_kernels(as_gpu=packages), ComputingNothing(), simulator:
        weights = UnwrittenWeights(dtype)
        given = {"host_memory": host_memory} if "triton" in packages else {}
        decoders = [Decoder(shape, weights, CPU, **given) for shape in shapes]  # pyright: ignore[reportArgumentType]
        settings = Settings(resident=resident, block_length=24, draft_length=4, pack="off")
        engine = Engine(decoders[0], decoders[1], settings, system=system)
        for _, tensor in engine.held():
            simulator.memory(tensor)
        bare = make_plan(replace(engine._models.request(1), gpu_bytes=PLENTY, kernels="triton" in packages))
        assert (bare.embedding > 0) == ("triton" in packages)
        assert simulator.live == bare.weights + bytes_by_part(engine.held())["rope"]
        yield engine, simulator


def measured(directory, name, dtype, resident, packages=("triton",)) -> Taken:
    with engine_of(directory, name, dtype, resident, packages) as (engine, simulator):
        run = engine.stream([7] * TOKENS, Sampling(0.8, top_p=0.9), NEW_TOKENS, ignore_eos=True)
        request = replace(engine._models.request(TOKENS + NEW_TOKENS, answer=NEW_TOKENS), gpu_bytes=PLENTY)
        plan, found = make_plan(replace(request, kernels="triton" in packages)), []
        simulator.peak = simulator.live
        for event in run:
            held = bytes_by_part(engine.held())
            if not event.index:  # neither the retrieval cache nor the draft's were there
                held |= {"retrieval": 0, "mass": 0}
            found.append(simulator.peak - sum(held.values()))
            simulator.peak = simulator.live
            if event.index == 2:
                break
        run.close()
    return Taken(plan, found[0], found[1:])


@pytest.mark.parametrize(
    ("name", "dtype", "resident"),
    [(name, torch.bfloat16, resident) for name in SHAPES for resident in (None, 0)]
    + [("8B", torch.float32, 0), ("7B", torch.float32, None)],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.slow(keep=("7B-bfloat16-0", "8B-bfloat16-None"))
def test_a_prefill_and_a_round_take_what_is_planned(tmp_path, name, dtype, resident):
    taken = measured(tmp_path, name, dtype, resident)
    assert 0.7 <= taken.prefill / taken.plan.prefill <= 1
    assert 0.7 <= max(taken.rounds) / taken.plan.step <= 1


@dataclass
class Several:
    """Sequences that are decoded together."""

    plans: list[RunPlan]
    """Of each, in the order in which they began."""
    reading: dict[int, int]
    """Bytes that the prefill of each took at most, with others' rounds between its slices, beside what lasts."""
    rounds: list[int]
    """Bytes that rounds of all took."""


def several(directory, name, resident, begun, joiners=0, *, tokens=SHORT, samplings=(SAMPLED,), logprobs=None):
    """Args: `begun` sequences begin together, over one text with a question of their own; `joiners`, each with a text
    of its own, join one after another, once those before them run, and are read in slices."""
    with engine_of(directory, name, torch.bfloat16, resident) as (engine, simulator):

        def request(i):
            text = [7] * tokens if i < begun else [20 + i] * tokens
            sampling = samplings[i % len(samplings)]
            return Request(text + [9 + i] * 70, sampling, 90, ignore_eos=True, top_logprobs=logprobs)

        run = engine.batch([request(i) for i in range(begun)], in_slices=joiners > 0)
        found, added = Several([], {}, []), begun
        simulator.peak = simulator.live
        for index, event in run:
            held = bytes_by_part(engine.held())
            taken = simulator.peak - sum(held.values())
            running = sum(one.state == "running" for one in run.sequences)
            if index == added - 1 and not event.index:
                own = bytes_by_part(run.sequences[index].active.full.held())
                found.reading[index] = max(found.reading.get(index, 0), taken + own.get("mass", 0))
            elif running < added:
                found.reading[added - 1] = max(found.reading.get(added - 1, 0), taken)
            elif added == begun + joiners:
                found.rounds.append(taken)
            if running == added < begun + joiners:
                run.add(request(added))
                added += 1
            simulator.peak = simulator.live
            if len(found.rounds) == added:
                break
        found.plans = [one.active.plan for one in run.sequences]
        run.close()
    return found


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("count", "resident", "samplings"), [(2, 0, "filters"), (4, None, "filters"), (8, None, "alike")]
)
@pytest.mark.slow(keep=("4-None-filters-8B",))
def test_a_round_of_several_takes_what_is_planned(tmp_path, name, count, resident, samplings):
    taken = several(tmp_path, name, resident, count, samplings=MIXED[samplings])
    assert 0.7 <= max(taken.rounds) / taken.plans[0].step <= 1


@pytest.mark.parametrize(
    ("name", "begun", "joiners", "resident"),
    [("7B", 3, 1, None), ("8B", 2, 1, 0), ("8B", 1, 3, None), ("32B", 1, 3, 0)],
)
@pytest.mark.slow(keep=("8B-2-1-0",))
def test_joining_takes_what_is_planned(tmp_path, name, begun, joiners, resident):
    """A prompt is read in slices, between which others' rounds take their step; then all of them take one together."""
    taken = several(tmp_path, name, resident, begun, joiners)
    for i in range(begun, begun + joiners):
        assert 0.7 <= taken.reading[i] / taken.plans[i].reading <= 1, i
    assert 0.7 <= max(taken.rounds) / taken.plans[-1].step <= 1


def held_too_long(monkeypatch):
    """A copy of what an MLP is computed from, as large as its gate and up, while it is computed."""
    mlp = Decoder._mlp

    def and_copies(self, layer, rows):
        copy = rows.new_empty(rows.shape[0], 2 * self.part.intermediate_size)
        mlp(self, layer, rows)
        del copy

    monkeypatch.setattr(Decoder, "_mlp", and_copies)


def logits_twice(monkeypatch):
    """A copy of what a verification's rows are drawn from, and one of what the draft's were."""
    step = Tier.step

    def and_copies(self, sequences, limits, **more):
        copy = torch.empty(2, 25 if self.name == "verify" else 0, SHAPES["32B"]["vocab_size"])
        found = step(self, sequences, limits, **more)
        del copy
        return found

    monkeypatch.setattr(Tier, "step", and_copies)


@pytest.mark.parametrize(("plant", "phase"), [(held_too_long, "prefill"), (logits_twice, "rounds")])
def test_a_copy_too_many_is_noticed(tmp_path, monkeypatch, plant, phase):
    plant(monkeypatch)
    taken = measured(tmp_path, "32B", torch.bfloat16, None)
    assert (taken.prefill > taken.plan.prefill) == (phase == "prefill")
    assert (max(taken.rounds) > taken.plan.step) == (phase == "rounds")
