"""A batch over two ranks: the same tokens on both, those of transformers, and one broadcast a round for all."""

import json

import pytest
from spmd import run_forks
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Engine, Request, Sampling

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(TAIL_ROWS + 100, seed=3)

PROMPTS = [BOOK + random_tokens(n, seed=n) for n in (5, 30)] + [random_tokens(200, seed=9)]

NEW_TOKENS = 12


def run_batch(root, settings, in_slices):
    """A batch of two sequences and one that joins later; what each rank has of it, as JSON."""
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", gpus=2, budget=64, **settings)
    ranks = engine.target.ranks
    requests = [Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    batch = engine.batch(requests[:2], in_slices=in_slices)
    calls: list[int] = []
    for count, _ in enumerate(batch):
        if count == 3 and ranks.rank == 0:
            batch.add(requests[2])
        calls.append(ranks.collectives["broadcast"])
    texts = [sequence.statistics.token_ids for sequence in batch.sequences]
    rounds = [sequence.statistics.rounds for sequence in batch.sequences]
    engine.close()
    print(json.dumps({"rank": ranks.rank, "texts": texts, "rounds": rounds, "broadcasts": calls[-1]}), flush=True)


@pytest.fixture(scope="module")
def pair_of_models(tmp_path_factory):
    """Where target and draft are, and what transformers writes for each prompt."""
    root = tmp_path_factory.mktemp("pair")
    model = save_family(root / "target", "llama-tied", seed=1, head_dim=32)
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return root, [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("in_slices", [False, True], ids=["at once", "in slices"])
@pytest.mark.parametrize("settings", [{}, {"resident": 0.0}], ids=["resident", "streamed"])
@pytest.mark.slow
def test_two_ranks_write_what_transformers_writes_for_each_prompt(pair_of_models, settings, in_slices):
    root, want = pair_of_models
    printed = run_forks(lambda: run_batch(root, settings, in_slices), 2)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(reports) == 2
    for report in reports:
        assert report["texts"] == want
        # One for each sequence's first token, and one a round, in which several sequences take part; with slices also
        # one for how many come before the next round.
        least, most = len(PROMPTS) + max(report["rounds"]), len(PROMPTS) + sum(report["rounds"])
        assert least <= report["broadcasts"] <= most * (2 if in_slices else 1)


def run_late(root):
    """A batch whose waiting sequence is ended, and to which one is added when no other is left."""
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", gpus=2, budget=64)
    requests = [Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    batch = engine.batch(requests[:2], max_sequences=1)
    at_once = False
    for count, _ in enumerate(batch):
        if engine.target.ranks.rank == 0:
            if count == 0:
                batch.end(1)
            if len(batch.sequences) == 2 and not batch.sequences[0].is_unfinished:
                batch.add(requests[2])
        at_once |= batch.sequences[0].is_unfinished and batch.sequences[1].state == "ended"
    engine.close()
    texts, states = zip(*((one.statistics.token_ids, one.state) for one in batch.sequences), strict=True)
    print(json.dumps({"texts": texts, "states": states, "at once": at_once}), flush=True)


@pytest.mark.slow
def test_sequences_that_are_added_or_ended_late_are_so_on_all_ranks(pair_of_models):
    root, want = pair_of_models
    printed = run_forks(lambda: run_late(root), 2)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert reports == 2 * [{"texts": [want[0], [], want[2]], "states": ["ended"] * 3, "at once": True}]
