"""States of layers with linear attention: texts stay those of transformers, whatever is taken back or shared."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from joint_distribution import SHAPE, TWO_TOKENS, enumerate_joint, exact_probabilities
from spmd import run_jobs
from tiny import SMOOTH, greedy_oracle, random_tokens, save_family, save_llama
from triforce.kernels.delta_rule import DeltaWeights
from triforce.kernels.selection import padded_rows, use_kernels
from triforce.offload import Engine, Request, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.states import KEPT, States
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.tp.decoder import Decoder
from triforce.tp.errors import UsageError
from triforce.tp.model.config import ModelConfig
from triforce.tp.model.linear_attention import LinearAttention, LinearNames

CPU = torch.device("cpu")
BOOK = random_tokens(2600, seed=3)
GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
    save_llama(root / "draft", seed=4, num_hidden_layers=1)
    return root, save_family(root / "target", "qwen3.5", seed=1, max_position_embeddings=8192)


def engine(root, **settings):
    return Engine.load(
        root / "target", root / "draft", **({"device": "cpu", "dtype": "float32", "budget": 64} | settings)
    )


def cache_of(decoder, capacity=2600):
    return FullCache.on_device(decoder.part, decoder.rope, dtype=torch.float32, device=CPU, capacity=capacity)


@pytest.mark.parametrize("parts", [37, 288, 700, [2000, 1, 3, 280, 16, 300]], ids=str)
@torch.inference_mode()
def test_logits_are_those_of_transformers_however_tokens_come(tmp_path, parts):
    model = save_family(tmp_path, "qwen3.5", seed=1, **SMOOTH["qwen3.5"])
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    cache = cache_of(decoder)
    pieces = torch.tensor(BOOK).split(parts)
    got = torch.cat([decoder.forward(piece, cache, num_logits=len(piece)) for piece in pieces])
    assert (got - model(torch.tensor([BOOK])).logits[0]).abs().max() < 2e-4


@torch.inference_mode()
@padded_rows(True)
def test_tokens_of_a_pass_are_taken_back_one_by_one(hybrid):
    """However many, the state is that of those that stay, to the last bit where a row's bits are its own."""
    root, _ = hybrid
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=CPU)
    whole, cache = cache_of(decoder), cache_of(decoder)
    for one in (whole, cache):
        decoder.forward(torch.tensor(BOOK[:500]), one)
    for taken in (0, 1, 5, 12, 0, 11, 3):
        start, stays = cache.length, 12 - taken
        wrong = random_tokens(taken, seed=taken)
        decoder.forward(torch.tensor([*BOOK[start : start + stays], *wrong]), cache)
        cache.rollback(start + stays)
        assert cache.length == start + stays
    for position in range(500, cache.length):
        decoder.forward(torch.tensor(BOOK[position : position + 1]), whole)
    for one in (whole, cache):
        decoder.forward(torch.tensor(BOOK[1000:1003]), one)
    assert whole.states and cache.states
    for ours, theirs in zip(cache.states._working, whole.states._working, strict=True):
        assert torch.equal(ours.state, theirs.state) and torch.equal(ours.past, theirs.past)


@pytest.mark.parametrize("taken", [0, 1, 5, 12])
@torch.inference_mode()
def test_what_is_taken_back_costs_one_more_pass_of_the_others_over_the_states(hybrid, monkeypatch, taken):
    """In bytes: the state is read and written once more, and what was kept of the tokens that stay is read."""
    root, _ = hybrid
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=CPU)
    cache, moved = cache_of(decoder), 0
    states = cache.states
    assert states
    passes = states._pass_again

    def counted(origin, again, weights, state):
        nonlocal moved
        moved += origin.past.nbytes + sum(tensor.nbytes for tensor in again) + 2 * state.state.nbytes
        passes(origin, again, weights, state)

    decoder.forward(torch.tensor(BOOK[:500]), cache)
    decoder.forward(torch.tensor(BOOK[500:513]), cache)
    cache.rollback(513 - taken)
    monkeypatch.setattr(states, "_pass_again", counted)
    decoder.forward(torch.tensor(BOOK[513 - taken : 526 - taken]), cache)
    linear = decoder.config.linear
    assert linear
    of_layer = linear.state_bytes(torch.float32) // len(linear.layers)
    past = 4 * (linear.kernel - 1) * linear.channels
    again = (13 - taken) * linear.row_bytes(torch.float32) + len(linear.layers) * (2 * of_layer - past)
    assert moved == (again if taken else 0)


def test_a_state_that_is_gone_is_not_gone_on_from(hybrid):
    root, _ = hybrid
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=CPU)
    cache = cache_of(decoder)
    for part in (BOOK[:400], BOOK[400:420]):
        decoder.forward(torch.tensor(part), cache)
    assert [cache.reachable(length) for length in (420, 407, 400, 399)] == [420, 407, 400, 0]
    cache.rollback(399)
    assert cache.length == 0


class Failing(DeltaWeights):
    """Weights with which the computation ends in the middle."""

    left = 3

    @property
    def value_dim(self) -> int:
        self.__dict__["left"] = self.left - 1
        if self.left < 0:
            raise MemoryError
        return super().value_dim


@pytest.mark.parametrize("n", [9, 400], ids=["a step", "a prefill"])
@pytest.mark.parametrize("layers", [None, "plain"])
def test_what_is_broken_off_in_a_layer_leaves_the_state_before(n, layers):
    """Whatever of it was written."""
    torch.manual_seed(0)
    linear = LinearAttention((0,), 2, 4, 8, 16, 4, LinearNames.of("qkv", "z", "b", "a"))
    weights = torch.randn(4, linear.channels), -torch.rand(4), torch.randn(4), 2, 8
    given = {size: (torch.randn(size, linear.channels), torch.randn(size, 8)) for size in (700, 20, n)}
    with use_kernels(layers=layers):
        found = []
        for breaks in (False, True):
            states = States(linear, torch.float32, CPU)
            for start, size in ((0, 700), (700, 20)):
                states.begin(start, size)
                states.advance(0, *given[size], DeltaWeights(*weights))
            states.rollback(710)
            if breaks:
                failing = Failing(*weights)
                failing.__dict__["left"] = 2 if n > 288 else 0
                states.begin(710, n)
                with pytest.raises(MemoryError):
                    states.advance(0, *given[n], failing)
                assert states.reachable(710) == 710
                states.rollback(710)
            states.begin(710, n)
            found.append(states.advance(0, *given[n], DeltaWeights(*weights)))
    assert torch.equal(*found)


@torch.inference_mode()
def test_states_that_were_being_restored_are_as_if_they_had_never_been(hybrid):
    """Where that was broken off, after the last of them and before it was said that all are there."""
    root, _ = hybrid
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=CPU)
    saved, cache = cache_of(decoder), cache_of(decoder)
    assert decoder.config.linear and saved.states and cache.states
    want = decoder.forward(torch.tensor(BOOK[:100]), saved)
    cache.states.restart(0)
    for layer in range(len(decoder.config.linear.layers)):
        cache.states.restore(layer, 100, saved.states.export(layer, 100)())
    cache.break_off()
    assert cache.length == 0
    assert torch.equal(decoder.forward(torch.tensor(BOOK[:100]), cache), want)


@torch.inference_mode()
def test_a_copy_has_room_for_what_passes_again(hybrid):
    """Of a run with longer verifications than the one that goes on."""
    root, _ = hybrid
    decoder = Decoder.load(root / "target", dtype=torch.float32, device=CPU)
    cache, copy = cache_of(decoder), cache_of(decoder)
    assert cache.states and copy.states
    cache.states.keep_rows(140)
    decoder.forward(torch.tensor(BOOK[:700]), cache)
    decoder.forward(torch.tensor(BOOK[700:800]), cache)
    cache.rollback(780)
    copy.copy_from(cache, 780)
    assert copy.reachable(780) == 780
    both = [decoder.forward(torch.tensor(BOOK[780:790]), one) for one in (cache, copy)]
    assert torch.equal(*both)
    copy.states.keep_rows(40)
    assert len(copy.states._rows[0].inputs) == 40


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_a_next_turn_goes_on_from_the_last_token_or_from_a_kept_state(hybrid, resident):
    root, model = hybrid
    asked = engine(root, resident=resident)

    def answer(prompt):
        found = asked.generate(prompt, GREEDY, 12, ignore_eos=True).stats
        assert found["token_ids"] == greedy_oracle(model, prompt, 12, found["token_ids"]) and not found["warnings"]
        return found["token_ids"], found["reused_tokens"]

    answer(BOOK[:2200])
    prompt = [*BOOK[:2200], *BOOK[500:540]]
    text, reused = answer(prompt)
    assert reused == 2200, "the end of a prompt"
    assert answer([*prompt, *text, *BOOK[100:130]])[1] >= 2251, "all but the last token"
    assert answer([*BOOK[:2100], *BOOK[500:540]])[1] == 2048, "where prompts may part"
    assert answer([*BOOK[:1500], *BOOK[500:540]])[1] == 1024
    assert answer([*BOOK[:700], *BOOK[500:540]])[1] == 0


@pytest.mark.parametrize("tiers", [1, 3])
@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_texts_together_are_those_alone(hybrid, tiers, resident):
    """Of prompts that begin alike, and that do not."""
    root, model = hybrid
    asked = engine(root, resident=resident, tiers=tiers)
    prompts = [[*BOOK[:1100], *BOOK[i : i + 9 * i + 1]] for i in range(4)] + [BOOK[700:760]]
    batch = asked.batch([Request(prompt, GREEDY, 15, ignore_eos=True) for prompt in prompts])
    for _ in batch:
        pass
    for prompt, found in zip(prompts, batch.sequences, strict=True):
        assert found.statistics.token_ids == greedy_oracle(model, prompt, 15, found.statistics.token_ids)
    assert sum(found.statistics.reused_tokens == 1024 for found in batch.sequences) == 3


def test_states_are_planned_and_held(hybrid):
    root, _ = hybrid
    target, draft = (ModelConfig.load(root / name) for name in ("target", "draft"))
    request = RunRequest(target, draft, torch.float32, 6000, Settings(tiers=1))
    plan = make_plan(request)
    states = States.of(target, torch.float32, CPU, rows=plan.state_rows)
    linear = target.linear
    assert states and linear
    of_layer = 4 * (4 * linear.key_dim * linear.value_dim // 2 + 3 * linear.channels)
    assert linear.state_bytes(torch.float32) == 2 * of_layer
    assert plan.states == sum(tensor.nbytes for tensor in states.tensors())
    assert plan.kept_states == KEPT * linear.state_bytes(torch.float32)
    longer, several = make_plan(replace(request, context=12000)), make_plan(replace(request, sequences=3))
    assert longer.states == plan.states and several.states == 3 * plan.states
    assert plan.kv == plan.placement.capacity * 2 * 2 * 2 * 32 * 4, "of two layers alone"
    assert make_plan(replace(request, target=draft)).states == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "qwen3.5-moe"])
def test_text_on_two_ranks_is_that_of_transformers(tmp_path, family):
    model = save_family(tmp_path, family, seed=1)
    job = {"model": str(tmp_path), "draft": None, "device": "cpu", "dtype": "float32", "prompt": BOOK[:400]}
    job |= {"new_tokens": 20, "temperature": 0.0, "seed": 1}
    jobs = [job | {"settings": {"tiers": tiers, "budget": 64, "resident": 0.0}} for tiers in (1, 2)]
    want = greedy_oracle(model, BOOK[:400], 20)
    assert all(report["token_ids"] == want for reports in run_jobs(jobs, 2) for report in reports)


def test_ranks_that_cannot_share_key_heads_are_refused(tmp_path):
    save_family(tmp_path, "qwen3.5", linear_num_key_heads=1, linear_num_value_heads=2)
    with pytest.raises(UsageError, match="4 heads and 2 key/value heads, 1 of linear attention"):
        replace_ranks = RunRequest(ModelConfig.load(tmp_path), None, torch.float32, 100, Settings(tiers=1), gpus=2)
        make_plan(replace_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "draft"), [("qwen3.5", "qwen3.5"), ("qwen3.5", "llama"), ("qwen3-next", "llama")])
def test_every_outcome_adds_up_to_the_target_distribution(tmp_path, family, draft):
    """Three tiers, whose random choices have two outcomes each; the draft has states of its own, or none."""
    shape = SHAPE | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    shape |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    model = save_family(tmp_path / "target", family, seed=1, **(shape | {"linear_value_head_dim": 8}))
    of_draft = shape | {"linear_value_head_dim": 8} if draft == "qwen3.5" else SHAPE
    save_family(tmp_path / "draft", draft, seed=2, **of_draft)
    given: dict[str, Any] = {"draft_length": 1, "block_length": 2, "budget": 16, "chunk_size": 4, "dtype": "float32"}
    asked = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", **given)
    got, rejections, left_out = exact_probabilities(asked, TWO_TOKENS, 0.0)
    assert rejections["draft"] > 0.3 and left_out < 1e-5, rejections
    for tokens, probability in enumerate_joint(model, TWO_TOKENS).items():
        assert abs(got[tokens] - probability) < left_out + 1e-5, "sums of states are in another order than theirs"
