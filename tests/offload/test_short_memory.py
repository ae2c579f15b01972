"""A GPU that another process takes memory from: keys and values leave it between rounds if host memory has room for
them; a run that finds no memory in mid-pass ends with its text so far."""

import json
import os
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ledger
import pytest
import torch
from cuda_simulator import Simulator
from profiles import profile_name
from simulated_gpu import as_on_a_gpu, simulated_system
from spmd import run_forks
from tiny import random_tokens, save_llama
from triforce.kernels.cpu.library import loaded
from triforce.offload import Ended, Engine, Request, Sampling
from triforce.offload.batch.reading import Reading
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.tp import CapacityError, TriforceError
from triforce.tp.model.config import ModelConfig

GPU_BYTES = 200 * 2**20
"""Most of which is left free for cuBLAS and others."""

MEMORY_RAN_OUT = r"GPU memory ran out: .* of 200\.0 MiB are taken; .*--resident"
"""What is said then: the numbers, and what helps."""

NEW_TOKENS = 12
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """With heads that the compiled kernels take."""
    return ledger.save_models(tmp_path_factory.mktemp("models"), head_dim=32)


def histories(first, count, most=500 // 2):
    return range(first, first + (most if profile_name() == "campaign" else count))


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.slow(keep=("0",))
def test_memory_that_runs_out_in_a_pass_leaves_the_text_so_far(models, first):
    seeds, ran_out = histories(first, 3), []
    for seed in seeds:
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
            try:
                for event in run:
                    if event.index == rounds:
                        simulator.limit, simulator.others = (
                            GPU_BYTES,
                            GPU_BYTES - simulator.live - chance.randint(0, 500),
                        )
            except CapacityError as error:
                ran_out.append(seed)
                assert re.search(MEMORY_RAN_OUT, str(error)), seed
            else:  # the limit came behind the last pass
                assert run.statistics.rounds <= rounds and run.statistics.token_ids == want, seed
            found = run.statistics.token_ids
            assert found == want[: len(found)] and len(found) > rounds, seed
            simulator.others, simulator.refused = 0, []
            assert engine.generate(prompt, Sampling(0.0), NEW_TOKENS, ignore_eos=True).token_ids == want, seed
            assert not simulator.refused
            engine.close()
    assert len(ran_out) > 0.9 * len(seeds), "nearly all have a pass behind the limit"


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.slow(keep=("0",))
def test_memory_that_becomes_short_between_rounds_changes_no_token(models, first):
    """Blocks leave the GPU as others take its memory, time and again, in runs alone and in batches that are read in
    slices or at once."""
    assert sum(fall_short(models, seed) for seed in histories(first, 4))


@pytest.mark.slow
def test_memory_that_becomes_short_on_some_of_two_ranks_changes_no_token(models):
    moved = []
    for seed in histories(0, 2, 10):
        said = run_forks(lambda seed=seed: print(int(fall_short(models, seed, 2)), flush=True), 2).split()
        assert said[0] == said[1], seed
        moved.append(int(said[0]))
    assert sum(moved)


def fall_short(models, seed, ranks=1):
    """A history on this rank; whether blocks left the GPU."""
    chance, simulator = random.Random(seed), Simulator()
    limits = replace(ledger.LIMITS, largest_block=512, spare_share=chance.choice([0.01, 1.0]))
    settings = {"tiers": chance.choice([1, 2, 3]), "budget": 64, "block_length": chance.choice([None, 6, 24])}
    settings |= {"dtype": "float32", "draft": models / "draft", "resident": None}
    length = chance.randint(1600, 2600)
    prompt, sampling = random_tokens(length, seed=seed), chance.choice([GREEDY, Sampling(0.8, seed=4)])
    requests = [
        Request(prompt + random_tokens(chance.randint(1, 200), seed=9 + i), sampling, NEW_TOKENS, ignore_eos=True)
        for i in range(chance.randint(1, 3))
    ]
    in_slices, by_hand, gpu_bytes = chance.random() < 0.5, chance.random() < 0.5, GPU_BYTES
    compiled = chance.random() < 0.5 and loaded() is not None
    asked = ledger.request_of(models / "target", settings | {"resident": 0}, length + 300, ranks)
    asked = replace(asked, limits=limits, gpu_bytes=gpu_bytes, kernels=compiled, sequences=len(requests))
    streamed = make_plan(asked)
    resident = int(chance.uniform(0.3, 0.8) * streamed.kv)
    if by_hand:
        settings["resident"] = resident / 2**30
    else:
        gpu_bytes = ledger.with_reserve(streamed, streamed.weights + streamed.working + resident)
    simulator.limit = gpu_bytes
    system = simulated_system(simulator, limits, device_bytes=gpu_bytes)
    when = random.Random(f"{seed} on {os.environ.get('RANK')}")
    with nullcontext() if compiled else as_on_a_gpu(), simulator:
        want, moved = None, False
        for falls in (False, True):
            engine = Engine.load(models / "target", device="cpu", system=system, gpus=ranks, **settings)
            batch = engine.batch(requests, in_slices=in_slices, expected=len(requests))
            for _ in batch:
                free = gpu_bytes - simulator.live - simulator.others
                spare = spare_bytes(engine)
                begun = all(one.state != "waiting" for one in batch.sequences)
                if falls and begun and spare and when.random() < 0.3:
                    simulator.others += max(0, free + when.randint(1, spare) - next_bytes(batch))
            found = [one.statistics.token_ids for one in batch.sequences]
            errors = [one.error for one in batch.sequences]
            assert all(len(tokens) == NEW_TOKENS for tokens in found), (seed, errors)
            want = want or found
            assert found == want and not simulator.refused, seed
            moved = any("GPU memory ran low" in line for line in batch.warnings)
            assert falls or not moved, seed
            engine.close()
            del engine, batch
            simulator.others = 0
    return moved


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.slow(keep=("0",))
def test_memory_that_runs_out_beside_others_leaves_all_texts_so_far(models, first):
    """In a round, which ends the run, or in a prompt that is read, which ends that sequence alone."""
    ended = 0
    for seed in histories(first, 3):
        chance, simulator = random.Random(seed), Simulator()
        system = simulated_system(simulator, ledger.LIMITS, device_bytes=GPU_BYTES)
        settings = {"tiers": chance.choice([1, 2, 3]), "budget": 64, "block_length": chance.choice([None, 6, 24])}
        settings |= {"resident": chance.choice([None, 0]), "dtype": "float32", "system": system}
        text, in_slices = random_tokens(chance.randint(40, 200), seed=seed), chance.random() < 0.5
        prompts = [
            chance.choice([text, []]) + random_tokens(chance.randint(20, 150), seed=9 + i)
            for i in range(chance.randint(2, 4))
        ]
        requests = [Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
        with as_on_a_gpu(), simulator:
            engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
            want = [engine.generate(prompt, GREEDY, NEW_TOKENS, ignore_eos=True).token_ids for prompt in prompts]
            batch, at, error = engine.batch(requests, in_slices=in_slices), chance.randint(0, 8), ""
            came = [0] * len(prompts)
            try:
                for count, (index, event) in enumerate(batch):
                    came[index] += len(event.tokens)
                    if count == at:
                        simulator.limit = GPU_BYTES
                        simulator.others = GPU_BYTES - simulator.live - chance.randint(0, 2000)
            except CapacityError as refusal:
                error = str(refusal)
                assert re.search(MEMORY_RAN_OUT, error), seed
            for one, tokens, right in zip(batch.sequences, came, want, strict=True):
                found = one.statistics.token_ids
                assert len(found) == tokens and found == right[:tokens], seed
                assert error or tokens == NEW_TOKENS or re.search(f"{MEMORY_RAN_OUT}|available", one.error or ""), seed
            ended += bool(error)
            simulator.others, simulator.refused = 0, []
            assert engine.generate(prompts[0], GREEDY, NEW_TOKENS, ignore_eos=True).token_ids == want[0], seed
            assert not simulator.refused
            engine.close()
    assert ended


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.slow(keep=())
def test_memory_that_runs_out_on_one_of_two_ranks_ends_both_with_the_text_so_far(models, first):
    for seed in histories(first, 1, 8):
        said = run_forks(lambda seed=seed: run_out_on_a_rank(models, random.Random(seed)), 2)
        short, other = sorted((json.loads(line) for line in said.splitlines() if line.startswith("{")), key=order_of)
        for one in (short, other):
            assert one["found"] == one["want"][: len(one["found"])] and len(one["found"]) > one["rounds"], seed
        assert short["kind"] == "CapacityError" and re.search(MEMORY_RAN_OUT, short["error"]), seed
        # If it runs out while caches are filled, the ranks tell each other, unless there is no memory for that either:
        # the simulator counts all tensors on the CPU.
        told = ("CapacityError", f"rank {short['rank']}: {short['error']}")
        lost = other["kind"] == "PeerError" and "one of them has ended" in other["error"]
        assert lost or (other["kind"], other["error"]) == told, seed


def order_of(report):
    return not report["short"]


def run_out_on_a_rank(models, chance):
    """A run whose memory runs out in a pass, on one rank alone; prints what it ended with."""
    simulator, place = Simulator(), int(os.environ["RANK"])
    system = simulated_system(simulator, ledger.LIMITS, device_bytes=GPU_BYTES)
    settings = {"tiers": chance.choice([1, 2, 3]), "budget": 64, "block_length": chance.choice([None, 6, 24])}
    settings |= {"resident": chance.choice([1e-3, 0]), "dtype": "float32", "system": system, "gpus": 2}
    prompt, short = random_tokens(chance.randint(60, 300), seed=1), chance.randint(0, 1) == place
    rounds, left, kind, error = chance.randint(0, 3), chance.randint(0, 500), "", ""
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        want = engine.generate(prompt, GREEDY, NEW_TOKENS, ignore_eos=True).token_ids
        run = engine.stream(prompt, GREEDY, NEW_TOKENS, ignore_eos=True)
        try:
            for event in run:
                if event.index == rounds and short:
                    simulator.limit, simulator.others = GPU_BYTES, GPU_BYTES - simulator.live - left
        except TriforceError as failure:
            kind, error = type(failure).__name__, str(failure)
    found = {"rank": place, "short": short, "rounds": rounds, "want": want, "found": run.statistics.token_ids}
    print(json.dumps(found | {"kind": kind, "error": error}), flush=True)
    os._exit(0)  # as a rank ends whose group has lost one


def test_ranks_move_the_same_blocks_when_one_of_them_is_short_of_memory(models):
    def call():
        simulator = Simulator()
        limits = replace(ledger.LIMITS, largest_block=512, spare_share=1.0)
        system = simulated_system(simulator, limits, device_bytes=GPU_BYTES)
        settings = {"dtype": "float32", "budget": 64, "resident": 5e-4, "gpus": 2, "system": system}
        prompt = random_tokens(2000, seed=1)
        with as_on_a_gpu(), simulator:
            want, _ = answer(prompt, settings, lambda batch: None)

            def fall(batch):
                if batch.sequences[0].statistics.rounds == 2 and int(os.environ["RANK"]) == 1:
                    spare = blocks_of(batch).footprint.spare
                    assert spare
                    simulator.others = GPU_BYTES - simulator.live - next_bytes(batch) + spare // 2

            simulator.limit = GPU_BYTES
            found, left = answer(prompt, settings, fall)
        print(json.dumps({"same": found == want, "left": left, "refused": len(simulator.refused)}), flush=True)

    def answer(prompt, settings, each):
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        batch = engine.batch([Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True)])
        for _ in batch:
            each(batch)
        left = blocks_of(batch).footprint.spare, [line for line in batch.warnings if "GPU memory ran low" in line]
        engine.close()
        return batch.sequences[0].statistics.token_ids, left

    def blocks_of(batch):
        return batch.run._setup._models.kept.caches[-1].blocks

    first, second = (json.loads(line) for line in run_forks(call, 2).splitlines() if line.startswith("{"))
    assert first == second
    assert first["same"] and not first["refused"] and first["left"][1]


def spare_bytes(engine):
    """Of the caches that the engine keeps, what can leave the GPU."""
    return sum(cache.blocks.footprint.spare for cache in engine._kept.caches)


def next_bytes(batch):
    """What is to be free before the next round."""
    running, reading = ([one for one in batch.sequences if one.state == state] for state in ("running", "reading"))
    return batch.run._setup.next_bytes(running, reading)


@pytest.mark.parametrize("first", [0, 1000])
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


def test_who_joins_waits_until_rounds_of_all_fit(tmp_path):
    """Of a vocabulary whose distributions are most of what a round takes."""
    sizes = {"vocab_size": 20000, "num_hidden_layers": 1}
    save_llama(tmp_path, seed=1, max_position_embeddings=4096, **sizes)
    settings: Any = {"tiers": 2, "budget": 64, "block_length": 24}
    asked = RunRequest(ModelConfig.load(tmp_path), None, torch.float32, 100 + NEW_TOKENS, Settings(**settings))
    alone = make_plan(replace(asked, gpu_bytes=2**40, kernels=False, limits=ledger.LIMITS))
    sampled = Sampling(0.8, top_p=0.9)
    requests = [Request(random_tokens(100, seed=i), sampled, NEW_TOKENS, ignore_eos=True) for i in range(2)]
    waited = []
    for more in (4, 64):  # MiB
        simulator = Simulator()
        needed = alone.weights + alone.working + alone.kv + more * 2**20
        gpu_bytes = ledger.with_reserve(alone, needed)
        system = simulated_system(simulator, ledger.LIMITS, device_bytes=gpu_bytes)
        with as_on_a_gpu(), simulator:
            engine = Engine.load(tmp_path, device="cpu", dtype="float32", system=system, **settings)
            simulator.limit = needed
            batch, joined = engine.batch(requests[:1]), []
            for _ in batch:
                if not joined:
                    joined.append(batch.add(requests[1]))
                elif batch.sequences[0].state == "running" and batch.sequences[1].waits_for:
                    joined.append(batch.sequences[1].waits_for)
            errors, tokens = [one.error for one in batch.sequences], [one.statistics for one in batch.sequences]
            assert errors == [None, None] and all(len(one.token_ids) == NEW_TOKENS for one in tokens), more
            assert not simulator.refused, more
            waited.append(len(joined) > 1)
            engine.close()
    assert waited[0] and not waited[-1]


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_a_prompt_that_goes_before_the_rest_of_another_takes_nothing_that_this_needs(tmp_path, monkeypatch, resident):
    monkeypatch.setattr(Reading, "due_alone", 1)
    save_llama(tmp_path, seed=1, max_position_embeddings=4096, num_hidden_layers=2)
    settings: Any = {"tiers": 2, "budget": 64, "block_length": 4, "resident": resident}
    config = ModelConfig.load(tmp_path)
    asked = RunRequest(config, None, torch.float32, 1500 + NEW_TOKENS, Settings(**settings))
    limits = replace(ledger.LIMITS, step_rows=32)  # so that its passes can be paused
    alone = make_plan(replace(asked, gpu_bytes=2**40, kernels=False, limits=limits))

    def ends(more: float) -> list[int]:
        """The lengths of the prompts, in the order in which their answers end, with so many MiB more than the longer
        one needs."""
        simulator, found, read = Simulator(), dict[Any, Any](), list[Any]()
        needed = alone.weights + alone.working + alone.kv + int(more * 2**20)
        system = simulated_system(simulator, limits, device_bytes=ledger.with_reserve(alone, needed))
        left = [Request(random_tokens(n, seed=n), GREEDY, NEW_TOKENS, ignore_eos=True, tag=n) for n in (1500, 300)]
        with as_on_a_gpu(), simulator:
            engine = Engine.load(tmp_path, device="cpu", dtype="float32", system=system, **settings)
            simulator.limit = needed
            for event in engine.run(lambda waits: left.pop(0) if left and (waits or read) else None):
                read.append(event)
                if isinstance(event, Ended):
                    found[event.sequence.tag] = event.sequence.error, len(event.sequence.statistics.token_ids)
            engine.close()
        assert set(found.values()) == {(None, NEW_TOKENS)}, more
        assert not simulator.refused, more
        return list(found)

    orders = [ends(more) for more in (0, 0.1, 0.5, 2)]
    assert orders[-1] == [300, 1500]
    assert resident == 0 or orders[0] == [1500, 300], "without memory for both it waits"
