"""Whole runs on a simulated GPU: nothing is read before it is there, and nothing overwritten while it is read."""

from typing import Any

import pytest
from cuda_simulator import Simulator
from simulated_gpu import as_on_a_gpu, simulated_system
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    model = save_llama(root / "target", seed=1, num_key_value_heads=2)
    prompt = random_tokens(300, seed=3)
    return root, prompt, greedy_oracle(model, prompt, 14)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.slow(keep=("None",))
def test_whole_runs_give_the_tokens_of_transformers(models, seed):
    root, prompt, want = models
    settings: Any = {"dtype": "float32", "resident": 0, "budget": 64, "refresh": "round"}
    simulator = Simulator(seed)
    system = simulated_system(simulator)
    engine = Engine.load(root / "target", root / "draft", device="cpu", **settings, system=system)
    with as_on_a_gpu(), simulator:
        assert engine.generate(prompt, GREEDY, 14).token_ids == want
        run = engine.stream([*prompt, *want[:9]], GREEDY, 60)  # a follow-up, broken off
        assert next(run).tokens == want[9:10]
        next(run)
        run.close()
        again = engine.generate(prompt, GREEDY, 14)
        assert again.token_ids == want
        assert again.stats["link"]["bytes_streamed"] > 0 or seed is not None
        simulator.synchronize()
