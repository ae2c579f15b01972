"""`triforce compare`: real baselines in their own processes, and those that are missing or fail."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
import torch
from command import TEXT, TRIFORCE, VOCABULARY, check_refusal, undocumented
from strange_systems import FLIPPED_AT, PROMPT_TOKENS, TOKENS, WITH_STRANGE_SYSTEMS, rows_of
from tiny import greedy_oracle
from transformers import LlamaForCausalLM
from triforce.cli.compare import comparison
from triforce.cli.compare.baselines.catalogue import BASELINES, Entry
from triforce.cli.compare.baselines.catalogue import TRIFORCE as OURS
from triforce.cli.compare.baselines.process import WorkerError, run_worker
from triforce.cli.compare.baselines.protocol import Job, Measurement
from triforce.tp.weights.tokenizer import Tokenizer


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
    missing = BASELINES[name].missing()
    if missing:
        pytest.skip(f"{name} is {missing}")
    outcome, document = compare(name, json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    assert other["runs"][0]["token_ids"] == ours["runs"][0]["token_ids"]
    assert "the same tokens" in rows_of(outcome)[1]
    assert {"deepspeed": "ZeRO stage 3", "llama.cpp": "flash attention o"}[name] in other["ran"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_a_missing_and_failing_baselines_are_rows_and_the_others_finish(compare, tmp_path):
    failing = {
        "raises": "ZeroDivisionError: the other one's bug",
        "exits": "ended with code 3 and no result; its last words: a library's last words",
        "is killed": "killed by the system, as it does when memory runs out",
        "needs too much": "out of memory",
        "stops early": f"it wrote {TOKENS - 1} tokens where {TOKENS} were asked for",
        "gone": "not installed (no_such_package): pip install no-such-package",
    }
    outcome, document = compare(*failing, "autoregressive", json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    systems = {system["name"]: system for system in document["systems"]}
    rows = rows_of(outcome)
    for name, why in failing.items():
        assert why in systems[name]["failure"]
        assert "runs" not in systems[name]
        assert any(row.startswith(name) and why in row for row in rows), rows
    assert systems["autoregressive"]["failure"] is None
    assert systems["autoregressive"]["runs"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_nothing_to_compare_exits_1_after_the_table(compare):
    outcome, _ = compare("raises")
    assert outcome.code == 1
    assert "no baseline ran" in outcome.err
    assert "ZeroDivisionError" in rows_of(outcome)[1]


def test_only_missing_baselines_are_refused_before_anything_runs(compare):
    outcome, _ = compare("gone")
    check_refusal(outcome, 1, "gone is not installed", "pip install no-such-package")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_assistance_without_a_draft_is_a_row(compare):
    outcome, _ = compare("transformers-assisted", "autoregressive", draft="none")
    assert outcome.code == 0, outcome
    assert "needs a draft: give --draft D" in rows_of(outcome)[1]
    assert "two tiers" in outcome.out


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_the_first_token_that_differs_is_shown_with_the_targets_logits(compare, pair, tmp_path):
    outcome, document = compare("flips", json_path=tmp_path / "runs.json")
    assert outcome.code == 0, outcome
    ours, other = document["systems"]
    answer, found = ours["runs"][0]["token_ids"], other["first_difference"]
    model = LlamaForCausalLM.from_pretrained(pair[0])
    prompt = Tokenizer.load(pair[0]).encode(TEXT, True)[:PROMPT_TOKENS]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:FLIPPED_AT]])).logits[0, -1]
    assert found["index"] == FLIPPED_AT
    assert found["triforce_token"] == answer[FLIPPED_AT] == int(logits.argmax())
    assert found["token"] == (answer[FLIPPED_AT] + 1) % VOCABULARY
    assert found["triforce_logit"] == pytest.approx(float(logits[found["triforce_token"]]), abs=1e-4)
    assert found["logit"] == pytest.approx(float(logits[found["token"]]), abs=1e-4)
    assert f"differs from token {FLIPPED_AT} on: {found['token']} (logit {found['logit']:.4f})" in rows_of(outcome)[1]
    assert "flips computed something else" in outcome.out


@pytest.mark.parametrize("only_the_likeliest", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}, {}])
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_sampling_reaches_every_system_and_only_own_texts_are_compared(compare, tmp_path, only_the_likeliest):
    changes = {"temperature": 4.0, "top_p": 0.8, "top_k": 30} | only_the_likeliest
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
    assert f"audit: {TOKENS} of {TOKENS} tokens are what decoding token by token draws" in outcome.out


@pytest.mark.parametrize("exact", [True, False])
def test_what_must_not_differ_is_an_error_where_rounding_is_no_excuse(job, exact):
    def measured(name, tokens):
        run = Measurement("", tokens, 1.0, 1.0, 1, 0.0, 1, 0, {"settings": {"exact": exact}})
        return comparison.Row(Entry(name, "", OURS.module), [run])

    seeded = replace(job, temperature=1.0, seed=4)
    found = comparison.Comparison(seeded, 1, [measured("triforce", [1, 2, 3]), measured("autoregressive", [1, 2, 3])])
    comparison.find_differences(found, 1.0)
    assert found.wrong is None
    found.audit = comparison.Audit(3, 2, 1)
    assert found.wrong == ("the audit disagrees from token 1 on, which must not be" if exact else None)
    found.audit = comparison.Audit(3, failure="no memory")
    assert found.wrong == "the audit failed: no memory"
    found.audit = None
    found.rows[0].runs.append(replace(found.rows[0].runs[0], token_ids=[1, 2, 4]))
    assert found.wrong == ("two runs of triforce differ, which must not be" if exact else None)
    found.rows[0].runs.pop()
    found.rows[1].differences = [comparison.Difference(2, 5, 3)]
    assert found.wrong == ("triforce and autoregressive differ from token 2 on, which must not be" if exact else None)


@pytest.mark.usefixtures("forked_workers")
def test_json_on_stdout_is_alone_there(compare, capfd):
    outcome, _ = compare("autoregressive", json="-")
    assert outcome.code == 0, outcome
    assert [system["name"] for system in json.loads(outcome.out)["systems"]] == ["triforce", "autoregressive"]
    assert "speed-up" in outcome.err


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


@pytest.fixture
def job(tmp_path):
    """A job that no model is needed for."""
    return Job(
        system="", model="", draft=None, asked_model="", asked_draft=None, device="cpu", dtype="float32",
        prompt_ids=[1, 1, 2], max_new_tokens=3, temperature=0.0, top_p=1.0, top_k=0, seed=None, threads=1,
        folder=str(tmp_path),
    )  # fmt: skip


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_with_its_children(job, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", WITH_STRANGE_SYSTEMS)
    with pytest.raises(WorkerError, match="stopped after 8 s") as failure:
        run_worker("strange_systems", "measure", replace(job, system="hangs"), limit_s=8)
    child = int(failure.value.log.split("child ")[1].split()[0])
    until = time.monotonic() + 10
    while runs(child) and time.monotonic() < until:  # a killed process takes a moment to go
        time.sleep(0.05)
    assert not runs(child)


def test_the_order_rotates_and_a_system_that_failed_is_not_run_again(job, monkeypatch):
    order = []

    def pretend(module, action, job, limit_s):
        order.append(job.system)
        if job.system == "b" and order.count("b") == 2:
            raise WorkerError("it broke", "")
        seconds = {1: 5.0, 2: 1.0, 3: 2.0}[order.count(job.system)]
        return {
            "ran": "", "token_ids": [7, 8, 9], "ttft_s": seconds, "decode_s": 2 * seconds, "first_tokens": 1,
            "load_s": 0.0, "host_peak_bytes": 1, "device_peak_bytes": 0,
        }  # fmt: skip

    monkeypatch.setattr(comparison, "run_worker", pretend)
    entries = [Entry(name, "", name) for name in "ab"]
    found = comparison.compare(
        job, entries, repeats=3, limit_s=1, settings={}, on_start=lambda *_: None, on_end=lambda _: None
    )
    assert order == ["triforce", "a", "b", "a", "b", "triforce", "triforce", "a"]
    assert [len(row.runs) for row in found.rows] == [3, 3, 1]
    assert found.rows[0].ttft_s == 2.0
    assert found.rows[0].tbt_s == 2.0
    assert found.rows[2].failure == "it broke"
    assert found.possible
    assert OURS.name == "triforce"


def test_tokens_that_come_with_the_first_one_do_not_count_as_decoded():
    measured = Measurement("", [1, 2, 3, 4, 5], 1.0, 6.0, 2, 0.0, 0, 0)
    assert measured.tbt_s == 2.0
    assert replace(measured, first_tokens=5).tbt_s == 0.0


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
