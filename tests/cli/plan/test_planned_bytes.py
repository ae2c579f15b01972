"""What is planned is what a run takes, byte for byte, and a remedy is enough and not more."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import run_here, undocumented
from safetensors import safe_open
from tiny import random_tokens, save_family, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.caches.states import KEPT
from triforce.offload.held import held_bytes
from triforce.offload.planning.cards import CARDS
from triforce.offload.planning.remedies import remedies, shortfalls
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.offload.transfer.link import ThreadLink
from triforce.offload.transfer.make import make_blocks
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.model.config import ModelConfig
from triforce.tp.parallel.ranks import Ranks
from triforce.tp.parallel.split import Split
from triforce.tp.weights.registry import PRESETS

GIB = 2**30
PROMPT, NEW_TOKENS = 1900, 40
THIRTEEN = "yarn-llama-2-13b-128k"


def request_of(preset, gpus=1, gpu_memory=24.0, context=131_072, host=None, **settings):
    target, draft = PRESETS[preset].configs()
    host_bytes = None if host is None else int(host * GIB)
    settings = Settings(**settings)
    gpu_bytes = int(gpu_memory * GIB)
    return RunRequest(target, draft, target.dtype, context, settings, gpus, gpu_bytes=gpu_bytes, host_bytes=host_bytes)


def tensor_bytes(directory: Path) -> int:
    """Bytes of all weights in a directory's safetensors, in 16 bits."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("resident", [0.0, 0.004, None])
@pytest.mark.parametrize("pack", ["off", "on"])
@pytest.mark.slow
def test_a_run_takes_the_bytes_that_were_planned(resident, pack):
    """The embedded pair, on this CPU: blocks, their bytes on either side, and what a verification moves."""
    request = request_of("embedded", context=PROMPT + NEW_TOKENS, resident=resident, budget=256, pack=pack)
    planned = make_plan(request)
    engine = Engine.load("embedded", device="cpu", dtype="bfloat16", resident=resident, budget=256, pack=pack)
    run = engine.stream(random_tokens(PROMPT, 256), Sampling(temperature=0.0), NEW_TOKENS, ignore_eos=True)
    next(run)
    cache = engine._kept.caches[-1]
    blocks, rounds = cache.blocks, 0
    before = run.stats()["link"]["bytes_streamed"]
    for _ in run:
        rounds += 1
    assert rounds > 1
    # What does not stream is one block a layer on a GPU.
    assert planned.placement.block_size == (blocks.capacity if resident is None else blocks.block_size)
    assert held_bytes(blocks.held(), "resident_kv") == planned.resident_kv
    ring = planned.ring // planned.placement.together  # on a GPU packed blocks pass several at a time
    assert held_bytes(blocks.held()) == planned.resident_kv + ring + planned.open_stretches
    streams = isinstance(blocks, StreamedBlocks)
    on_host = sum(host.num_bytes for host in blocks._host) if isinstance(blocks, StreamedBlocks) else 0
    more_moved = 0
    if pack == "on" and resident is not None:  # and memory for blocks that do not pack: those with the first token
        assert isinstance(blocks, StreamedBlocks) and blocks._overflow.blocks <= request.target.num_layers
        num_host = planned.placement.num_blocks - planned.placement.num_resident
        whole = num_host * planned.placement.block_size * request.token_bytes
        assert on_host < 0.77 * whole
        more_moved = blocks._overflow.blocks * (whole - on_host) // (num_host * request.target.num_layers)
        room_of_spare = planned.spare - planned.placement.num_spare * (on_host // num_host)
        on_host += planned.room_for_unpacked - room_of_spare
    assert on_host == planned.streamed_kv and streams == (resident is not None)
    moved = (run.stats()["link"]["bytes_streamed"] - before) / rounds
    assert moved == planned.streamed_per_pass + more_moved
    directories = (Path(name) for name in (PRESETS["embedded"].target, PRESETS["embedded"].draft))
    assert planned.weights == sum(tensor_bytes(directory) for directory in directories)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "embedded"])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("memory", [20.0, 24.0, 48.0, 80.0, 141.0])
def test_what_is_planned_to_fit_is_within_the_memory(preset, gpus, memory):
    request = request_of(preset, gpus, memory, context=PRESETS[preset].configs()[0].max_position_embeddings)
    planned = make_plan(request)
    placement = planned.placement
    away = (placement.num_blocks - placement.num_resident) * placement.block_size * request.token_bytes
    assert planned.resident_kv + away >= request.token_bytes * request.context
    assert placement.packed == (placement.streams and request.dtype == torch.bfloat16)
    assert (
        (0.76 if placement.packed else 1.0) * away <= planned.streamed_kv <= (0.8 if placement.packed else 1.0) * away
    )
    if planned.resident_kv:
        assert request.gpu_bytes is not None and planned.device_total <= request.gpu_bytes and not shortfalls(request)
        if planned.placement.streams:
            block = planned.resident_kv // planned.placement.num_resident
            assert request.gpu_bytes - planned.device_total < block, "one more block of each layer would fit"


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (request_of(THIRTEEN, budget=12288), {"gpus", "gpu-memory"}),
        (request_of(THIRTEEN, 2, 21.0, budget=32768), {"budget", "context", "gpus", "tiers", "gpu-memory"}),
        (request_of(THIRTEEN, 2, host=64.0), {"context", "gpus", "gpu-memory", "host-memory"}),
        (request_of(THIRTEEN, 2, context=200_000), {"context"}),
        (request_of(THIRTEEN, 2, resident=20.0), {"resident", "context", "gpus", "gpu-memory"}),
    ],
)
def test_every_remedy_is_enough_and_none_is_larger_than_needed(asked, options):
    assert shortfalls(asked)
    found = remedies(asked)
    assert {remedy.option for remedy in found} == options
    for remedy in found:
        assert not shortfalls(changed(asked, remedy.option, remedy.value)), remedy
        lesser = {"budget": 8, "context": 256, "gpus": -1, "gpu-memory": -1, "host-memory": -1, "tiers": 1}
        if remedy.option in lesser:
            assert isinstance(remedy.value, int)
            nearly = changed(asked, remedy.option, remedy.value + lesser[remedy.option])
            if remedy.option != "gpus" or nearly.gpus > asked.gpus:
                assert splits_unevenly(nearly) or shortfalls(nearly), f"{remedy} is more than is needed"


def splits_unevenly(request):
    return request.target.num_heads % request.gpus != 0


def changed(request, option, value):
    if option in ("budget", "tiers", "resident"):
        setting = None if value == "auto" else value
        return replace(request, settings=replace(request.settings, **{option: setting}))
    if option == "gpu-memory":
        return replace(request, gpu_bytes=int(value * GIB))
    if option == "host-memory":
        return replace(request, host_bytes=int(value * GIB))
    return replace(request, **{option: value})


def test_nothing_is_proposed_for_what_fits():
    assert remedies(request_of(THIRTEEN, 2)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_takes_what_was_planned(tmp_path, rank, dtype):
    """Blocks as the engine makes them for one rank's part; in bfloat16 they are packed."""
    save_llama(tmp_path, num_key_value_heads=2)
    target = ModelConfig.load(tmp_path)
    settings = Settings(tiers=2, resident=0.0002, budget=64)
    request = RunRequest(target, None, dtype, 1200, settings, 2, gpu_bytes=GIB)
    planned = make_plan(request)
    blocks = make_blocks(
        Split.of(target, Ranks(rank, 2)).config(target),
        planned.placement,
        ThreadLink(),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert isinstance(blocks, StreamedBlocks)
    assert held_bytes(blocks.held()) == planned.resident_kv + planned.ring + planned.open_stretches
    assert planned.placement.packed == (dtype == torch.bfloat16)
    on_host = sum(host.num_bytes for host in blocks._host) + planned.room_for_unpacked
    assert on_host == planned.streamed_kv + planned.spare > planned.spare > 0 < planned.resident_kv


def test_cards_are_plausible():
    """Ratios of units: a figure in the wrong one would be out by three decades or by eight."""
    for card in CARDS.values():
        assert 10 < card.memory_gib < 200 and 4 < card.memory_gb_per_s / card.link_gb_per_s < 200
        assert 20 < card.tflops * 1e3 / card.memory_gb_per_s < 500, "operations a byte"


def test_states_are_shown_and_counted(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    save_family(tmp_path, "qwen3.5")
    (tmp_path / "model.safetensors").unlink()
    asked = ("--model", tmp_path, "--draft", "none", "--tiers", 2, "--gpu", "rtx4090", "--host-memory", 16)
    outcome = run_here(capfd, "plan", *asked)
    assert outcome.code == 0 and all(len(line) <= 80 for line in outcome.out.splitlines())
    rows = {line[:45].strip(): line[45:].split() for line in outcome.out.splitlines()}
    assert rows["states of layers with linear attention"][-1] == rows["copies of earlier states"][0] == "-"
    document = json.loads(run_here(capfd, "plan", *asked, "--json", "-").out)
    assert not undocumented(document, "plan.md")
    linear = ModelConfig.load(tmp_path).linear
    assert linear and document["host_bytes"]["kept_states"] == KEPT * linear.state_bytes(torch.float32)
    assert document["per_gpu_bytes"]["states"] > 2 * linear.state_bytes(torch.float32)
