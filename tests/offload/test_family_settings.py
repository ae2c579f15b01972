"""Greedy text of experts, of Gemma 3 and of models with linear attention, dense and in few bits, equals transformers'
with settings of all kinds."""

import random
from dataclasses import replace

import pytest
from mtp import Head
from quantised import FORMATS, save_quantised
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.limits import LIMITS
from triforce.offload.system import THIS_MACHINE

FAMILIES = ("qwen3-moe", "mixtral", "gemma3")
HYBRIDS = ("qwen3.5", "qwen3-next", "qwen3.5-moe")
STORED = (None, None, "gptq", "gptq-8-bits", "fp8", "packed-zeros")
NEW = 24


class Models(dict):
    """For each family and format: the directory, and transformers' model. They are made when they are first asked
    for."""

    def __init__(self, root):
        self.root = root
        save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)

    def __missing__(self, name):
        family, form = name
        directory = self.root / f"{family}-{form}"
        model = save_quantised(directory, FORMATS[form], family) if form else save_family(directory, family, seed=1)
        if family in HYBRIDS and not form:
            Head(model, seed=2).save(directory)
        self[name] = directory, model
        return self[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("families", [FAMILIES, HYBRIDS], ids=["others", "hybrids"])
def test_text_of_random_settings_is_that_of_transformers(models, families, seed):
    chance = random.Random(seed)
    name, form = chance.choice(families), chance.choice(STORED)
    directory, model = models[name, form]
    settings = {
        "tiers": chance.choice([1, 2, 3, 3]),
        "budget": chance.choice([24, 32, 160, 4096]),
        "chunk_size": chance.choice([1, 8, 8, 24]),
        "refresh": chance.choice(["auto", "round", 3, "never"]),
        "block_length": chance.choice([None, 1, 6, 24, 60]),
        "draft_length": chance.choice([None, 1, 4]),
        "resident": chance.choice([None, 0, 1e-4]),
        "threads": chance.choice([None, 1, 2]),
    }
    limits = replace(
        LIMITS, window_slack=chance.choice([16, 600, 2048]), largest_block=chance.choice([256, 1024, 4096])
    )
    prompt = random_tokens(chance.choice([1, 30, 300, 700, 1400]), seed=seed)
    drafts = [models.root / "draft", "lookup", directory]
    draft = chance.choice([*drafts, "mtp", "mtp,lookup"] if name in HYBRIDS and not form else drafts)
    system = replace(THIS_MACHINE, limits=limits)
    engine = Engine.load(directory, draft, device="cpu", dtype="float32", system=system, **settings)
    text = engine.generate(prompt, Sampling(0.0), NEW, ignore_eos=True).token_ids
    assert text == greedy_oracle(model, prompt, NEW), settings
    if seed % 3 == 0:
        turn = [*prompt, *text, *random_tokens(chance.choice([1, 40]), seed=seed + 1)]
        text = engine.generate(turn, Sampling(0.0), NEW, ignore_eos=True).token_ids
        assert text == greedy_oracle(model, turn, NEW), settings
    engine.close()
