"""docs/benchmarks.md is what its script makes of the measurements beside it."""

import json
import shutil
import sys
from pathlib import Path

import benchmark_report
import pytest
from command import TEXT, fork_interpreters
from triforce.cli.app import run

ROOT = Path(__file__).parents[3]

DOCS = ROOT / "docs"


def test_the_committed_page_is_made_of_the_committed_measurements():
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert text == benchmark_report.page(DOCS / "benchmarks"), "run python examples/measure/benchmark_report.py"


@pytest.fixture(scope="module")
def measured_once(pair, tmp_path_factory):
    """A folder with a small bench, its picture, and a small comparison, measured now."""
    folder = tmp_path_factory.mktemp("docs") / "benchmarks"
    folder.mkdir()
    common = ("--model", pair[0], "--draft", pair[1], "--prompt", TEXT, "--dtype", "float32", "--temperature", 0)
    bench = ("--contexts", "200,300", "--max-new-tokens", 9, "--repeat", 2, "--plot", folder / "a.png")
    compare = ("--max-new-tokens", 8, "--repeat", 1)
    compare += ("--baseline", "autoregressive", "--baseline", "transformers-assisted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        fork_interpreters(patch)
        for arguments in (("bench", *common, *bench, "--json", folder / "a.json"),
                          ("compare", *common, *compare, "--json", folder / "b.json")):  # fmt: skip
            assert run([str(argument) for argument in arguments]) == 0
    return folder


@pytest.fixture
def measured(measured_once, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(measured_once, tmp_path / "benchmarks"))


@pytest.mark.slow
def test_every_measurement_is_a_section_with_its_command_machine_and_figures(measured):
    page = benchmark_report.page(measured)
    bench, comparison = (json.loads((measured / name).read_text()) for name in ("a.json", "b.json"))
    assert page.index("## a\n") < page.index("## b\n")
    for document in (bench, comparison):
        assert f"```bash\n{document['command']}\n```" in page
        assert document["command"].startswith(f"triforce {document['kind'].split()[1]} --model ")
        for words in (document["date"], document["machine"]["device_name"], f"PyTorch {document['machine']['torch']}"):
            assert words in page
    for at in bench["contexts"]:
        for row in at["tiers"]:
            (line,) = [line for line in page.splitlines() if line.startswith(f"| {at['context']} | {row['tiers']} |")]
            assert f"| {row['tbt_ms']['median']:.1f} (" in line and f"| {at['floor']['ms']:.1f} |" in line
    for system in comparison["systems"]:
        assert f"| {system['name']} | {system['ttft_s']:.2f} | {system['tbt_ms']:.1f} |" in page
        assert f"* {system['name']}: {system['ran']}" in page
    assert page.count("the same tokens |") == 2
    assert "![time between tokens against context](benchmarks/a.png)" in page
    (measured / "a.png").unlink()
    assert "![" not in benchmark_report.page(measured)


@pytest.mark.slow
def test_times_of_a_shape_are_called_modelled(measured, pair):
    options = ["--shape", pair[0], "--draft", pair[1], "--contexts", 256, "--json", measured / "c.json"]
    assert run(["bench", *map(str, options)]) == 0
    page = benchmark_report.page(measured).split("## c\n")[1]
    plain, three = (line for line in page.splitlines() if line.startswith("| 256 |"))
    assert ", modelled |" in three and "modelled" not in plain
    assert "with random weights, and zeros for keys and values" in page and "an assumed acceptance rate: 0.9" in page


@pytest.mark.slow
def test_a_baseline_that_failed_is_called_so_and_other_files_are_refused(measured):
    path = measured / "b.json"
    document = json.loads(path.read_text())
    document["systems"][1] = {"name": "autoregressive", "failure": "out of memory"}
    path.write_text(json.dumps(document))
    assert "| autoregressive | - | - | - | - | - | out of memory |" in benchmark_report.page(measured)
    (measured / "c.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"c\.json is neither"):
        benchmark_report.page(measured)


@pytest.mark.slow
def test_sequences_that_were_decoded_together_are_called_so(measured):
    path = measured / "b.json"
    document = json.loads(path.read_text())
    found = {"sequence": 2, "index": 5, "token": 1, "triforce_token": 2, "logit": None, "triforce_logit": None}
    document["systems"][1] |= {"first_difference": found, "differences": [found, found | {"sequence": 3}]}
    path.write_text(json.dumps(document | {"batch": 4}))
    page = benchmark_report.page(measured)
    assert "4 sequences together over one text" in page and "Tokens/s of all sequences" in page
    assert "| 2 of 4 sequences differ, one from token 5 on |" in page


@pytest.mark.slow
def test_the_script_writes_the_page(measured, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark_report.py", "--docs", str(measured.parent)])
    benchmark_report.main()
    assert (measured.parent / "benchmarks.md").read_text() == benchmark_report.page(measured)
    shutil.rmtree(measured)
    assert "Nothing is there yet." in benchmark_report.page(measured)


@pytest.mark.slow
def test_every_key_of_the_json_is_documented(measured):
    text = (DOCS / "bench.md").read_text(encoding="utf-8").split("## JSON")[1]
    documented = {word.strip("`[]{}| ") for word in text.replace("{", ",").replace("`", ",").split(",")}

    def keys(value, within=""):
        for name, inner in value.items():
            yield name
            if isinstance(inner, list) and inner and isinstance(inner[0], dict):
                inner = inner[0]
            if isinstance(inner, dict) and within != "runs" and name != "acceptance":
                yield from keys(inner, name)

    found = set(keys(json.loads((measured / "a.json").read_text())))
    assert found <= documented, found - documented
