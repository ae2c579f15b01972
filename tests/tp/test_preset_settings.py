"""Presets as defaults: their published settings and their drafts, with a preset that is made here."""

import json

import pytest
from command import run_here
from triforce.offload import Engine
from triforce.offload.settings import Settings
from triforce.tp import PRESETS, find_pair
from triforce.tp.weights.registry import Preset, published_settings


def test_settings_are_those_for_as_many_gpus_or_the_next_fewer():
    assert published_settings("lwm-text-128k", 1) == {"budget": 8192, "chunk_size": 8, "block_length": 12}
    for gpus in (2, 3, 8):
        assert published_settings("lwm-text-128k", gpus) == {"budget": 12288, "chunk_size": 8, "block_length": 16}
    assert published_settings("embedded", 1) == published_settings("some/where", 1) == {}


@pytest.fixture
def preset(pair, monkeypatch):
    """A preset of the tiny pair, with published settings."""
    settings = ({"gpus": 1, "budget": 64, "block_length": 5},)
    made = Preset("tiny", str(pair[0]), str(pair[1]), "for tests", settings, ())
    monkeypatch.setitem(PRESETS, "tiny", made)
    return made


def test_published_settings_are_defaults_that_options_override(preset, capfd):
    engine = Engine.load("tiny", device="cpu", block_length=7)
    assert engine.settings == Settings(budget=64, block_length=7)
    run = (
        "generate",
        "--model",
        "tiny",
        "--prompt",
        "a" * 100,
        "--max-new-tokens",
        3,
        "--json",
        "-",
        "--device",
        "cpu",
    )
    for option, want in (((), 64), (("--budget", "auto"), 64), (("--budget", 32), 32)):
        assert json.loads(run_here(capfd, *run, *option).out)["settings"]["budget"] == want


def test_a_preset_gives_its_draft_and_stands_for_it(preset, pair):
    assert find_pair("tiny") == pair
    assert find_pair("tiny", "none") == (pair[0], None)
    assert find_pair(pair[0], "tiny") == pair
