"""`triforce plan --measured`: what a bench measured takes the place of data sheets, and the output says which terms."""

import json
from pathlib import Path

import pytest
from command import TEXT, check_refusal, run_here
from triforce.cli.app import run

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def bench_file(pair, tmp_path_factory):
    """A bench of the tiny pair, measured now."""
    path = tmp_path_factory.mktemp("measured") / "bench.json"
    arguments = ["bench", "--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--contexts", "300,900"]
    arguments += ["--max-new-tokens", NEW_TOKENS, "--tiers", "1,2,3", "--draft-length", 3, "--block-length", 5]
    arguments += ["--budget", 64, "--dtype", "float32", "--temperature", 0, "--json", path]
    assert run([str(argument) for argument in arguments]) == 0
    return path


@pytest.fixture
def plan(pair, bench_file, capfd):
    def run(*arguments, path=bench_file):
        common = ("--model", pair[0], "--draft", pair[1], "--dtype", "float32", "--context", 900, "--budget", 64)
        return run_here(capfd, "plan", *common, "--measured", path, *arguments)

    return run


@pytest.mark.slow
def test_measured_terms_take_the_place_of_the_cards(plan, bench_file):
    bench = json.loads(bench_file.read_text())
    outcome = plan("--json", "-")
    assert outcome.code == 0, outcome
    document = json.loads(outcome.out)
    measured, rows = document["measured"], bench["contexts"][-1]["tiers"]
    assert document["gpu"]["name"] == bench["machine"]["device_name"] and document["gpu"]["tflops"] is None
    assert document["gpu"]["memory_bytes"] == pytest.approx(bench["machine"]["memory_bytes"])
    assert measured["file"] == str(bench_file) and measured["bandwidth"] == bench["measured_bandwidth"]
    accepted = rows[-1]["acceptance"]
    assert measured["measured_acceptance"]["context"] == 900
    assert document["assumed"]["acceptance"] == accepted["retrieval_per_token"]
    assert document["assumed"]["draft_acceptance"] == accepted["draft_per_token"]
    steps = [
        run["time_s"]["draft"] / run["passes"]["draft"] * 1e3
        for at in bench["contexts"]
        for row in at["tiers"]
        for run in row["runs"]
        if run["passes"]["draft"]
    ]
    assert min(steps) <= measured["draft_step_ms"] <= max(steps)
    # Two kinds of passes (full cache, retrieval cache) at two contexts with 2 and 3 tiers, one kind with 1.
    assert measured["pass_fit"]["passes"] == 2 * (1 + 2 + 2)


@pytest.mark.slow
def test_what_is_modelled_is_what_was_measured_as_far_as_the_fit_is_good(plan, bench_file):
    bench = json.loads(bench_file.read_text())
    document = json.loads(plan("--json", "-", "--draft-length", 3, "--block-length", 5).out)
    worst = document["measured"]["pass_fit"]["worst"]
    plain = sorted(bench["contexts"][-1]["tiers"][0]["runs"], key=lambda run: run["tbt_ms"]["mean"])[1]
    want = plain["time_s"]["verify"] / plain["passes"]["verify"] * 1e3
    assert abs(document["modelled"][0]["verify_ms"] / want - 1) <= worst + 0.03  # by up to 24 tokens more in the cache
    assert document["modelled"][2]["draft_ms"] == document["measured"]["draft_step_ms"]


@pytest.mark.slow
def test_a_disk_that_was_measured_is_planned_with(plan, bench_file):
    bench = json.loads(bench_file.read_text())
    bench["measured_bandwidth"]["disk_gb_per_s"] = 1.5
    with_disk = bench_file.with_name("with-disk.json")
    with_disk.write_text(json.dumps(bench))
    for more, speed, assumed in (((), 1.5, False), (("--disk-gbps", 3), 3.0, False)):
        disk = json.loads(plan("--measured", with_disk, "--json", "-", *more).out)["disk"]
        assert disk["gb_per_s"] == speed and disk["assumed"] is assumed
    assert json.loads(plan("--json", "-").out)["disk"]["assumed"]


@pytest.mark.slow
def test_the_output_says_which_terms_are_measured_and_where(plan, bench_file):
    outcome = plan()
    assert outcome.code == 0 and outcome.err == ""
    assert all(len(line) <= 80 or "/" in line for line in outcome.out.splitlines()), "but for the model's directory"
    for words in (
        "Measured on ", "(bench.json)", "link not measured: that of rtx4090 or --link-gbps is used",
        "fitted to 10 measured kinds",
        "acceptance at 900 tokens", "Times are modelled, from the measured passes above", "(measured) of tokens",
    ):  # fmt: skip
        assert words in " ".join(outcome.out.split())
    assert "0.5 (assumed) of tokens" in " ".join(plan("--assume-acceptance", 0.5).out.split())
    document = json.loads(plan("--json", "-", "--assume-acceptance", 0.5, "--gpu-memory", 3, "--link-gbps", 7).out)
    assert document["assumed"]["acceptance"] == 0.5
    assert document["gpu"]["memory_bytes"] == 3 * 2**30 and document["gpu"]["link_gb_per_s"] == 7


@pytest.mark.slow
def test_every_term_is_documented(plan):
    text = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8").split("## JSON")[1]
    documented = {word.strip("`[]{}| ") for word in text.replace("{", ",").replace("`", ",").split(",")}
    measured = json.loads(plan("--json", "-").out)["measured"]
    names = set(measured) | {name for value in measured.values() if isinstance(value, dict) for name in value}
    assert names <= documented, names - documented


def changed(bench_file, path, change):
    document = json.loads(bench_file.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.slow
def test_files_that_are_no_use_are_refused(plan, bench_file, tmp_path):
    check_refusal(plan(path=tmp_path / "nowhere.json"), 1, "nowhere.json does not exist", "triforce bench --json")
    (tmp_path / "text").write_text("hello")
    check_refusal(plan(path=tmp_path / "text"), 1, "text cannot be read: it is not JSON")
    check_refusal(plan(path=tmp_path), 1, "cannot be read: Is a directory")
    for content, what in (("[1]", "something else"), ('{"kind": "triforce compare"}', "triforce compare")):
        (tmp_path / "other.json").write_text(content)
        check_refusal(plan(path=tmp_path / "other.json"), 1, f"JSON of {what}", "triforce bench --json")

    def with_change(change):
        return plan(path=changed(bench_file, tmp_path / "changed.json", change))

    check_refusal(with_change(lambda d: d["contexts"].clear()), 1, "holds no run")
    check_refusal(with_change(lambda d: d.pop("machine")), 1, "lacks machine", "this version")
    check_refusal(with_change(lambda d: d.update(parameters=10**9)), 2, "a different model", "1,000.0 M")
    check_refusal(with_change(lambda d: d["machine"].update(world_size=2)), 2, "--gpus 2")
    check_refusal(with_change(lambda d: d.update(dtype="bfloat16")), 2, "--dtype bfloat16")

    def plain_only(document):
        for at in document["contexts"]:
            del at["tiers"][1:]

    check_refusal(with_change(plain_only), 2, "no run with three tiers", "--tiers 2")

    def undrafted(document):
        for found in (one for at in document["contexts"] for row in at["tiers"] for one in row["runs"]):
            found["passes"]["draft"] = 0

    check_refusal(with_change(undrafted), 2, "three tiers drafted nothing", "--block-length")

    def streaming(document):
        plain_only(document)
        for at in document["contexts"]:
            for measured in at["tiers"][0]["runs"]:
                measured["link"]["bytes_streamed"] = 10**6

    check_refusal(with_change(streaming), 1, "every pass waited for the link", "--tiers 1,3")


@pytest.mark.slow
def test_hardware_is_given_once(plan):
    check_refusal(plan("--gpu", "h100"), 2, "--gpu and --measured")
    check_refusal(plan("--memory-gbps", 900), 2, "--memory-gbps and --measured")
