"""What `triforce generate` promises when all is well: text, JSON, prompts, truncation, and the same tokens again."""

import json
import os
import subprocess
import sys

import pytest
from command import CONTEXT, TEXT, TRIFORCE, run_command, run_fork, run_here, undocumented
from transformers import AutoTokenizer
from triforce.kernels import Level, arithmetic, cpu_level
from triforce.tp import PRESETS, Tokenizer

FIELDS = {
    "version": None,
    "model": None,
    "draft": None,
    "device": None,
    "device_name": None,
    "world_size": None,
    "kernels": None,
    "arithmetic": None,
    "dtype": None,
    "prompt_tokens": None,
    "new_tokens": None,
    "token_ids": None,
    "text": None,
    "finish_reason": None,
    "seed": None,
    "sampling": {"temperature", "top_p", "top_k", "min_p"},
    "prefill_s": None,
    "ttft_s": None,
    "decode_s": None,
    "tbt_ms": {"mean", "p50", "p95", "p99"},
    "tokens_per_s": None,
    "rounds": None,
    "plain_rounds": None,
    "acceptance": {"draft", "retrieval", "tokens_per_round", "draft_tokens_per_round"},
    "settings": {"tiers", "budget", "chunk_size", "draft_length", "block_length", "refresh", "resident_bytes"},
    "time_s": {"draft", "retrieval", "verify", "refresh", "other"},
    "link": {"bytes_streamed", "busy_s", "waited_s", "gb_per_s"},
    "kv_read": {"bytes", "s", "gb_per_s"},
    "memory": {"device_peak_bytes", "host_peak_bytes", "kv_bytes"},
}
"""What scripts may rely on, by the interface's own list."""

OPTIONS = (
    *("--prompt-file", "--prompt", "--ask", "--asks", "--answers", "--truncate", "--context", "--save-context"),
    *("--no-context", "--model", "--draft", "--dtype", "--device", "--gpus", "--threads", "--pack", "--host-memory"),
    *("--max-new-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--ignore-eos"),
    *("--tiers", "--budget", "--chunk-size", "--draft-length", "--block-length", "--resident", "--refresh"),
    *("--early-end", "--exact", "--live", "--json", "--debug"),
)


def test_stdout_holds_the_text_of_the_json_and_stderr_the_rest(generate, tmp_path):
    path = tmp_path / "run.json"
    outcome = generate("--json", path)
    document = json.loads(path.read_text())
    assert outcome.out == document["text"]
    assert document["new_tokens"] == len(document["token_ids"]) == 12
    assert document["finish_reason"] == "length"
    for label in ("model", "prompt", "tiers", "memory", "written", "TTFT", "TBT", "accepted", "a round", "KV read"):
        assert f"\n{label}" in "\n" + outcome.err, label
    assert str(document["seed"]) in outcome.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"], "the temporary file is gone"


def test_json_on_stdout_is_one_document_with_every_field(pair):
    target, draft = pair
    outcome = run_fork(
        "generate", "--model", target, "--draft", draft, "--prompt-file", "-", "--json", "-", "--max-new-tokens", 9,
        stdin=TEXT.encode(),
    )  # fmt: skip
    assert outcome.code == 0, outcome
    document = json.loads(outcome.out)
    assert document["arithmetic"] == arithmetic()
    for name, parts in FIELDS.items():
        assert name in document, name
        if parts:
            assert parts <= document[name].keys(), name
    assert not undocumented(document, "json.md")
    tokenizer = Tokenizer.load(target)
    assert document["prompt_tokens"] == len(tokenizer.encode(TEXT, True))
    assert document["text"] == tokenizer.decode(document["token_ids"])
    assert "of stdin" in outcome.err


def test_same_seed_gives_the_same_tokens_and_a_drawn_seed_is_reported(document):
    drawn = document("--temperature", "1")
    again = document("--temperature", "1", "--seed", drawn["seed"])
    third = document("--temperature", "1", "--seed", drawn["seed"])
    assert again["token_ids"] == third["token_ids"]
    assert again["seed"] == drawn["seed"]


def test_greedy_is_the_same_for_every_number_of_tiers(document):
    arguments = ("--temperature", 0, "--dtype", "float32", "--budget", 64, "--max-new-tokens", 40, "--ignore-eos")
    runs = [document(*arguments, "--tiers", tiers)["token_ids"] for tiers in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_fixed_lengths_are_kept(document):
    lengths = {"budget": 64, "chunk_size": 4, "draft_length": 2, "block_length": 5}
    options = [word for name, value in lengths.items() for word in (f"--{name.replace('_', '-')}", value)]
    settings = document(*options, "--refresh", 3)["settings"]
    assert lengths.items() <= settings.items()
    assert str(settings["refresh"]) == "3"


def test_draft_none_runs_two_tiers(document):
    run = document("--draft", "none")
    assert run["settings"]["tiers"] == 2
    assert run["draft"] is None


@pytest.mark.parametrize("part", ["head", "tail", "middle"])
def test_truncation_fills_the_model_and_says_what_it_dropped(generate, part):
    outcome = generate("--prompt", TEXT * 20, "--truncate", part, "--json", "-")
    assert json.loads(outcome.out)["prompt_tokens"] == CONTEXT - 12
    assert "tokens dropped by --truncate" in outcome.err


def test_tokenizer_agrees_with_transformers(pair):
    ours, theirs = Tokenizer.load(pair[0]), AutoTokenizer.from_pretrained(pair[0])
    for text in (TEXT, "<s>quoted</s> specials", "  blanks\n\n", "🙂"):
        assert ours.encode(text, True) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text, True)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )


@pytest.mark.skipif(None in PRESETS["embedded"].directories(), reason="the embedded pair is not there")
@pytest.mark.slow
def test_no_option_is_needed(capfd):
    outcome = run_here(capfd, "generate", "--max-new-tokens", 8, "--seed", 5)
    assert outcome.code == 0, outcome
    assert len(outcome.out.splitlines()) >= 4
    assert "of the built-in log book 5" in outcome.err and "TBT" in outcome.err
    assert outcome.err.count("    the log, ") == 3


def test_mark_and_line_ends_of_other_systems_are_read_as_text(generate, tmp_path):
    dos, unix = tmp_path / "dos.txt", tmp_path / "unix.txt"
    dos.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    unix.write_text(TEXT, encoding="utf-8")
    found, want = (json.loads(generate("--prompt-file", path, "--seed", 1, "--json", "-").out) for path in (dos, unix))
    assert found["token_ids"] == want["token_ids"] and found["prompt_tokens"] == want["prompt_tokens"]


def test_models_and_doctor_speak_json(capfd):
    rows = json.loads(run_here(capfd, "models", "--json").out)
    assert [row["name"] for row in rows] == list(PRESETS)
    few_bits = {row["name"]: row["weights"] for row in rows if row["weights"]}
    assert few_bits["qwen3-32b-awq"] == "AWQ, 4 bits" and "qwen3-8b" not in few_bits
    assert f"  weights {few_bits['qwen3-32b-awq']}" in run_here(capfd, "models").out.splitlines()
    findings = run_here(capfd, "doctor", "--json")
    assert {"versions", "cpu", "cuda", "memory", "broken", "missing"} <= json.loads(findings.out).keys()
    few_bits = json.loads(findings.out)["few_bits"]
    assert "GPTQ" in few_bits["formats"] and "Q4_K" in few_bits["formats"]
    assert ("inside the matrix product" in few_bits["cpu"]) == (cpu_level() > Level.NONE)
    assert findings.code == (1 if json.loads(findings.out)["broken"] else 0)
    assert run_here(capfd, "doctor").out.count("torch ")


def test_doctor_examines_an_installation_without_a_working_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    for outcome in (
        run_command("doctor", PYTHONPATH=str(tmp_path)),
        run_command("doctor", "--json", PYTHONPATH=str(tmp_path)),
    ):
        assert outcome.code == 1, outcome
        assert "torch does not import (libtorch_cpu.so: " in outcome.out
        assert "pip install --force-reinstall torch" in outcome.out
        assert "python" in outcome.out and "Traceback" not in outcome.err
        assert outcome.out.count("libtorch_cpu.so") == 1, "said once"


def test_help_and_version_do_not_wait_for_pytorch():
    program = "import sys; sys.argv[1:] = ['generate', '--help']\nfrom triforce.cli.app import main\ntry: main()\n"
    program += "except SystemExit as e: print(e.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 False False"
    for option in OPTIONS:
        assert option in done.stdout, option
    assert run_command("--version").out.startswith("triforce ")


@pytest.mark.slow
def test_shell_completion_knows_presets_and_values():
    def complete(line):
        words = line.split(" ")
        done = subprocess.run(
            TRIFORCE,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ
            | {"_TRIFORCE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        )
        return done.stdout.split()

    assert "embedded" in complete("triforce generate --model em")
    assert complete("triforce generate --dtype bf") == ["bfloat16"]
    assert complete("triforce generate --tiers ") == ["1", "2", "3"]
    assert complete("triforce do") == ["doctor"]
