"""A sequence that one rank has no memory for fails on all, and others go on."""

import json
from collections import deque
from typing import Any
from unittest.mock import patch

import pytest
from spmd import run_forks
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Ended, Engine, Request, Sampling, Tokens
from triforce.offload.batch.kept import KeptCache
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError, matrices

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(TAIL_ROWS + 100, seed=3)

PROMPTS = [BOOK + random_tokens(n, seed=n) for n in (5, 30)] + [random_tokens(200, seed=9)]

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def pair_of_models(tmp_path_factory):
    """Where target and draft are, and what transformers writes for each prompt."""
    root = tmp_path_factory.mktemp("pair")
    model = save_family(root / "target", "llama-tied", seed=1, head_dim=32)
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return root, [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def run_short(root):
    """Two batches, the first of which finds no memory on one rank for its first sequence."""
    refused = []

    def make_once_refused(*given, **named):
        if refused and refused.pop():
            raise CapacityError("none is left")
        return make_blocks(*given, **named)

    settings: Any = {"dtype": "float32", "gpus": 2, "budget": 64, "room": 100}
    system = System(make_blocks=make_once_refused)
    engine = Engine.load(root / "target", root / "draft", device="cpu", **settings, system=system)
    refused.append(engine.target.ranks.rank == 1)
    requests = [Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    batch = engine.batch(requests[:2])
    for _ in batch:
        pass
    later = engine.batch(requests[2:])
    for _ in later:
        pass
    sequences = [*batch.sequences, *later.sequences]
    engine.close()
    texts = [sequence.statistics.token_ids for sequence in sequences]
    print(json.dumps({"texts": texts, "errors": [sequence.error for sequence in sequences]}), flush=True)


def run_unlike(root):
    """A run in which the second sequence finds no memory on one rank once its cache was prepared."""
    prepare, calls = KeptCache.prepare, []

    def refused(kept, *given, **named):
        found = prepare(kept, *given, **named)
        calls.append(found)
        if len(calls) == 2 and engine.target.ranks.rank:
            raise CapacityError("none is left")
        return found

    patch.object(KeptCache, "prepare", refused).start()  # of this process, which ends
    engine = Engine.load(root / "target", root / "draft", device="cpu", dtype="float32", gpus=2, budget=64)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    requests = deque(Request(prompt, GREEDY, NEW_TOKENS, ignore_eos=True, tag=i) for i, prompt in enumerate(prompts))
    texts, errors = [list[int]() for _ in prompts], []
    for event in engine.run(lambda waits: requests.popleft() if requests else None, max_sequences=1):
        if isinstance(event, Tokens) and event.sequence.tag is not None:
            texts[event.sequence.tag] += event.round.tokens
        elif isinstance(event, Ended):
            errors.append(event.sequence.error)
    engine.close()
    print(json.dumps({"texts": texts, "errors": errors}), flush=True)


def test_what_one_rank_alone_has_prepared_is_nothing_to_go_on_from(pair_of_models):
    root, want = pair_of_models
    printed = run_forks(lambda: run_unlike(root), 2, 60)
    first, second = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert [want[0], [], want[0]] in (first["texts"], second["texts"])
    for report in (first, second):
        assert [bool(error) for error in report["errors"]] == [False, True, False]


PLACES = {
    301: "where memory for the prompt is taken",
    302: "in attention",
    303: "in an MLP",
    304: "behind the first token, where chunks are chosen",
}
"""Where memory runs out on rank 1 while a prompt of so many tokens is read, or once it was."""


def refuse(owner, name, at):
    """Has calls of a function fail for which `at` says so."""
    real = getattr(owner, name)

    def refused(*given, **named):
        if at(*given):
            raise CapacityError("none is left")
        return real(*given, **named)

    patch.object(owner, name, refused).start()  # of this process, which ends


def run_short_in_reading(root, settings):
    """A run in which memory runs out in prompts that are read beside others, each time in another place. Something is
    always drafted."""
    settings = {"dtype": "float32", "gpus": 2, "budget": 64, "block_length": 4, **settings}
    engine = Engine.load(root / "target", root / "draft", device="cpu", **settings)
    if engine.target.ranks.rank:
        refuse(FullCache, "prepare", lambda cache, n: n == 301)
        refuse(FullCache, "attend", lambda cache, layer, q, *_: layer == 1 and q.shape[1] == 302)
        refuse(matrices, "gated_mlp", lambda rows, *_: rows.shape[0] == 303)
        refuse(RetrievalCache, "refresh", lambda cache: cache.source.length == 304)
    prompts = [PROMPTS[0], *(random_tokens(n, seed=n) for n in PLACES), PROMPTS[2]]
    lengths = [60, *([NEW_TOKENS] * (len(prompts) - 1))]
    requests = deque(
        Request(prompt, GREEDY, length, ignore_eos=True) for prompt, length in zip(prompts, lengths, strict=True)
    )
    ended = []
    for event in engine.run(lambda waits: requests.popleft() if requests else None, max_sequences=2):
        if isinstance(event, Ended):
            ended.append((event.sequence.error, event.sequence.statistics.token_ids[:NEW_TOKENS]))
    engine.close()
    print(json.dumps(ended), flush=True)


@pytest.mark.parametrize("settings", [{}, {"resident": 0.0}], ids=["resident", "streamed"])
@pytest.mark.slow(keep=1)
def test_memory_that_runs_out_while_a_prompt_is_read_ends_it_alone_on_all_ranks(pair_of_models, settings):
    root, want = pair_of_models
    printed = run_forks(lambda: run_short_in_reading(root, settings), 2)
    first, second = (json.loads(line) for line in printed.splitlines() if line.startswith("["))
    said = {report[0][0]: report for report in (first, second)}
    assert set(said) == {"none is left", "rank 1: none is left"}
    for error, report in said.items():
        *before, (behind, tokens) = report[: len(PLACES)]
        assert before == [[error, []]] * (len(PLACES) - 1)
        assert behind == error and len(tokens) == 1
        assert report[len(PLACES) :] == [[None, want[2]], [None, want[0]]]


@pytest.mark.slow
def test_one_that_a_rank_has_no_memory_for_fails_on_all_and_others_go_on(pair_of_models):
    root, want = pair_of_models
    printed = run_forks(lambda: run_short(root), 2)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [report["texts"] for report in reports] == [[[], *want[1:]]] * 2
    assert sorted(report["errors"][0] for report in reports) == ["none is left", "rank 1: none is left"]
    assert all(report["errors"][1:] == [None, None] for report in reports)
