"""The multi-token-prediction head as a draft: its logits are those of a plain reference, what it reads is what the
target has of the tokens before, and texts stay the target's."""

import json
from typing import Any

import pytest
import torch
from checkpoints import change_config
from joint_distribution import SHAPE, TWO_TOKENS, enumerate_joint, exact_probabilities
from mtp import Head, hidden_states
from quantised import FORMATS, save_quantised, save_quantised_head
from safetensors.torch import load_file, save_file
from spmd import run_jobs
from tiny import SMOOTH, greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.offload.caches.hidden_states import KEPT_TOKENS, HiddenStates
from triforce.offload.caches.streaming import WINDOW, StreamingCache
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
TEXT = random_tokens(900, seed=3)
GREEDY = Sampling(0.0)
FAMILIES = ("qwen3.5", "qwen3-next", "qwen3.5-moe")


def smooth(directory, family="qwen3.5"):
    """A model, its head and both decoders."""
    model = save_family(directory, family, seed=1, **SMOOTH[family])
    head = Head(model, seed=2)
    head.save(directory)
    target = Decoder.load(directory, dtype=torch.float32, device=CPU)
    return model, head, target, head_of(directory, target)


def head_of(directory, target):
    return Decoder.mtp_head(Checkpoint(directory, torch.float32, CPU, further_tokens=True), target)


def knowing(target, states):
    """What the head reads, of a text whose hidden states are those."""
    found = HiddenStates(target)
    found._rows[: len(states)] = states
    found.known = range(len(states))
    return found


def forward(decoder, cache, tokens, parts):
    given = torch.tensor(tokens).split(parts)
    with torch.inference_mode():
        return torch.cat([decoder.forward(part, cache, num_logits=len(part)) for part in given])


@pytest.mark.parametrize("parts", [400, 37, [1] * 400], ids=["at once", "37", "1"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("qwen3.5-37", "qwen3-next-at once", "qwen3.5-moe-at once"))
def test_logits_are_those_of_the_reference(tmp_path, family, parts):
    """Also of tokens behind the window, of which none is a sink."""
    model, head, target, ours = smooth(tmp_path, family)
    tokens = TEXT[:401]
    states = hidden_states(model, tokens)
    cache = StreamingCache(ours, hidden_states=knowing(target, states))
    cache.skip(1)
    if isinstance(parts, list):  # a token's own result takes the place of no hidden state that is known
        got = torch.cat([forward(ours, cache, [token], 1) for token in tokens[1:]])
    else:
        got = forward(ours, cache, tokens[1:], parts)
    want = head(tokens[1:], states[:-1], WINDOW)[1]
    assert len(got) == 400 > WINDOW and (got - want).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "form"), [("qwen3.5", "gptq"), ("qwen3-next", "fp8"), ("qwen3.5-moe", "packed")])
@pytest.mark.slow(keep=1)
def test_a_head_in_few_bits_computes_with_the_numbers_that_these_stand_for(tmp_path, family, form):
    model = save_quantised(tmp_path, FORMATS[form], family, seed=1)
    head = Head(model, seed=2)
    save_quantised_head(tmp_path, FORMATS[form], head)
    target = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    ours, states = head_of(tmp_path, target), hidden_states(model, TEXT[:100])
    cache = StreamingCache(ours, hidden_states=knowing(target, states))
    cache.skip(1)
    got, want = forward(ours, cache, TEXT[1:100], 99), head(TEXT[1:100], states[:-1])[1]
    assert (got - want).abs().max() < 1e-4 * want.std()
    engine = Engine.load(tmp_path, "mtp", device="cpu", dtype="float32", budget=64)
    assert engine.generate(TEXT[:300], GREEDY, 20, ignore_eos=True).token_ids == greedy_oracle(model, TEXT[:300], 20)
    engine.close()


def test_drafts_go_on_from_the_heads_own_results(tmp_path):
    model, head, target, ours = smooth(tmp_path)
    tokens = TEXT[:60]
    states = hidden_states(model, tokens)
    cache = StreamingCache(ours, hidden_states=knowing(target, states[:-1]))
    cache.skip(1)
    before, drafted = [*states[:-1]], list(tokens)
    got = forward(ours, cache, tokens[1:], 60)[-1:]
    for _ in range(5):
        results, logits = head(drafted[1:], torch.stack(before))
        assert (got - logits[-1:]).abs().max() < 1e-4
        before.append(results[-1])
        drafted.append(int(logits[-1].argmax()))
        got = forward(ours, cache, drafted[-1:], 1)


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("qwen3.5-resident", "qwen3-next-streamed"))
def test_hidden_states_of_a_run_are_those_of_its_text(tmp_path, family, resident):
    """After any rounds those of accepted tokens alone: of the full cache where it has seen them."""
    model, *_ = smooth(tmp_path, family)
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 4096, "resident": resident}
    engine = Engine.load(tmp_path, "mtp,lookup", **given, draft_length=3, block_length=7, refresh="round")
    prompt = [*TEXT[:500], *TEXT[300:350]]
    run = engine.stream(prompt, GREEDY, 60, ignore_eos=True)
    drafted = checked = 0
    for _ in run:
        known = run.sequence.active_or_none
        if known is None:
            break
        context, states = known.context, known.full.hidden_states
        assert states is not None and known.full.length <= states.known.stop < len(context)
        positions = [at for at in states.known if at < known.full.length]
        got = states._rows[torch.tensor(positions) % KEPT_TOKENS]
        assert (got - hidden_states(model, context)[positions]).abs().max() < 1e-4
        drafted, checked = run.statistics.draft_proposed, checked + 1
    assert checked > 5 and drafted > 10 and run.statistics.token_ids == greedy_oracle(model, prompt, 60)
    engine.close()


def follower(directory, seed=1):
    """A model whose next token follows from the last one alone, and a head that knows that."""
    model = save_family(directory, "qwen3.5", seed=seed, tie_word_embeddings=False)
    Head(model, seed=2).save(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    width = tensors["mtp.fc.weight"].shape[0]
    tensors["mtp.fc.weight"].copy_(torch.eye(width, 2 * width))
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def accepted_of(directory, **settings):
    engine = Engine.load(directory, "mtp", device="cpu", dtype="float32", draft_length=4, block_length=8, **settings)
    stats = engine.generate(TEXT, GREEDY, 60, ignore_eos=True).stats
    engine.close()
    return stats["acceptance"]


def test_a_head_that_is_right_has_all_its_tokens_accepted(tmp_path):
    """So it reads the tokens that it should; one with embedding and hidden state exchanged has not."""
    path = follower(tmp_path)
    accepted = accepted_of(tmp_path)
    assert accepted["draft_per_token"] == accepted["retrieval_per_token"] == 1.0 and accepted["tokens_per_round"] > 6
    tensors = load_file(path)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(len(tensors["mtp.fc.weight"]), dims=1)
    save_file(tensors, path, metadata={"format": "pt"})
    assert accepted_of(tmp_path)["draft_per_token"] < 0.3


def test_a_turn_of_few_tokens_goes_on_with_what_is_known_of_them(tmp_path):
    """No token before them passes the head again; nor do those that came while it did not draft."""
    follower(tmp_path)
    engine = Engine.load(tmp_path, "mtp", device="cpu", dtype="float32", draft_length=4, block_length=8)
    text = [*TEXT, *engine.generate(TEXT, GREEDY, 20, ignore_eos=True).token_ids]
    for more in (3, 40, 300):
        text += random_tokens(more, seed=more)
        run = engine.stream(text, GREEDY, 40, ignore_eos=True)
        for _ in run:
            active = run.sequence.active_or_none
            if active and active.drafting_filled and active.streaming:
                assert active.streaming._origins[0] > 600
        stats = run.stats()
        assert stats["reused_tokens"] >= len(TEXT) - 1 and stats["acceptance"]["draft_per_token"] == 1.0
        text += run.statistics.token_ids
    engine.close()


def test_a_long_lag_is_not_computed(tmp_path):
    model, _, target, ours = smooth(tmp_path)
    states = hidden_states(model, TEXT)
    cache = StreamingCache(ours, hidden_states=knowing(target, states[:512]))
    cache.skip(1)
    forward(ours, cache, TEXT[1:100], 99)
    cache.skip_unseen(300)
    assert cache.length == 100, "all of it is seen"
    cache.skip_unseen(600)
    assert cache.length == 600 - WINDOW
    cache.rollback(350)
    assert cache.length == 350, "what is before is not to be had"
    forward(ours, cache, TEXT[350:360], 10)
    cache.rollback(355)
    assert cache.length == 355


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    model = save_family(root, "qwen3.5", seed=1)
    Head(model, seed=2).save(root)
    return root, model


@pytest.mark.parametrize("draft", ["mtp", "mtp,lookup"])
def test_texts_together_and_in_turns_are_those_alone(checkpoint, draft):
    root, model = checkpoint
    engine = Engine.load(root, draft, device="cpu", dtype="float32", budget=64)
    prompts = [[*TEXT[:500], *TEXT[i : i + 9 * i + 1]] for i in range(4)] + [TEXT[700:760], TEXT[:1]]
    batch = engine.batch([Request(prompt, GREEDY, 15, ignore_eos=True) for prompt in prompts])
    for _ in batch:
        pass
    for prompt, found in zip(prompts, batch.sequences, strict=True):
        assert found.statistics.token_ids == greedy_oracle(model, prompt, 15)
    turn = [*prompts[0], *batch.sequences[0].statistics.token_ids, *TEXT[40:70]]
    assert engine.generate(turn, GREEDY, 15, ignore_eos=True).token_ids == greedy_oracle(model, turn, 15)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_text_on_two_ranks_is_that_of_transformers(tmp_path, family):
    model = save_family(tmp_path, family, seed=1)
    Head(model, seed=2).save(tmp_path)
    job = {"model": str(tmp_path), "draft": "mtp", "device": "cpu", "dtype": "float32", "prompt": TEXT[:400]}
    job |= {"new_tokens": 20, "temperature": 0.0, "seed": 1}
    jobs = [job | {"settings": {"budget": 64, "resident": resident}} for resident in (None, 0.0)]
    want = greedy_oracle(model, TEXT[:400], 20)
    assert all(report["token_ids"] == want for reports in run_jobs(jobs, 2) for report in reports)


@pytest.mark.slow
def test_every_outcome_adds_up_to_the_target_distribution(tmp_path):
    shape = SHAPE | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    shape |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    model = save_family(tmp_path, "qwen3.5", seed=1, **(shape | {"linear_value_head_dim": 8}))
    Head(model, seed=2).save(tmp_path)
    given: dict[str, Any] = {"draft_length": 1, "block_length": 2, "budget": 16, "chunk_size": 4, "dtype": "float32"}
    engine = Engine.load(tmp_path, "mtp", device="cpu", **given)
    got, rejections, left_out = exact_probabilities(engine, TWO_TOKENS, 0.0)
    assert rejections["draft"] > 0.3 and left_out < 1e-5, rejections
    for tokens, probability in enumerate_joint(model, TWO_TOKENS).items():
        assert abs(got[tokens] - probability) < left_out + 1e-5


@pytest.mark.parametrize("gpus", [1, 2])
def test_its_memory_is_planned(checkpoint, gpus):
    """Its layer and what it begins with; the embedding and the output head are the target's."""
    config = ModelConfig.load(checkpoint[0])
    request = RunRequest(config, config.mtp_head, torch.float32, 2000, Settings(), gpus)
    alone = make_plan(RunRequest(config, None, torch.float32, 2000, Settings(tiers=2), gpus))
    own = [(name, one) for name, one in load_file(checkpoint[0] / "model.safetensors").items() if "mtp" in name]
    split = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    want = sum(one.nbytes // (gpus if any(part in name for part in split) else 1) for name, one in own)
    assert make_plan(request).weights - alone.weights == want


def test_what_has_no_head_is_refused(tmp_path):
    save_llama(tmp_path / "llama")
    with pytest.raises(
        ModelError, match="the multi-token-prediction head of llama is not there, or not of this kind; --draft mtp"
    ):
        Engine.load(tmp_path / "llama", "mtp", device="cpu")
    save_family(tmp_path / "without", "qwen3.5")
    with pytest.raises(ModelError, match="have no multi-token-prediction head"):
        Engine.load(tmp_path / "without", "mtp", device="cpu")
    change_config(tmp_path / "without", mtp_num_hidden_layers=3)
    with pytest.raises(ModelError, match="has 3 layers"):
        Engine.load(tmp_path / "without", "mtp", device="cpu")
    change_config(tmp_path / "without", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ModelError, match="is not there, or not"):
        Engine.load(tmp_path / "without", "mtp", device="cpu")
    assert json.loads((tmp_path / "without" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
