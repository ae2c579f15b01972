"""A GPU that another process takes memory from: a run that finds none in mid-pass ends with its text so far."""

import random

import ledger
import pytest
from cuda_simulator import Simulator
from profiles import profile_name
from simulated_gpu import as_on_a_gpu, simulated_system
from tiny import random_tokens
from triforce.offload import Engine, Sampling
from triforce.tp import CapacityError

GPU_BYTES = 200 * 2**20
"""Most of which is left free for cuBLAS and others."""

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return ledger.save_models(tmp_path_factory.mktemp("models"))


def histories(first, count):
    return range(first, first + (500 // 3 if profile_name() == "campaign" else count))


@pytest.mark.parametrize("first", [0, 1000, 2000])
@pytest.mark.slow(keep=("0",))
def test_memory_that_runs_out_in_a_pass_leaves_the_text_so_far(models, first):
    for seed in histories(first, 3):
        chance, simulator = random.Random(seed), Simulator()
        system = simulated_system(simulator, ledger.LIMITS, device_bytes=GPU_BYTES)
        settings = {"tiers": chance.choice([1, 2, 3]), "budget": 64, "block_length": chance.choice([None, 6, 24])}
        settings |= {"resident": chance.choice([None, 0]), "dtype": "float32"}
        prompt = random_tokens(chance.randint(60, 300), seed=seed)
        with as_on_a_gpu(), simulator:
            engine = Engine.load(models / "target", models / "draft", device="cpu", system=system, **settings)
            want = engine.generate(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True).token_ids
            run = engine.stream(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True, reuse=chance.choice([None, 0]))
            rounds = chance.randint(0, 3)
            with pytest.raises(CapacityError, match=r"GPU memory ran out: .* of 200\.0 MiB are taken; .*--resident"):
                for event in run:
                    if event.index == rounds:
                        simulator.limit, simulator.others = (
                            GPU_BYTES,
                            GPU_BYTES - simulator.live - chance.randint(0, 500),
                        )
            found = run.statistics.token_ids
            assert found == want[: len(found)] and len(found) > rounds, seed
            simulator.others, simulator.refused = 0, []
            assert engine.generate(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True).token_ids == want, seed
            assert not simulator.refused
            engine.close()


@pytest.mark.parametrize("first", [0, 1000, 2000])
@pytest.mark.slow(keep=("0",))
def test_what_another_process_takes_between_runs_is_planned_for(models, first):
    """A run is refused with the numbers before it begins, or has its text: what is kept of runs before makes room."""
    answered = refused = 0
    for seed in histories(first, 4):
        chance, simulator = random.Random(seed), Simulator()
        simulator.limit = GPU_BYTES
        system = simulated_system(simulator, ledger.LIMITS, device_bytes=GPU_BYTES)
        prompt = random_tokens(chance.randint(60, 300), seed=seed)
        settings = {"tiers": chance.choice([1, 2, 3]), "budget": 64, "dtype": "float32"}
        with as_on_a_gpu(), simulator:
            engine = Engine.load(models / "target", models / "draft", device="cpu", system=system, **settings)
            want = engine.generate(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True).token_ids
            reserve = engine.plan(len(prompt) + NEW_TOKENS, NEW_TOKENS).reserve
            for _ in range(3):
                left = int(chance.uniform(0.2, 2.5) * 2**20) + chance.choice([0, reserve, reserve])
                simulator.others = GPU_BYTES - simulator.live - left
                try:
                    assert engine.generate(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True).token_ids == want, seed
                    answered += 1
                except CapacityError as error:
                    assert "needs" in str(error) and "of GPU memory (weights" in str(error), seed
                    refused += 1
                assert not simulator.refused, seed
            engine.close()
    assert answered and refused
