"""Two ranks whose GPUs have unequal free memory place blocks alike: else one would wait in a sum for the other."""

import json
import os
import subprocess

import pytest
from spmd import ENVIRONMENT, torchrun

JOB = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
import torch
from triforce.offload.planning import memory
from triforce.offload.planning.request import RunRequest
from triforce.offload.settings import Settings
from triforce.tp.model.config import ModelConfig
from triforce.tp.parallel.place import Place
from triforce.tp.parallel.ranks import ALONE, Ranks

free = json.loads(sys.argv[1])
raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
raw |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
config = ModelConfig.from_json(raw | {"tie_word_embeddings": False}, Path("shape"))
ranks = Ranks.join(Place.from_environment(), torch.device("cpu"))
torch.cuda.mem_get_info = lambda device: (free[ranks.rank] * 2**30, 80 * 2**30)
torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda device: 0
memory.usable_packages = lambda device: frozenset({"triton"})
memory.psutil.virtual_memory = lambda: type("Memory", (), {"available": 200 * 2**30})
request = RunRequest(config, None, torch.bfloat16, 100_000, Settings(tiers=2), gpus=2)
found = [asdict(memory.plan_here(request, torch.device("cuda", 0), of).placement) for of in (ALONE, ranks)]
os.write(1, (json.dumps([ranks.rank, found]) + chr(10)).encode())
"""


def placements(directory, free):
    """What each rank places by itself, and what it places together with the other: by rank."""
    script = directory / "job.py"
    script.write_text(JOB)
    command = torchrun("--standalone", "--nproc-per-node", 2, script, json.dumps(free))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert [rank for rank, _ in found] == [0, 1]
    return [of_rank for _, of_rank in found]


@pytest.mark.parametrize("free", [[70, 24], [20, 70], [22, 24]])
@pytest.mark.slow(keep=1)
def test_ranks_with_unequal_free_memory_place_blocks_alike(tmp_path, free):
    (alone, together), (other_alone, other_together) = placements(tmp_path, free)
    assert alone != other_alone, "by itself each would place blocks differently"
    assert together == other_together
    assert together == (alone if free[0] < free[1] else other_alone), "the one with the least memory decides"
