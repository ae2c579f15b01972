"""The measuring scripts have one shape: options, JSON and tables come from `examples/measure/report.py`."""

import json
import re
from pathlib import Path

import pytest
from report import make_parser, print_table, write_json

EXAMPLES = Path(__file__).parents[3] / "examples"

OF_ANOTHER_SHAPE = {
    "benchmark_report": "it writes a page",
    "live_svg": "it draws a picture",
    "gpu_results": "triforce need not be installed where it runs",
}


def measuring_scripts() -> list[Path]:
    paths = [*(EXAMPLES / "measure").rglob("*.py"), EXAMPLES / "train" / "pair_figures.py"]
    scripts = [path for path in paths if "__main__" in path.read_text(encoding="utf-8")]
    return sorted(path for path in scripts if path.stem not in OF_ANOTHER_SHAPE)


def test_every_measuring_script_takes_options_and_writes_results_as_the_others():
    scripts = measuring_scripts()
    assert len(scripts) > 10
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert "make_parser(__doc__)" in text and "write_json(" in text, path
        assert not re.search(r"\bprint\(", text), f"{path}: progress goes to stderr, results into a table"


def parsed(*arguments: str):
    parser = make_parser("Measures a thing,\nand another.\n\nMore of it.")
    assert parser.description == "Measures a thing,\nand another."
    parser.add_argument("--book", type=Path, default=Path("emma.txt"))
    return parser.parse_args(arguments)


ROWS = [{"draft": "lookup", "ms": 1234.5, "same": True}, {"draft": "none", "ms": None, "same": False}]


def test_a_table_names_the_machine_and_a_file_gets_each_part_with_the_options(tmp_path, capsys):
    given = parsed("--json", str(tmp_path / "found.json"))
    print_table(given, "rounds", ROWS, notes=["a [note]"])
    write_json(given, {"rounds": ROWS[:1]}, whole=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rounds"] == ROWS[:1] and found["options"] == {"book": "emma.txt"}
    assert found["machine"].keys() >= {"device_name", "cores", "memory_bytes"} and found["torch"] and found["date"]
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[1].startswith("rounds; ") and found["machine"]["device_name"] in lines[1]
    cells = [line.split() for line in lines[2:5]]
    assert cells == [["draft", "ms", "same"], ["lookup", "1,234.500", "yes"], ["none", "-", "no"]]
    assert lines[5] == "a [note]" and not shown.err


def test_stdout_is_one_document_where_it_gets_the_json(capsys):
    given = parsed("--json", "-")
    print_table(given, "rounds", ROWS, ["ms"])
    write_json(given, {"rounds": ROWS[:1]}, whole=False)
    write_json(given, {"rounds": ROWS})
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rounds"] == ROWS
    assert "1,234.500" in shown.err and "lookup" not in shown.err


def test_without_json_there_is_the_table_alone_and_a_place_that_is_none_is_refused(tmp_path, capsys):
    write_json(parsed(), {"rounds": ROWS})
    assert capsys.readouterr() == ("", "")
    for place in (tmp_path, tmp_path / "nowhere" / "found.json"):
        with pytest.raises(SystemExit):
            parsed("--json", str(place))
        assert str(place) in capsys.readouterr().err
