"""`triforce bench --shape`: steps are measured without weights, and what follows from them is called modelled."""

import json
import re
from types import SimpleNamespace

import psutil
import pytest
from command import check_refusal, run_here, undocumented
from quantised import FORMATS, save_quantised
from safetensors.torch import load_file
from tiny import save_family, save_llama


def bytes_of_a_pass(model, kv_tokens):
    """In float32: all weights but the table of embeddings, and the keys and values of so many tokens."""
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    numbers = sum(tensor.numel() for name, tensor in weights.items() if "embed_tokens" not in name)
    return 4 * (numbers + kv_tokens * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


@pytest.fixture
def shape(pair, capfd):
    """Runs `bench --shape` on the shape of the tiny pair; the outcome and the JSON."""

    def run(json_path, *more, **changes):
        options = {"--shape": pair[0], "--draft": pair[1], "--contexts": "256,512", "--dtype": "float32"}
        options |= {"--budget": 64, "--json": json_path}
        options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        outcome = run_here(capfd, "bench", *(part for option in options.items() for part in option), *more)
        return outcome, json.loads(json_path.read_text()) if json_path.exists() else None

    return run


def test_a_shapes_steps_are_measured_and_what_is_derived_is_called_modelled(shape, pair, tmp_path):
    picture = tmp_path / "shape.png"
    outcome, document = shape(
        tmp_path / "shape.json",
        tiers="1,3",
        assume_acceptance="0.8,0.5",
        block_length=4,
        draft_length=2,
        plot=picture,
    )
    assert outcome.code == 0, outcome
    assert document["shape"]["assumed_acceptance"] == {"retrieval": 0.8, "draft": 0.5}
    assert document["sampling"] is document["prompt"] is None
    assert not undocumented(document, "bench.md", "json.md")
    for at in document["contexts"]:
        steps = {name: times["median"] for name, times in at["steps_ms"].items()}
        assert min(steps.values()) > 0 and at["lengths"] == {"budget": 64, "block_length": 4, "draft_length": 2}
        plain, three = at["tiers"]
        assert [row["modelled"] for row in at["tiers"]] == [False, True]
        assert plain["tbt_ms"] == at["steps_ms"]["plain"] and plain["speedup"] == 1
        token = (2 * steps["draft"] + steps["retrieval"]) / (1 + 0.5 + 0.5**2)
        round_tokens = 1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4
        assert three["tbt_ms"]["median"] == pytest.approx((4 * token + steps["verify"]) / round_tokens)
        assert three["acceptance"]["tokens_per_round"] == pytest.approx(round_tokens)
        read = bytes_of_a_pass(pair[0], at["context"])
        assert at["floor"]["read_bytes"] == pytest.approx(read, rel=0.01), "one row more than the context"
    assert outcome.out.count(" modelled ") >= 2 and "an assumed acceptance rate: 0.8 for" in outcome.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_shapes_open_lengths_follow_the_assumed_acceptance(shape, tmp_path):
    _, sure = shape(tmp_path / "sure.json", assume_acceptance="1,1", contexts=512)
    _, lost = shape(tmp_path / "lost.json", assume_acceptance="0,0", contexts=512)
    assert sure["contexts"][0]["lengths"]["block_length"] > 4
    assert lost["contexts"][0]["lengths"] == {"budget": 64, "block_length": 0, "draft_length": 0}


def test_two_tiers_of_a_shape_have_no_small_model(shape, tmp_path):
    _, document = shape(tmp_path / "shape.json", tiers="1,2", assume_acceptance="0.8", block_length=2, contexts=256)
    (at,) = document["contexts"]
    assert at["steps_ms"]["draft"] is None and at["lengths"]["draft_length"] == 0 and document["draft"] is None
    steps = {name: at["steps_ms"][name]["median"] for name in ("retrieval", "verify")}
    want = (2 * steps["retrieval"] + steps["verify"]) / (1 + 0.8 + 0.8**2)
    assert at["tiers"][1]["tbt_ms"]["median"] == pytest.approx(want)


def test_a_shapes_cache_streams_where_it_is_to(shape, tmp_path):
    _, document = shape(tmp_path / "shape.json", resident=0, contexts=900, tiers="1", draft="none")
    (at,) = document["contexts"]
    assert at["floor"]["streamed_bytes"] > 0 == at["resident_bytes"]
    assert document["measured_bandwidth"]["link_gb_per_s"] > 0


def test_a_shapes_cache_that_exceeds_host_memory_is_read_from_a_disk(shape, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    save_llama(tmp_path / "deep", num_hidden_layers=8, max_position_embeddings=65_536)
    asked = {"shape": tmp_path / "deep", "contexts": 20_000, "tiers": "1", "draft": "none"}
    refused, _ = shape(tmp_path / "disk.json", **asked, host_memory=0.01)
    enough = re.search(r"--host-memory ([\d.]+) or more", refused.err)
    assert refused.code == 1 and enough, refused
    outcome, document = shape(tmp_path / "disk.json", **asked, host_memory=enough[1])
    assert outcome.code == 0 and "disk" in outcome.out, outcome.err
    (at,), measured = document["contexts"], document["measured_bandwidth"]
    floor = at["floor"]
    assert floor["read_bytes"] > floor["disk_bytes"] > 0 == at["resident_bytes"] == floor["streamed_bytes"]
    bounds = {"memory": floor["read_bytes"], "disk": floor["disk_bytes"]}
    ms = {name: size / measured[f"{name}_gb_per_s"] / 1e6 for name, size in bounds.items()}
    assert floor["ms"] == pytest.approx(max(ms.values())) and floor["bound_by"] == max(ms, key=ms.__getitem__)


def test_requests_that_a_shape_cannot_meet_are_refused(shape, tmp_path, monkeypatch):
    def refused(*more, **changes):
        return shape(tmp_path / "shape.json", *more, **changes)[0]

    check_refusal(refused("--model", "embedded", prompt="A"), 2, "--prompt and --shape")
    check_refusal(refused(model="elsewhere"), 2, "--model and --shape")
    check_refusal(refused(repeat=5), 2, "--repeat and --shape", "only times steps")
    check_refusal(refused(new_tokens=64), 2, "--max-new-tokens and --shape")
    check_refusal(refused(tiers="1,2,3"), 2, "--tiers has 2 and 3")
    check_refusal(refused(gpus=2), 2, "--gpus is 2", "one device")
    check_refusal(refused(assume_acceptance="0.5,2"), 2, "--assume-acceptance", "'0.5,2'", "from 0 to 1")
    check_refusal(refused(assume_acceptance="x"), 2, "--assume-acceptance", "'x'")
    check_refusal(refused(shape="nowhere"), 1, "no model 'nowhere'")
    check_refusal(refused(contexts=2000), 1, "1,024 positions")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    outcome = refused(contexts=1000)
    assert outcome.code == 1 and "1.0 MiB is available" in outcome.err, "before any weight is made"


@pytest.mark.parametrize("form", ["awq", None])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gemma3", "qwen3.5", "qwen3-next"])
def test_steps_of_other_families_are_measured(capfd, tmp_path, family, form):
    if form:
        save_quantised(tmp_path, FORMATS[form], family)
    else:
        save_family(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    asked = ("--contexts", 300, "--tiers", "1,2", "--dtype", "bfloat16", "--json", "-")
    document = json.loads(run_here(capfd, "bench", "--shape", tmp_path, *asked).out)
    (at,) = document["contexts"]
    assert min(times["median"] for times in at["steps_ms"].values() if times) > 0


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "packed-zeros", "fp8"])
def test_steps_of_a_quantised_shape_are_measured_beyond_its_positions(capfd, tmp_path, name):
    save_quantised(tmp_path, FORMATS[name], max_position_embeddings=256)
    (tmp_path / "model.safetensors").unlink()
    asked = ("bench", "--shape", tmp_path, "--contexts", 500, "--tiers", "1,2", "--dtype", "float32", "--json", "-")
    check_refusal(run_here(capfd, *asked), 1, "256 positions")
    document = json.loads(run_here(capfd, *asked, "--rope-scaling", "yarn:4").out)
    (at,) = document["contexts"]
    assert min(times["median"] for times in at["steps_ms"].values() if times) > 0
    assert document["weight_bytes"] < 0.9 * 4 * document["parameters"]
