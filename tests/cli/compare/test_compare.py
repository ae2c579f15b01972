"""`triforce compare`: real baselines in their own processes, and those that are missing or fail."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest
from checkpoints import wrap_text_model
from command import (
    TEXT,
    TRIFORCE,
    VOCABULARY,
    check_refusal,
    first_on_path,
    run_here,
    save_tokenizer,
    undocumented,
)
from comparisons import PROMPT_TOKENS, TOKENS, rows_of, save_deepspeed
from quantised import FORMATS, save_quantised
from tiny import greedy_oracle, save_family
from transformers import LlamaForCausalLM
from triforce.tp import Tokenizer

OPTIONAL = {"deepspeed": ("deepspeed", "accelerate"), "llama.cpp": ("llama_cpp", "gguf")}
"""Systems that are not always there, and the packages that they need."""


def check_same_text(outcome, document):
    """The other system writes what this one does."""
    assert outcome.code == 0, outcome
    ours, theirs = document["systems"]
    assert theirs["failure"] is None and theirs["first_difference"] is None
    assert theirs["runs"][0]["token_ids"] == ours["runs"][0]["token_ids"]


def test_transformers_gets_the_numbers_that_quantised_weights_stand_for(compare, tmp_path, forked_workers):
    save_tokenizer(tmp_path / "target")
    save_quantised(tmp_path / "target", FORMATS["awq"], vocab_size=VOCABULARY, max_position_embeddings=1024)
    outcome, document = compare("transformers", json_path=tmp_path / "runs.json", model=tmp_path / "target")
    check_same_text(outcome, document)


def test_transformers_gets_the_text_model_of_several(compare, tmp_path, forked_workers):
    save_tokenizer(tmp_path / "target")
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    save_quantised(tmp_path / "target", FORMATS["gptq"], "gemma3", **changes)
    wrap_text_model(tmp_path / "target")
    of_model = {"model": tmp_path / "target", "draft": "none"}
    outcome, document = compare("transformers", json_path=tmp_path / "runs.json", **of_model)
    check_same_text(outcome, document)


@pytest.mark.parametrize(("family", "form"), [("qwen3.5", None), ("qwen3.5-moe", "gptq"), ("qwen3-next", "packed")])
def test_transformers_gets_layers_with_linear_attention(compare, tmp_path, forked_workers, family, form):
    save_tokenizer(tmp_path / "target")
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    if form:
        save_quantised(tmp_path / "target", FORMATS[form], family, **changes)
    else:
        save_family(tmp_path / "target", family, **changes)
    of_model = {"model": tmp_path / "target", "draft": "none"}
    outcome, document = compare("transformers", json_path=tmp_path / "runs.json", **of_model)
    check_same_text(outcome, document)


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3", "Q4_K"), ("qwen3", "F16"), ("gemma3", "Q8_0"), ("qwen3.5", "Q8_0"), ("qwen3-next", "Q8_0")],
)
def test_transformers_gets_the_numbers_of_a_gguf_file(compare, tmp_path, forked_workers, monkeypatch, family, form):
    pytest.importorskip("gguf", reason="the package gguf writes the file")
    from gguf import GGMLQuantizationType as Form
    from gguf_files import save_gguf

    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    save_gguf(tmp_path / "target", family, lambda name: Form[form])
    of_model = {"model": tmp_path / "target.gguf", "draft": "none"}
    outcome, document = compare("transformers", json_path=tmp_path / "runs.json", **of_model)
    check_same_text(outcome, document)


def test_a_scaling_that_others_are_not_given_is_refused(compare):
    outcome, _ = compare("transformers", rope_scaling="yarn:2")
    check_refusal(outcome, 2, "--rope-scaling", "transformers")


@pytest.mark.slow
def test_systems_in_float32_write_the_same_tokens_as_transformers_itself(compare, pair, tmp_path):
    names = ["triforce", "autoregressive", "transformers", "transformers-assisted"]
    outcome, document = compare(*names[1:], json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    model = LlamaForCausalLM.from_pretrained(pair[0])
    model.generation_config.eos_token_id = None
    prompt = Tokenizer.load(pair[0]).encode(TEXT, True)[:PROMPT_TOKENS]
    want = greedy_oracle(model, prompt, TOKENS)
    assert model.config.eos_token_id in want[:-1], "the test is to show that all write past the end of sequence"

    assert not undocumented(document, "json.md", "bench.md", but="details")
    assert [system["name"] for system in document["systems"]] == names
    assert document["prompt_tokens"] == PROMPT_TOKENS
    ours = document["systems"][0]
    for system in document["systems"]:
        assert system["failure"] is None
        (run,) = system["runs"]
        assert run["token_ids"] == want, system["name"]
        assert 0 < run["ttft_s"] == system["ttft_s"]
        after_first = TOKENS - run["first_tokens"]
        assert 0 < system["tbt_ms"] == pytest.approx(1e3 * run["decode_s"] / after_first)
        assert system["speedup_of_triforce"]["tbt"] == pytest.approx(system["tbt_ms"] / ours["tbt_ms"])
        assert system["memory"]["host_peak_bytes"] > 50 * 2**20
        assert system["first_difference"] is None
    assert "three tiers" in ours["ran"]
    assert ours["runs"][0]["details"]["acceptance"]["draft"] is not None, "it speculates"
    assert "assisted" in document["systems"][3]["ran"]

    rows = rows_of(outcome)
    assert [row.split()[0] for row in rows] == names
    assert all("the same tokens" in row for row in rows[1:])


@pytest.mark.parametrize("name", ["deepspeed", "llama.cpp"])
def test_optional_systems_in_float32_write_the_same_tokens(compare, tmp_path, name):
    if None in map(find_spec, OPTIONAL[name]):
        pytest.skip(f"{name} is not installed: pip install {' '.join(OPTIONAL[name])}")
    outcome, document = compare(name, json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    assert other["runs"][0]["token_ids"] == ours["runs"][0]["token_ids"]
    assert "the same tokens" in rows_of(outcome)[1]
    assert {"deepspeed": "ZeRO stage 3", "llama.cpp": "flash attention o"}[name] in other["ran"]


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """Installs a library that misbehaves."""

    def install(doing):
        folder = save_deepspeed(tmp_path / "libraries", doing)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", first_on_path(folder))
        return folder

    return install


@pytest.mark.parametrize(
    ("doing", "why"),
    [
        ("raises", "ZeroDivisionError: the other one's bug"),
        ("exits", "ended with code 3 and no result; its last output: a library's last words"),
        ("is killed", "killed by the system, as it does when memory runs out"),
        ("needs too much", "out of memory"),
    ],
)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow(keep=("exits-ended with code 3 and no result; its last output: a library's last words",))
def test_a_baseline_that_fails_is_a_row_and_the_others_finish(compare, deepspeed, tmp_path, doing, why):
    deepspeed(doing)
    outcome, document = compare("deepspeed", "autoregressive", json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    _, failed, other = document["systems"]
    assert failed["name"] == "deepspeed" and why in failed["failure"] and "runs" not in failed
    assert any(row.startswith("deepspeed") and why in row for row in rows_of(outcome))
    assert other["failure"] is None and other["runs"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_a_missing_baseline_is_a_row_and_the_others_finish(compare, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    outcome, document = compare("deepspeed", "autoregressive", json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    assert document["systems"][1]["failure"].startswith("not installed (deepspeed")
    assert "pip install deepspeed accelerate" in rows_of(outcome)[1]
    assert document["systems"][2]["runs"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_nothing_to_compare_exits_1_after_the_table(compare, deepspeed):
    deepspeed("raises")
    outcome, _ = compare("deepspeed")
    assert outcome.code == 1
    assert "no baseline ran" in outcome.err
    assert "ZeroDivisionError" in rows_of(outcome)[1]


def test_only_missing_baselines_are_refused_before_anything_runs(compare, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    outcome, _ = compare("deepspeed")
    check_refusal(outcome, 1, "deepspeed is not installed", "pip install deepspeed accelerate")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_with_its_children(compare, deepspeed, tmp_path):
    folder = deepspeed("hangs")
    outcome, document = compare("deepspeed", json_path=tmp_path / "runs.json", time_limit=0.2)
    assert "stopped after 12 s (--time-limit)" in document["systems"][1]["failure"] and outcome.code == 1
    child = int((folder / "deepspeed" / "child").read_text())
    until = time.monotonic() + 10
    while still_runs(child) and time.monotonic() < until:  # a killed process takes a moment to go
        time.sleep(0.05)
    assert not still_runs(child)


def still_runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_assistance_without_a_draft_is_a_row(compare):
    outcome, _ = compare("transformers-assisted", "autoregressive", draft="none")
    assert outcome.code == 0, outcome
    assert "needs a draft: give --draft D" in rows_of(outcome)[1]
    assert "two tiers" in outcome.out


@pytest.mark.parametrize(
    "only_the_likeliest", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}, {}]
)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_sampling_reaches_every_system_and_only_own_texts_are_compared(compare, tmp_path, only_the_likeliest):
    changes = {"temperature": 4.0, "top_p": 0.8, "top_k": 30, "min_p": 1e-9} | only_the_likeliest
    outcome, document = compare("autoregressive", "transformers", json_path=tmp_path / "runs.json", seed=3, **changes)
    assert outcome.code == 0, outcome
    assert document["sampling"] == changes
    ours, plain, other = (system["runs"][0]["token_ids"] for system in document["systems"])
    assert ours == plain, "a seed is one text, whatever drafts"
    if only_the_likeliest:
        assert ours == other, "what leaves one token leaves everyone the same"
    else:
        assert ours != other, "transformers draws with other random numbers"
        assert min(len(set(ids)) for ids in (ours, other)) > 10
    assert "the same tokens" in rows_of(outcome)[1]
    assert not any("token" in row for row in rows_of(outcome)[2:])


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 1, "seed": 8}])
@pytest.mark.slow
def test_an_audit_draws_every_token_again(compare, tmp_path, sampling):
    outcome, document = compare("autoregressive", "--audit", json_path=tmp_path / "runs.json", **sampling)
    assert outcome.code == 0, outcome
    assert document["audit"] == {"tokens": TOKENS, "agree": TOKENS, "first_difference": None, "failure": None}
    assert f"audit: {TOKENS} of {TOKENS} tokens are the same as in decoding token by token" in outcome.out


@pytest.mark.usefixtures("forked_workers")
def test_json_on_stdout_is_alone_there(compare, capfd):
    outcome, _ = compare("autoregressive", json="-")
    assert outcome.code == 0, outcome
    assert [system["name"] for system in json.loads(outcome.out)["systems"]] == ["triforce", "autoregressive"]
    assert "speed-up" in outcome.err


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_a_long_text_is_cut_before_a_question_in_every_system(pair, capfd, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 12)
    options = {"--model": pair[0], "--draft": "none", "--prompt-file": tmp_path / "long.txt", "--ask": "Who was it?"}
    options |= {"--max-new-tokens": 8, "--repeat": 1, "--baseline": "autoregressive", "--json": "-"}
    given = [part for option in options.items() for part in option]
    check_refusal(run_here(capfd, "compare", *given), 1, "1,024 positions", "--truncate")
    document = json.loads(run_here(capfd, "compare", *given, "--truncate", "middle").out)
    assert document["prompt_tokens"] == 1024 - 8
    assert [system["failure"] for system in document["systems"]] == [None, None]


def test_impossible_requests_are_refused_before_anything_runs(compare):
    check_refusal(compare("vllm")[0], 2, "'vllm'", "transformers", "autoregressive")
    check_refusal(compare("transformers", repeat=0)[0], 2, "--repeat", "'0'")
    check_refusal(compare("transformers", time_limit=0)[0], 2, "--time-limit", "above 0")
    check_refusal(compare("transformers", "--audit", temperature=1)[0], 2, "--audit", "--seed")
    check_refusal(compare("transformers", budget=4)[0], 2, "budget is 4")
    check_refusal(compare("transformers", temperature=-1)[0], 2, "temperature is -1")
    check_refusal(compare("transformers", prompt_tokens=1020)[0], 1, "1,024 positions")
    check_refusal(compare("transformers", prompt="short")[0], 2, "--prompt-tokens is 120")
    check_refusal(compare("transformers", ask="Who?")[0], 2, "--ask and --prompt-tokens")


@pytest.mark.slow
def test_interrupting_keeps_what_was_measured(pair, tmp_path):
    target, draft = pair
    path = tmp_path / "runs.json"
    arguments = ["compare", "--model", target, "--draft", draft, "--prompt", TEXT, "--max-new-tokens", "8"]
    process = subprocess.Popen(
        [*TRIFORCE, *map(str, arguments), "--baseline", "transformers", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2 of 6"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(path.read_text())
    assert document["interrupted"]
    assert len(document["systems"][0]["runs"]) == 1
    assert "not measured: interrupted" in out
