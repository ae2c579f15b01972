"""Two ranks whose GPUs have unequal free memory place blocks alike: else one would wait in a sum for the other."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from spmd import run_forks
from triforce.kernels.selection import use_kernels
from triforce.offload.planning.memory import plan_here
from triforce.offload.planning.request import RunRequest
from triforce.offload.settings import Settings
from triforce.tp.model.config import ModelConfig
from triforce.tp.parallel.place import Place
from triforce.tp.parallel.ranks import ALONE, Ranks

GIB = 2**30
SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
SHAPE |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
SHAPE |= {"tie_word_embeddings": False}


def placements(monkeypatch, free):
    """What each rank places by itself, and what it places together with the other: by rank."""

    def find():
        place = Place.from_environment()
        assert place is not None
        ranks = Ranks.join(place, torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[ranks.rank] * GIB, 80 * GIB))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 200 * GIB}))
        config = ModelConfig.from_json(SHAPE, Path("shape"))
        request = RunRequest(config, None, torch.bfloat16, 100_000, Settings(tiers=2), gpus=2)
        device = torch.device("cuda", 0)
        with use_kernels(as_gpu={"triton"}):
            found = [asdict(plan_here(request, device, of).placement) for of in (ALONE, ranks)]
        os.write(1, (json.dumps([ranks.rank, found]) + "\n").encode())

    found = sorted(json.loads(line) for line in run_forks(find, 2).splitlines() if line.startswith("["))
    assert [rank for rank, _ in found] == [0, 1]
    return [of_rank for _, of_rank in found]


@pytest.mark.parametrize("free", [[70, 24], [20, 70], [22, 24]])
def test_ranks_with_unequal_free_memory_place_blocks_alike(monkeypatch, free):
    (alone, together), (other_alone, other_together) = placements(monkeypatch, free)
    assert alone != other_alone, "by itself each would place blocks differently"
    assert together == other_together
    assert together == (alone if free[0] < free[1] else other_alone), "the one with the least memory decides"
