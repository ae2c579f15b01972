"""`--rope-scaling` of every command that has a model read texts: more positions, and the text that they give."""

import io
import json
import sys

import pytest
from command import TEXT, VOCABULARY, check_refusal, run_here, save_tokenizer
from tiny import save_llama

POSITIONS = 128
SCALED = ("--rope-scaling", "yarn:8")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, and the same with the scaling in its own configuration."""
    root = tmp_path_factory.mktemp("models")
    by_config = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    by_config["original_max_position_embeddings"] = POSITIONS
    for name, given in (
        ("plain", {"max_position_embeddings": POSITIONS}),
        ("scaled", {"max_position_embeddings": 8 * POSITIONS, "rope_parameters": by_config}),
    ):
        save_tokenizer(root / name)
        save_llama(root / name, seed=1, vocab_size=VOCABULARY, num_hidden_layers=2, **given)
    return root / "plain", root / "scaled"


@pytest.fixture
def run(models, capfd, tmp_path, monkeypatch):
    """A command with one of them."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))

    def call(command, *arguments, model=models[0], stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run_here(capfd, command, "--model", model, "--device", "cpu", "--dtype", "float32", *arguments)

    return call


SHORT = ("--draft", "none", "--max-new-tokens", 20, "--temperature", 0, "--json", "-")


def test_texts_are_those_of_a_model_whose_configuration_says_so(run, models, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"custom_id": "a", "body": {"prompt": TEXT, "max_tokens": 20, "temperature": 0}}))

    def texts(*more, model):
        generated = json.loads(run("generate", "--prompt", TEXT, *SHORT, *more, model=model).out)
        talked = json.loads(run("chat", *SHORT, *more, model=model, stdin=f"{TEXT.splitlines()[0] * 2}\n").out)
        answers = tmp_path / f"{len(more)}.jsonl"
        assert run("batch", asked, "-o", answers, "--draft", "none", *more, model=model).code == 0
        (line,) = answers.read_text().splitlines()
        return generated["text"], talked[0]["text"], json.loads(line)["response"]["body"]["choices"][0]["text"]

    assert texts(*SCALED, model=models[0]) == texts(model=models[1])
    check_refusal(run("generate", "--prompt", TEXT, *SHORT), 1, f"{POSITIONS} positions")


def test_a_text_that_is_read_so_is_found_so(run, tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    read = ("read", tmp_path / "book.txt", "--as", "book", "--raw")
    check_refusal(run(*read), 1, f"{POSITIONS} positions")
    done = run(*read, *SCALED)
    assert done.code == 0 and f"--rope-scaling {SCALED[1]}" in done.err, "it says how to ask it"
    again = json.loads(run("generate", "--context", "book", *SHORT, *SCALED).out)
    fresh = json.loads(run("generate", "--prompt", TEXT, *SHORT, *SCALED).out)
    assert again["text"] == fresh["text"] and again["reused_tokens"] > POSITIONS
    assert run("generate", "--context", "book", *SHORT, "--rope-scaling", "yarn:16").code != 0, "another model's"


def test_what_runs_is_said_with_it(run):
    outcome = run("generate", "--prompt", TEXT, *SHORT[:-2], *SCALED)
    assert outcome.code == 0 and "RoPE scaled by hand (yarn:8)" in outcome.err
    assert json.loads(run("generate", "--prompt", TEXT, *SHORT, *SCALED).out)["settings"]["rope_scaling"] == "yarn:8"


@pytest.mark.parametrize("asked", ["linear:4", "yarn", "yarn:1"])
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_scaling_that_is_none_is_refused(run, capfd, models, command, asked):
    given = (command, "--model", models[0], "--rope-scaling", asked)
    check_refusal(run_here(capfd, *given), 2, f"rope-scaling is '{asked}'", "yarn:FACTOR")


def test_a_plan_names_it_as_the_remedy_and_takes_it(capfd):
    asked = ("plan", "--model", "qwen3-8b", "--context", "131072", "--gpu", "rtx4090", "--json", "-")
    found = json.loads(run_here(capfd, *asked).out)
    assert {"option": "rope-scaling", "value": "yarn:3.2"}.items() <= found["remedies"][0].items()
    outcome = run_here(capfd, *asked, "--rope-scaling", "yarn:3.2")
    assert outcome.code == 0 and not json.loads(outcome.out)["remedies"]
