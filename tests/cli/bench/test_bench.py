"""`triforce bench`: what it measures is what runs do, in the order it says, and nothing that was measured is lost."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
from command import CONTEXT, TEXT, TRIFORCE, check_refusal, run_here, undocumented, without_weights
from safetensors.torch import load_file
from triforce.tp import Tokenizer

CONTEXTS, NEW_TOKENS = (200, 400), 12


def bytes_of_a_pass(model, kv_tokens):
    """In float32: all weights but the table of embeddings, and the keys and values of so many tokens."""
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    numbers = sum(tensor.numel() for name, tensor in weights.items() if "embed_tokens" not in name)
    return 4 * (numbers + kv_tokens * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


@pytest.fixture
def bench(pair, capfd):
    """Runs `bench` on the tiny pair; the outcome and the JSON."""

    def run(json_path=None, **changes):
        options = {
            "--model": pair[0],
            "--draft": pair[1],
            "--prompt": TEXT,
            "--max-new-tokens": NEW_TOKENS,
            "--repeat": 2,
        }
        options |= {"--contexts": ",".join(map(str, CONTEXTS)), "--dtype": "float32", "--temperature": 0}
        options |= {"--budget": 64, "--draft-length": 3, "--block-length": 5}
        options |= {"--json": json_path} if json_path else {}
        options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        outcome = run_here(capfd, "bench", *(part for option in options.items() for part in option))
        return outcome, json.loads(json_path.read_text()) if json_path and json_path.exists() else None

    return run


def test_the_json_says_what_was_measured_and_where_the_floor_is_from(bench, pair, tmp_path):
    outcome, document = bench(tmp_path / "bench.json", tiers="1,3")
    assert outcome.code == 0, outcome
    assert not undocumented(document, "bench.md", "json.md")
    assert document["kind"] == "triforce bench" and not document["interrupted"]
    assert document["machine"]["device"] == "cpu" and document["machine"]["threads"] >= 1
    assert document["sampling"] == {"temperature": 0.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": None}
    assert [at["context"] for at in document["contexts"]] == list(CONTEXTS)
    carried = document["measured_bandwidth"]
    assert 0.1 < carried["memory_gb_per_s"] < 1e4 and carried["link_gb_per_s"] is None
    for at in document["contexts"]:
        assert at["prompt_tokens"] == at["context"] - NEW_TOKENS and at["prefill_s"] > 0
        plain, three = at["tiers"]
        assert [row["tiers"] for row in at["tiers"]] == [1, 3]
        for row in at["tiers"]:
            times = [run["tbt_ms"]["mean"] for run in row["runs"]]
            assert [run["repeat"] for run in row["runs"]] == [1, 2]
            assert row["tbt_ms"] == pytest.approx({"median": sum(times) / 2, "min": min(times), "max": max(times)})
            assert row["first_difference"] is None
            assert row["speedup"] == pytest.approx(plain["tbt_ms"]["median"] / row["tbt_ms"]["median"])
        assert plain["acceptance"]["tokens_per_round"] == 1 and plain["acceptance"]["draft"] is None
        assert 0 <= three["acceptance"]["retrieval_per_token"] <= 1
        # A pass reads the weights once and, on average, the keys and values up to the middle of the answer.
        floor = at["floor"]
        assert floor["read_bytes"] == pytest.approx(bytes_of_a_pass(pair[0], at["context"] - NEW_TOKENS / 2), rel=0.01)
        assert floor["ms"] == pytest.approx(floor["read_bytes"] / carried["memory_gb_per_s"] / 1e6)
        assert floor["bound_by"] == "memory" and floor["streamed_bytes"] == 0
    for words in ("speed-up", "floor, ms: derived", "memory", "medians of 2 interleaved runs"):
        assert words in outcome.out
    assert outcome.err.count("run 2 of 2: TBT ") == 4, "progress, a line a run where no terminal is"


def test_where_the_cache_streams_the_link_is_measured_and_its_bytes_count(bench, tmp_path):
    outcome, document = bench(tmp_path / "bench.json", resident=0, tiers="1", repeat=1, contexts=900)
    assert outcome.code == 0, outcome
    (at,) = document["contexts"]
    streamed, carried = at["floor"]["streamed_bytes"], document["measured_bandwidth"]
    assert streamed > 0 == at["resident_bytes"] and carried["link_gb_per_s"] > 0
    seconds = streamed / carried["link_gb_per_s"] / 1e6, at["floor"]["read_bytes"] / carried["memory_gb_per_s"] / 1e6
    assert at["floor"]["ms"] == pytest.approx(max(seconds))


@pytest.mark.slow
def test_sequences_that_are_decoded_together_are_measured(bench, tmp_path):
    outcome, document = bench(tmp_path / "bench.json", batch="1,3", contexts=300, repeat=2, plot=tmp_path / "batch.png")
    assert outcome.code == 0, outcome
    (at,) = document["contexts"]
    assert [(row["sequences"], row["tiers"]) for row in at["tiers"]] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert document["batches"] == [1, 3] and not undocumented(document, "bench.md", "json.md")
    for row in at["tiers"]:
        assert row["tokens_per_s"]["min"] > 0 and len(row["runs"]) == 2 and row["first_difference"] is None
    assert "tokens/s" in outcome.out and "gain" in outcome.out
    assert outcome.err.count("3 sequences, 3 tiers, run 2 of 2") == 1
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": "1,65"}, ("--batch", "65", "at most 64")),
        ({"batch": "0,2"}, ("--batch", "0,2")),
        ({"batch": "2", "contexts": "40"}, ("--contexts", "40", "question of 32 tokens")),
    ],
)
def test_batches_that_cannot_be_are_refused_by_value(bench, options, words):
    outcome, _ = bench(**options)
    check_refusal(outcome, 2, *words)


def test_json_on_stdout_is_alone_there(bench):
    outcome, _ = bench(json="-", contexts=200, repeat=1)
    assert [at["context"] for at in json.loads(outcome.out)["contexts"]] == [200]
    assert "speed-up" in outcome.err


def test_without_a_draft_two_tiers_take_the_place_of_three(bench, tmp_path):
    outcome, document = bench(tmp_path / "bench.json", draft="none", contexts=200, repeat=1)
    assert outcome.code == 0 and "there is no draft" in outcome.err
    assert [row["tiers"] for row in document["contexts"][0]["tiers"]] == [1, 2] and document["draft"] is None


@pytest.mark.slow
def test_a_short_text_is_repeated_and_that_is_said(bench, pair, tmp_path):
    outcome, document = bench(tmp_path / "bench.json", prompt="A short text. ", contexts=200, repeat=1)
    tokens = len(Tokenizer.load(pair[0]).encode("A short text. ", True))
    assert document["prompt"] == {"name": "--prompt", "text_tokens": tokens, "repeated": True}
    assert f"has {tokens} tokens and is repeated" in outcome.out
    _, document = bench(tmp_path / "bench.json", contexts=200, repeat=1)
    assert not document["prompt"]["repeated"]


@pytest.mark.slow
def test_the_picture_is_one(bench, tmp_path):
    path = tmp_path / "bench.png"
    outcome, _ = bench(plot=path, contexts=200, repeat=1)
    assert outcome.code == 0, outcome
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1600 and 1.5 < width / height < 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.png"]


@pytest.mark.slow
def test_svg_pictures_name_every_line_and_say_what_is_derived(bench, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "bench.svg"
    bench(plot=path, tiers="1,2,3", repeat=1)
    text = path.read_text()
    for words in ("plain decoding", "two tiers", "three tiers", "(derived)", "float32", "greedy", "retrieval cache"):
        assert words in text, words


def test_without_matplotlib_nothing_is_measured(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    outcome, _ = bench(plot=tmp_path / "bench.png")
    check_refusal(outcome, 1, "matplotlib", "pip install 'triforce-cli[plot]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"contexts": "200,x"}, 2, ("--contexts", "'200,x'", "separated by commas")),
        ({"contexts": "12"}, 2, ("--contexts has 12", "--max-new-tokens is 12")),
        ({"contexts": CONTEXT + 1}, 1, ("1,024 positions",)),
        ({"contexts": "auto"}, 2, ("1,024 positions", "--contexts")),
        ({"tiers": "1,4"}, 2, ("--tiers", "'1,4'", "1, 2 or 3")),
        ({"repeat": 0}, 2, ("--repeat", "'0'")),
        ({"max_new_tokens": 1}, 2, ("--max-new-tokens", "'1'")),
        ({"budget": 4}, 2, ("budget is 4",)),
        ({"temperature": -1}, 2, ("temperature is -1",)),
        ({"plot": "bench.doc"}, 2, ("--plot", "bench.doc", ".png")),
        ({"plot": "/nowhere/bench.png"}, 1, ("--plot", "there is no directory /nowhere")),
        ({"prompt_file": "nowhere.txt"}, 2, ("--prompt-file and --prompt",)),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_read(bench, pair, changes, code, words, tmp_path):
    check_refusal(bench(model=without_weights(pair[0], tmp_path), **changes)[0], code, *words)


@pytest.mark.slow
def test_two_ranks_measure_as_one_does(pair, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["bench", "--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--contexts", "200,300"]
    arguments += ["--max-new-tokens", 6, "--repeat", 1, "--dtype", "float32", "--temperature", 0, "--gpus", 2]
    done = subprocess.run(
        [*TRIFORCE, *map(str, arguments), "--device", "cpu", "--json", str(path)], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document["machine"]["world_size"] == 2 and "2 ranks of 1 thread" in done.stdout
    for at in document["contexts"]:
        assert [row["first_difference"] for row in at["tiers"]] == [None, None]
        assert at["floor"]["read_bytes"] > bytes_of_a_pass(pair[0], 0), "both ranks' weights, and the keys and values"


@pytest.mark.slow
def test_interrupting_keeps_what_was_measured(pair, tmp_path):
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["bench", "--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--contexts", "300,1000"]
    process = subprocess.Popen(
        [*TRIFORCE, *map(str, arguments), "--max-new-tokens", "200", "--json", str(path), "--plot", str(picture)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("300 tokens: 3 tiers, run 1 of 3"):
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(path.read_text())
    assert document["interrupted"] and "Interrupted" in out
    (at,) = document["contexts"]
    assert [len(row["runs"]) for row in at["tiers"]] in ([1, 1], [1, 2], [2, 2])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in err and err.endswith("interrupted\n")


def test_assumptions_are_for_shapes(bench):
    check_refusal(bench(assume_acceptance=0.5)[0], 2, "--assume-acceptance is for --shape")
