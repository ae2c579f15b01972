"""What rounds with weights in few bits take on a CPU is planned, at each level of the compiled kernels; where products
make numbers as they go, nothing is planned for these."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_simulator import Simulator
from triforce.kernels import Level, cpu_level
from triforce.offload import Engine, Sampling
from triforce.offload.held import bytes_by_part
from triforce.offload.planning.run_plan import RunPlan, make_plan
from triforce.offload.settings import Settings
from triforce.offload.shape_steps import RandomWeights
from triforce.tp.decoder import Decoder
from triforce.tp.model.config import ModelConfig

CPU = torch.device("cpu")
TOKENS, NEW_TOKENS, ROUNDS = 600, 60, 6
SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 4096}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
SHAPE |= {"max_position_embeddings": 4096, "eos_token_id": 2, "tie_word_embeddings": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def measured(dtype: torch.dtype) -> tuple[RunPlan, list[int]]:
    """The plan of a run, and the bytes that its rounds took at most beside what is held from round to round."""
    config = ModelConfig.from_json(SHAPE | {"quantization_config": AWQ}, Path("shape"))
    simulator = Simulator()
    with simulator:
        target = Decoder(config, RandomWeights(dtype, CPU), CPU)  # pyright: ignore[reportArgumentType]
        engine = Engine(target, None, Settings(tiers=2, budget=64, block_length=24))
        engine._capture = None  # what captured passes keep is not a round's
        for _, tensor in engine.held():
            simulator.memory(tensor)
        taken, run = [], engine.stream([7] * TOKENS, Sampling(0.8, top_p=0.9), NEW_TOKENS, ignore_eos=True)
        for event in run:
            taken.append(simulator.peak - sum(bytes_by_part(engine.held()).values()))
            simulator.peak = simulator.live
            if event.index == ROUNDS:
                break
        run.close()
        plan = engine.plan(TOKENS + NEW_TOKENS, NEW_TOKENS)
    return plan, taken[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_rounds_take_no_more_than_is_planned(dtype):
    plan, taken = measured(dtype)
    assert max(taken) <= plan.step
    in_products = dtype == torch.bfloat16 and cpu_level() >= Level.AVX512_BF16
    expanding = make_plan(replace(plan.request, makes_numbers=False), plan.placement)
    assert (plan.step < expanding.step) == plan.request.makes_numbers == in_products


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in Level if level < cpu_level()], ids=lambda level: level.name)
def test_so_it_is_on_every_lower_level(level):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", __file__],
        env=os.environ | {"TRIFORCE_CPU_LEVEL": level.name.lower()},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
