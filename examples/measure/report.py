"""What all measuring scripts share: the option `--json`, its document, and tables that name the machine.

Tables go to stdout, or to stderr where `--json -` takes stdout. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from triforce.cli import measurement
from triforce.cli.terminal.output import JsonFile, result_console
from triforce.cli.terminal.tables import make_table, print_lines
from triforce.tp.devices import device_name


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`. Args: `doc` is the script's docstring; its first paragraph describes the script."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    nothing = JsonFile(None, None, "--json")
    parser.add_argument("--json", type=_file, default=nothing, metavar="PATH", help="where figures go; - is stdout")
    return parser


def _file(path: str) -> JsonFile:
    if path != "-" and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{path} is a folder, or is in none")
    return JsonFile(Path(path), None, "--json")


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine as the JSON of `triforce bench` describes it."""
    return measurement.machine(device, device_name(torch.device(device)), 1, torch.get_num_threads())


def write_json(given: argparse.Namespace, figures: dict[str, Any], whole: bool = True) -> None:
    """Writes the figures of a script, with its name, the date, the machine and the options, to where `--json` says.

    Args: `whole` is whether these are all figures; before that, a file gets what there is, and stdout gets nothing.
    """
    options = {name: value for name, value in vars(given).items() if name != "json"}
    document = {
        "script": Path(sys.argv[0]).stem,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "options": json.loads(json.dumps(options, default=str)),
    }
    if whole or not given.json.on_stdout:
        given.json.write(document | figures)


def print_table(
    given: argparse.Namespace,
    title: str,
    rows: Sequence[dict[str, Any]],
    columns: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> None:
    """Prints a table under a title that names the machine.

    Args:
        rows: by the titles of columns.
        columns: the titles to show; without them, all of the first row.
        notes: lines below the table.
    """
    titles = list(columns or rows[0])
    left = [name for name in titles if any(isinstance(row.get(name), str) for row in rows)]
    console = result_console(given.json)
    print_lines(console, [f"\n{title}; {measurement.machine_in_words(machine())}"])
    console.print(make_table(titles, [[as_text(row.get(name)) for name in titles] for row in rows], left))
    print_lines(console, notes)


def as_text(value: Any) -> str:
    """A value as tables show it."""
    if value is None or isinstance(value, bool):
        return "-" if value is None else "yes" if value else "no"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def figure_rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure, for `print_table`."""
    return [{"figure": name, "value": value} for name, value in figures.items()]
