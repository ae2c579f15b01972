"""Contract tests are those that a change of what is inside must leave alone: `tests/README.md` lists them, and maps
each command, option, endpoint and public name to one. Here it is held to that.

`python tests/test_contracts.py [ROOT]` counts the test files that import what is not public, by folder.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__" and len(sys.argv) > 1:
    ROOT = Path(sys.argv[1]).resolve()
TESTS = ROOT / "tests"

PACKAGES = {"triforce.offload": "offload", "triforce.tp": "tp", "triforce.kernels": "kernels"}
"""The packages whose `__all__` is public, and their folders."""

EXCEPTIONS = {
    **dict.fromkeys(
        (
            *("cli/bench/conftest.py", "cli/chat/test_screen.py"),
            *("support/simulator/cuda_simulator.py", "support/simulator/simulated_operations.py"),
            "support/triton_runs.py",
        ),
        "an attribute with an underscore, of somebody else's object or the tests' own",
    ),
    **dict.fromkeys(
        (
            *("offload/contexts/test_packed.py", "offload/contexts/test_ranks_share.py"),
            *("offload/contexts/test_restored.py", "support/contexts/decoded.py", "support/contexts/held_kv.py"),
        ),
        "keys and values are compared bit by bit where an engine holds them",
    ),
    **dict.fromkeys(
        ("offload/caches/test_below_memory.py", "offload/batch/test_joint.py", "support/joint_distribution.py"),
        "small limits, and draws that can be enumerated, are handed in by what is inside",
    ),
    **dict.fromkeys(
        ("support/contexts/tiny_contexts.py", "support/contexts/corruptions.py"),
        "one engine stands for many processes: what it keeps is taken from it",
    ),
    "support/simulator/simulated_gpu.py": "an engine is handed the link and the waits of a simulated GPU",
    "support/contexts/hooked_disk.py": "power cuts are simulated by the disk that a store writes through",
}
"""Files that contract tests are made of although they use what is not public, and why still."""

OURS = re.compile(r"\btriforce(?:\.(?!py\b)[A-Za-z_]\w*)+")
FROM = re.compile(r"\bfrom\s+(triforce[\w.]*)\s+import\s+([\w, ]+)")


# What is public


@functools.cache
def public() -> dict[str, set[str]]:
    """The public names of each module that has any: what packages export, and the command as a process and as a
    function (`run`), by which tests save the start of an interpreter."""
    names = {module: set(exported(ROOT / folder / "__init__.py")) for module, folder in PACKAGES.items()}
    for entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values():
        module, _, name = entry.partition(":")
        names.setdefault(module, set()).update((name, "run"))
    return names


def exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


def is_public(path: str) -> bool:
    """Whether a dotted path is a package of ours, a public name, or a part of one."""
    if path in public() or path == "triforce.cli":
        return True
    module, _, name = path.rpartition(".")
    return name in public().get(module, ()) or (not hidden(name) and module.count(".") > 1 and is_public(module))


# What a file uses


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of nodes that are expressions of a text alone."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def internals(path: Path) -> Iterator[str]:
    """What a file names that is not public: imports, attributes with an underscore, and modules in texts, which are
    patched or run by another process."""
    tree = tree_of(path)
    described = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("triforce.") and not is_public(one.name))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "triforce":
            yield from unknown(node.module, [one.name for one in node.names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            text = node.value
            for module, names in FROM.findall(text):
                yield from unknown(module, [name.split(" as ")[0].strip() for name in names.split(",")])
            yield from (one for one in OURS.findall(FROM.sub("", text)) if not is_public(one))
        elif isinstance(node, ast.Attribute) and hidden(node.attr) and not own(node.value):
            yield f"{ast.unparse(node.value)}.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ACCESSORS:
            yield from (ast.unparse(node) for one in node.args[1:2] if hidden(getattr(one, "value", None)))


ACCESSORS = ("setattr", "getattr", "delattr", "setitem")


def unknown(module: str, names: list[str]) -> Iterator[str]:
    yield from (f"{module}.{name}" for name in names if name and not is_public(f"{module}.{name}"))


def hidden(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def own(node: ast.expr) -> bool:
    """Whether it is the file's own object, or Python's."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "os", "sys")


@functools.cache
def support() -> dict[str, Path]:
    """The modules that tests share, by the name that they are imported by."""
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    return {path.stem: path for one in paths if one.startswith("tests") for path in sorted((ROOT / one).glob("*.py"))}


@functools.cache
def supporting(path: Path) -> list[Path]:
    """The modules of `tests/support` that a file imports itself."""
    names: list[str | None] = []
    for node in ast.walk(tree_of(path)):
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [support()[name] for name in names if name in support()]


@functools.cache
def parts(path: Path) -> frozenset[Path]:
    """A file, the modules of `tests/support` that it imports, itself or through others, and the `conftest.py` of its
    folder and those above."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        waiting += supporting(one)
        if one.name != "conftest.py" and TESTS / "support" not in one.parents:
            folders = [folder for folder in one.parents if folder == TESTS or TESTS in folder.parents]
            waiting += [folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()]
    return frozenset(found)


def files_of_tests() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


# What the page says


@dataclass(frozen=True)
class Page:
    files: dict[str, str]
    """The kind of each test file."""
    mapped: dict[str, dict[str, str]]
    """By section, and by what is covered: the cell with its tests."""


@functools.cache
def page() -> Page:
    """The tables of `tests/README.md`: files and their kinds, and under each heading of the map what covers what."""
    files: dict[str, str] = {}
    mapped: dict[str, dict[str, str]] = defaultdict(dict)
    heading = ""
    for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| `") else []
        if len(cells) == 3 and cells[1] in ("contract", "internal"):
            files[cells[0].strip("`").removeprefix("tests/")] = cells[1]
        elif len(cells) == 3:  # an option, and the commands that have it
            for command in cells[1].split(", "):
                key = f"{command} {cells[0].strip('`')}"
                assert key not in mapped[heading], f"{key} is there twice"
                mapped[heading][key] = cells[2]
        elif cells:
            for key in re.findall(r"`([^`]+)`", cells[0]):
                assert key not in mapped[heading], f"{key} is there twice"
                mapped[heading][key] = cells[1]
    return Page(files, dict(mapped))


def named_in(cell: str) -> list[tuple[str, str]]:
    """The tests that a cell names: files and functions."""
    return re.findall(r"`tests/([^`]+)::(\w+)`", cell)


def check_mapped(section: str, there: set[str]) -> None:
    mapped = page().mapped[section]
    assert there, f"nothing was found that {section!r} maps"
    missing = sorted(there - mapped.keys())
    assert not missing, f"no contract test is named for: {', '.join(missing)}"
    gone = sorted(mapped.keys() - there)
    assert not gone, f"the page maps what is not there: {', '.join(gone)}"


# The tests


def test_every_test_file_is_listed_once_as_contract_or_internal():
    there = {name_of(path) for path in files_of_tests()}
    listed = page().files.keys()
    assert not there - listed, f"not listed in tests/README.md: {', '.join(sorted(there - listed))}"
    assert not listed - there, f"listed, and not there: {', '.join(sorted(listed - there))}"


def test_contract_tests_use_public_names_only():
    used_by = [parts(TESTS / name) for name, kind in page().files.items() if kind == "contract"]
    found = {name_of(path): set(internals(path)) for path in set().union(*used_by)}
    wrong = [f"{name}: {', '.join(sorted(used))}" for name, used in found.items() if used and name not in EXCEPTIONS]
    assert not wrong, "contract tests use what is not public:\n" + "\n".join(sorted(wrong))
    idle = sorted(name for name in EXCEPTIONS if not found.get(name))
    assert not idle, f"these need no exception any more: {', '.join(idle)}"


def test_every_test_that_is_mapped_exists_and_is_a_contract_test():
    for section, mapped in page().mapped.items():
        for key, cell in mapped.items():
            assert named_in(cell), f"{section}: {key} has no test"
            for file, test in named_in(cell):
                assert page().files.get(file) == "contract", f"{key}: {file} is no contract test"
                names = {node.name for node in tree_of(TESTS / file).body if isinstance(node, ast.FunctionDef)}
                assert test in names, f"{key}: {file} has no {test}"


def test_every_command_and_option_is_mapped(capfd, monkeypatch):
    from command import run_here

    monkeypatch.setenv("COLUMNS", "300")
    commands, options = set[str](), set[str]()
    waiting = [()]
    while waiting:
        command = waiting.pop()
        shown = run_here(capfd, *command, "--help").out
        inner, own = listed_in(shown)
        waiting += [(*command, name) for name in inner]
        commands.add(" ".join(("triforce", *command)))
        options |= {f"{' '.join(command) or 'triforce'} {option}" for option in own if option != "--help"}
    assert {"triforce generate", "triforce contexts list"} <= commands, "is the help read as it is written?"
    assert {"triforce --version", "generate --model"} <= options, "is the help read as it is written?"
    check_mapped("Commands", commands)
    check_mapped("Options", options)


def listed_in(shown: str) -> tuple[set[str], set[str]]:
    """The commands and the long names of options in a help, whose panels are headed `─ Commands ─`, `─ Options ─` or
    another name of options. What is listed stands at the beginning of its line, behind at most an asterisk."""
    commands, options = set[str](), set[str]()
    panel = ""
    for line in shown.splitlines():
        if line.startswith("╭"):
            panel = line.strip("╭╮─ ")
        found = re.match(r"│ (?:\*|) {0,5}(?=[\w-])(\S+(?: +-\S+)*)", line)
        if found and panel == "Commands":
            commands.add(found[1].split()[0])
        elif found and panel != "Arguments":
            options |= {word.rstrip(",") for word in found[1].split() if word.startswith("--")}
    return commands, options


def test_every_endpoint_is_mapped(pair, tmp_path):
    check_mapped("HTTP", routes_of_a_server(pair, tmp_path / "routes"))


def routes_of_a_server(pair: tuple[Path, Path], noted: Path) -> set[str]:
    """Methods and paths of the routes of `triforce serve`. A fork serves, and ends where uvicorn would begin."""
    from command import Fork, triforce

    target, draft = pair
    command = triforce("serve", "--model", target, "--draft", draft, "--device", "cpu", "--port", 0)

    def serve() -> None:
        import uvicorn
        from starlette.routing import Route

        found: list[str] = []
        make = Route.__init__

        def note(route, path, *arguments, **named):
            make(route, path, *arguments, **named)
            found.extend(f"{method} {path}" for method in route.methods - {"HEAD"})

        def end(*arguments, **named):
            noted.write_text(json.dumps(found))
            os._exit(0)

        setattr(Route, "__init__", note)  # noqa: B010 (in the fork alone)
        setattr(uvicorn.Config, "__init__", end)  # noqa: B010
        command()

    with open(os.devnull, "r+b") as nothing, open(noted.with_suffix(".log"), "w+b") as log:
        fork = Fork(serve, (nothing.fileno(), log.fileno(), log.fileno()), os.environ)
        try:
            fork.wait(60)
        finally:
            fork.kill()
        log.seek(0)
        assert noted.exists(), log.read().decode()
    return set(json.loads(noted.read_text()))


def test_every_public_name_of_python_is_mapped():
    import triforce.kernels
    import triforce.offload
    import triforce.tp
    from triforce.offload import Engine

    methods = {f"Engine.{name}" for name, _ in inspect.getmembers(Engine, callable) if not name.startswith("_")}
    check_mapped("Engine", methods)
    check_mapped("Names of triforce.offload and triforce.tp", {*triforce.offload.__all__, *triforce.tp.__all__})
    check_mapped("Names of triforce.kernels", {*triforce.kernels.__all__})


def test_public_names_are_those_that_the_page_for_users_lists():
    shown = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for module, names in public().items():
        row = next((line for line in shown.splitlines() if line.startswith(f"| `{module}` |")), "")
        missing = names - set(re.findall(r"`(\w+)`", row))
        assert module not in PACKAGES or not missing, f"docs/usage.md does not list of {module}: {sorted(missing)}"


def counted() -> str:
    """How many test files there are, and how many import what is not public: themselves, or through what they share."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files_of_tests():
        folder = "/".join(path.relative_to(TESTS).parts[:-1][:1]) or "."
        itself = imports_internals(path)
        kinds = {"files": True, "import internals": itself}
        kinds["also through support"] = itself or any(imports_internals(part) for part in parts(path))
        for group in (folder, "all"):
            rows[group].update(kind for kind, holds in kinds.items() if holds)
    columns = ("files", "import internals", "also through support")
    lines = [f"{'tests/':12}" + "".join(f"{column:>22}" for column in columns)]
    lines += [
        f"{folder:12}" + "".join(f"{row[column]:>22}" for column in columns) for folder, row in sorted(rows.items())
    ]
    return "\n".join(lines)


@functools.cache
def imports_internals(path: Path) -> bool:
    return any(name.startswith("triforce.") for name in internals(path))


if __name__ == "__main__":
    print(counted())
