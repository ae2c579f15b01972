"""A batch over two ranks: the same tokens on both, those of transformers, and one broadcast a round for all."""

import json

import pytest
from spmd import run_forks
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.tp.model.decoder import TAIL_ROWS

GREEDY = Sampling(temperature=0.0)
BOOK = random_tokens(TAIL_ROWS + 100, seed=3)
PROMPTS = [BOOK + random_tokens(n, seed=n) for n in (5, 30)] + [random_tokens(200, seed=9)]
NEW_TOKENS = 12


def run_batch(root, settings):
    """A batch of two sequences and one that joins later; what each rank has of it, as JSON."""
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", gpus=2, budget=64, **settings)
    ranks = engine.target.ranks
    requests = [Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    batch = engine.batch(requests[:2])
    calls: list[int] = []
    for count, _ in enumerate(batch):
        if count == 3 and ranks.rank == 0:
            batch.add(requests[2])
        calls.append(ranks.collectives["broadcast"])
    texts = [sequence.statistics.token_ids for sequence in batch.sequences]
    rounds = [sequence.statistics.rounds for sequence in batch.sequences]
    engine.close()
    print(json.dumps({"rank": ranks.rank, "texts": texts, "rounds": rounds, "broadcasts": calls[-1]}), flush=True)


@pytest.mark.parametrize("settings", [{}, {"resident": 0.0}], ids=["resident", "streamed"])
@pytest.mark.slow
def test_two_ranks_write_what_transformers_writes_for_each_prompt(tmp_path, settings):
    model = save_family(tmp_path / "target", "llama-tied", seed=1, head_dim=32)
    save_llama(tmp_path / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    printed = run_forks(lambda: run_batch(tmp_path, settings), 2)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(reports) == 2
    want = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for report in reports:
        assert report["texts"] == want
        # One for each sequence's first token, and one a round, in which several sequences take part.
        assert len(PROMPTS) + max(report["rounds"]) <= report["broadcasts"] <= len(PROMPTS) + sum(report["rounds"])
