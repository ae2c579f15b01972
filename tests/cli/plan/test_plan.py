"""`triforce plan` says what a run then does, and where something does not fit, what to change."""

import json

import pytest
from command import check_refusal, run_here, undocumented

GIB = 2**30
THIRTEEN = "yarn-llama-2-13b-128k"


def plan(capfd, *arguments):
    return run_here(capfd, "plan", *arguments)


def test_plan_is_read_at_80_columns_and_says_what_is_modelled(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = plan(capfd, "--model", THIRTEEN, "--gpus", 2, "--host-memory", 128)
    assert outcome.code == 0 and outcome.err == ""
    assert all(len(line) <= 80 for line in outcome.out.splitlines())
    for words in ("RTX 4090", "ring", "open stretches", "12,288 tokens", "the floor", "modelled, not measured"):
        assert words in " ".join(outcome.out.split())


def test_what_exceeds_host_memory_is_planned_on_a_disk(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("--model", THIRTEEN, "--gpus", 2, "--host-memory", 32)
    outcome = plan(capfd, *asked)
    assert outcome.code == 0 and all(len(line) <= 80 for line in outcome.out.splitlines())
    for words in ("staging", "part of the KV cache on a disk", "5 GB/s, assumed"):
        assert words in " ".join(outcome.out.split())
    document = json.loads(plan(capfd, *asked, "--disk-gbps", 2.5, "--json", "-").out)
    assert not undocumented(document, "plan.md")
    disk, floor = document["disk"], document["verification"]["floor_ms"]
    assert disk["gb_per_s"] == 2.5 and not disk["assumed"] and document["blocks"]["on_disk"] > 0
    assert floor == pytest.approx(2 * document["verification"]["disk_bytes_per_gpu"] / 2.5e6)
    assert document["host_bytes"]["total"] <= 32 * GIB < document["host_bytes"]["total"] + disk["kv_bytes"]
    roomy = json.loads(plan(capfd, *asked[:-1], 256, "--json", "-").out)
    assert roomy["disk"]["kv_bytes"] == 0 and roomy["modelled"][2]["tbt_ms"] < document["modelled"][2]["tbt_ms"] / 2
    refused = plan(capfd, *asked[:-1], 0.5)
    assert refused.code == 1 and "the host needs" in refused.out and "--host-memory 4" in refused.out


def test_what_does_not_fit_exits_1_with_the_remedy(capfd):
    outcome = plan(capfd, "--model", THIRTEEN, "--gpu", "rtx4090")
    assert outcome.code == 1
    assert "does not fit: each GPU needs" in outcome.out and "(--gpus 2)" in outcome.out
    assert plan(capfd, "--model", THIRTEEN, "--gpu", "rtx4090", "--gpus", 2).code == 0


def test_json_has_no_key_that_is_not_documented(capfd):
    outcome = plan(capfd, "--shape", THIRTEEN, "--gpus", 2, "--json", "-")
    document = json.loads(outcome.out)
    assert not undocumented(document, "plan.md")
    assert document["fits"] is True and document["problems"] == document["remedies"] == []
    assert document["per_gpu_bytes"]["total"] <= document["gpu"]["memory_bytes"]
    assert [row["tiers"] for row in document["modelled"]] == [1, 2, 3]
    assert document["settings"]["budget"] == 12288, "as published for two GPUs"


def test_failed_plan_is_json_too(capfd, tmp_path):
    path = tmp_path / "plan.json"
    assert plan(capfd, "--shape", THIRTEEN, "--json", path).code == 1
    document = json.loads(path.read_text())
    assert document["fits"] is False and document["problems"]
    assert {"option": "gpus", "value": 2, "text": "2 instead of 1 such GPUs"} in document["remedies"]
    assert [row["fits"] for row in document["modelled"]] == [False, False, False]


def test_figures_of_a_card_can_be_given(capfd):
    def floor(*arguments):
        return json.loads(plan(capfd, "--shape", THIRTEEN, "--gpus", 2, "--json", "-", *arguments).out)

    usual, slow = floor(), floor("--link-gbps", "12.25")
    assert slow["verification"]["floor_ms"] == pytest.approx(2 * usual["verification"]["floor_ms"])
    large = floor("--gpu-memory", 141)
    assert large["verification"]["floor_ms"] == 0 and large["host_bytes"]["streamed_kv"] == 0
    assert large["modelled"][0]["tbt_ms"] < usual["modelled"][0]["tbt_ms"] / 10
    assert floor("--draft", "none")["settings"]["tiers"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu", "voodoo2"), 2, ("voodoo2", "rtx4090", "--gpu-memory")),
        (("--shape", "nope"), 2, ("'nope'", "presets")),
        (("--shape", "qwen3-8b", "--model", "x"), 2, ("--model and --shape",)),
        (("--model", "nobody/nothing"), 1, ("nobody/nothing", "hf download")),
        (("--model", "not-there"), 1, ("'not-there'", "presets")),
        (("--assume-acceptance", "1.5"), 2, ("--assume-acceptance", "'1.5'", "from 0 to 1")),
        (("--assume-acceptance", "0.5,x"), 2, ("--assume-acceptance", "'0.5,x'", "one or two")),
        (("--link-gbps", "0"), 2, ("--link-gbps", "above 0")),
        (("--gpus", "3", "--shape", THIRTEEN), 2, ("3 ranks", "--gpus may be")),
        (("--context", "0"), 2, ("--context", "'0'")),
        (("--budget", "4", "--shape", THIRTEEN), 2, ("budget is 4", "one chunk")),
    ],
)
def test_bad_requests_are_refused(capfd, arguments, code, words):
    check_refusal(plan(capfd, *arguments), code, *words)


def test_sequences_over_one_text_share_its_stream(capfd):
    """The link carries the text once for all; what each has of its own takes memory."""
    given = "--model", "qwen3-8b", "--gpu", "rtx4090", "--context", 32768, "--tiers", 2, "--budget", 512
    one, eight = (json.loads(plan(capfd, *given, "--batch", n, "--json", "-").out) for n in (1, 8))
    assert eight["batch"] == 8
    for tier, together in zip(one["modelled"], eight["modelled"], strict=True):
        assert together["tokens_per_second"] > 2 * tier["tokens_per_second"]
        assert together["tokens_per_second"] == pytest.approx(8e3 / together["tbt_ms"])
    assert eight["per_gpu_bytes"]["retrieval"] > 7 * one["per_gpu_bytes"]["retrieval"]
    open_budgets = [json.loads(plan(capfd, *given[:-2], "--batch", n, "--json", "-").out)["settings"] for n in (1, 64)]
    assert open_budgets[0]["budget"] > open_budgets[1]["budget"], "what all of them take together is bounded"
    assert "8 sequences over one text" in plan(capfd, *given, "--batch", 8).out


@pytest.mark.parametrize("chunk", [48, 512])
def test_the_budget_of_many_sequences_stays_whole_chunks(capfd, chunk):
    given = "--model", "qwen3-8b", "--gpu", "rtx4090", "--context", 32768, "--tiers", 2, "--batch", 64
    document = json.loads(plan(capfd, *given, "--chunk-size", chunk, "--json", "-").out)
    assert document["settings"]["budget"] == max(1, 256 // chunk) * chunk and document["per_gpu_bytes"]["retrieval"] > 0


def test_options_reach_the_plan(capfd):
    asked = ("--model", "qwen3-8b", "--gpu", "rtx4090", "--gpus", 2, "--context", 32768, "--tiers", 2, "--resident", 3)
    lengths = ("--budget", 512, "--chunk-size", 16, "--block-length", 9, "--draft-length", 3)
    more = ("--pack", "off", "--dtype", "float16", "--memory-gbps", 900, "--draft", "none", "--batch", 2)
    outcome = plan(capfd, *asked, *lengths, *more, "--json", "-")
    document = json.loads(outcome.out)
    assert (document["model"], document["draft"], document["dtype"]) == ("qwen3-8b", None, "float16")
    assert (document["gpus"], document["batch"], document["context"]) == (2, 2, 32768)
    assert document["gpu"]["memory_gb_per_s"] == 900 and not document["blocks"]["packed"]
    wanted = {"tiers": 2, "budget": 512, "chunk_size": 16, "block_length": 9}
    assert wanted.items() <= document["settings"].items()
    assert 0 < document["per_gpu_bytes"]["resident_kv"] <= 3 * GIB
    three = json.loads(plan(capfd, "--shape", THIRTEEN, "--gpus", 2, "--draft-length", 3, "--json", "-").out)
    assert three["settings"]["draft_length"] == 3
