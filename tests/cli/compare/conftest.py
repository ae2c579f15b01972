"""A tiny pair, and `triforce compare` on it."""

import json

import pytest
from command import TEXT, VOCABULARY, fork_interpreters, run_here, save_tokenizer
from comparisons import PROMPT_TOKENS, TOKENS
from tiny import greedy_oracle, save_llama
from triforce.tp import Tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target that often draws its end-of-sequence token, and a draft."""
    root = tmp_path_factory.mktemp("compare")
    for name, seed, layers in (("target", 0, 2), ("draft", 1, 1)):
        save_tokenizer(root / name)
        shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "num_hidden_layers": layers}
        model = save_llama(root / name, seed=seed, **shape)
        if name == "target":
            prompt = Tokenizer.load(root / name).encode(TEXT, True)[:PROMPT_TOKENS]
            often = greedy_oracle(model, prompt, TOKENS)[3]
            save_llama(root / name, seed=seed, eos_token_id=often, **shape)
    return root / "target", root / "draft"


@pytest.fixture
def compare(pair, capfd, monkeypatch):
    """Runs `compare` on the tiny pair. Gives the outcome and the JSON."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*names, json_path=None, repeat=1, **changes):
        target, draft = pair
        baselines, flags = ([name for name in names if name.startswith("--") is flag] for flag in (False, True))
        options = {"--model": target, "--draft": draft, "--prompt": TEXT, "--prompt-tokens": PROMPT_TOKENS}
        options |= {"--max-new-tokens": TOKENS, "--dtype": "float32", "--repeat": repeat}
        options |= {"--budget": 64, "--draft-length": 3, "--block-length": 7}
        options |= {"--json": json_path} if json_path else {}
        options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        given = [part for option in options.items() for part in option]
        outcome = run_here(
            capfd, "compare", *given, *flags, *(part for name in baselines for part in ("--baseline", name))
        )
        return outcome, json.loads(json_path.read_text()) if json_path and json_path.exists() else None

    return run


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers that are forks: processes of their own still, without the start of an interpreter."""
    fork_interpreters(monkeypatch)
