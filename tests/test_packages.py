"""The house rules: imports point downwards and never in a circle, and a wheel is complete."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "triforce_cli": "triforce.cli",
    "offload": "triforce.offload",
    "tp": "triforce.tp",
    "kernels": "triforce.kernels",
}
"""The package of each folder; a folder may import itself and those after it."""


def files(folder: Path) -> list[Path]:
    """What a folder holds, without what was built there."""
    built = ("__pycache__", "build")
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".so" and not any(part in built for part in path.parts)
    )


def modules() -> dict[str, Path]:
    """The path of each module by its name, as it is when installed; that of a package is its `__init__.py`."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in files(ROOT / folder):
            if path.suffix == ".py":
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                name = ".".join((package, *parts))
                found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def statements(tree: ast.AST, in_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module; without `in_functions` only those that run when it is imported or types are checked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.expr):
            continue  # holds no statement
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(node, in_functions)


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path, in_functions: bool) -> list[ast.Import | ast.ImportFrom]:
    """Those of `statements`, once for each file."""
    return [*statements(parsed(path), in_functions)]


def imported(name: str, in_functions: bool) -> set[str]:
    """The modules of ours that the module `name` imports, by their own statements, relative and absolute."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in imports_of(path, in_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        # `from package import name` imports a module of that name, or else what the package itself defines.
        found |= {f"{source}.{n.name}" if f"{source}.{n.name}" in MODULES else source for n in node.names}
    return {module for module in found if module.split(".")[0] == "triforce"}


def folder_of(module: str) -> str:
    return next(folder for folder, package in FOLDERS.items() if f"{module}.".startswith(f"{package}."))


def test_imports_are_found_however_they_are_written():
    """That the tests below see what they are about."""
    assert "triforce.tp.errors" in imported("triforce.tp.weights.hub", False)
    assert "triforce.tp.model.config" in imported("triforce.tp.weights.registry", False)  # for types only
    assert "triforce.tp.model.config" not in imported("triforce.tp.weights.hub", False)  # in a function
    assert "triforce.tp.model.config" in imported("triforce.tp.weights.hub", True)
    assert "triforce.kernels.attention" in imported("triforce.offload.caches.full", False)


def test_every_import_names_a_module_that_exists():
    wrong = {name: missing for name in MODULES if (missing := imported(name, True) - MODULES.keys() - {"triforce"})}
    assert not wrong, wrong


def test_imports_point_downwards():
    order = list(FOLDERS)
    wrong = [
        f"{name} imports {module}"
        for name in MODULES
        for module in imported(name, True)
        if order.index(folder_of(module)) < order.index(folder_of(name))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_imports_go_in_a_circle(folder):
    """Statements outside functions, those for type checking included."""
    graph = {name: imported(name, False) - {name} for name in MODULES if folder_of(name) == folder}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_holds_imports_one_way(package):
    """Each of its sub-packages taken as one, and each module of its own for itself: whoever reads a package from below
    meets nothing that is explained further up. In functions imports may go where they like."""
    inside = {
        name: name.removeprefix(f"{package}.").split(".")[0] for name in MODULES if name.startswith(f"{package}.")
    }
    graph: dict[str, set[str]] = {}
    because: dict[tuple[str, str], str] = {}
    for name, room in inside.items():
        for module in imported(name, False) & inside.keys():
            if inside[module] != room:
                graph.setdefault(room, set()).add(inside[module])
                because.setdefault((room, inside[module]), f"{name} imports {module}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("\n".join(because[pair] for pair in pairwise(reversed(error.args[1]))))


def imported_by(nodes: list[ast.AST], ours: set[str]) -> dict[str, str]:
    """The modules of ours, and what is imported from them, by the names that they have in a file of tests."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name: one.name for one in node.names if one.name in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"triforce", *ours}:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def is_ours(target: ast.expr, names: dict[str, str], ours: set[str], loops: dict[str, ast.expr]) -> bool:
    """Whether an expression is a module of ours, one of another package as such a module has it (`module.os`), or text
    that names one."""
    if isinstance(target, ast.Constant):
        return isinstance(target.value, str) and target.value.startswith("triforce.")
    if isinstance(target, ast.JoinedStr):
        return bool(target.values) and is_ours(target.values[0], names, ours, loops)
    if isinstance(target, ast.Name):
        if target.id in loops:
            return any(
                is_ours(part, names, ours, {}) for part in ast.walk(loops[target.id]) if isinstance(part, ast.Name)
            )
        return names.get(target.id) in ours
    if isinstance(target, ast.Attribute):  # a class of a module is not the module
        return is_ours(target.value, names, ours, loops) and not target.attr[:1].isupper()
    return False


def patched_modules(path: Path, ours: set[str]) -> list[str]:
    """The lines of a file that set a name of a module of ours, or of what such a module has imported: by `setattr` or
    `delattr`, of pytest too, by `patch` or `patch.object`, or plainly."""
    nodes = [*ast.walk(parsed(path))]
    names, loops = imported_by(nodes, ours), {}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            loops |= {one.id: node.iter for one in ast.walk(node.target) if isinstance(one, ast.Name)}
    found = []
    for node in nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("setattr", "delattr", "patch") or (
                called == "object" and ast.unparse(node.func).endswith("patch.object")
            ):
                targets = [node.args[0]]
        elif isinstance(node, ast.Assign):
            targets = [one.value for one in node.targets if isinstance(one, ast.Attribute)]
        if any(is_ours(target, names, ours, loops) for target in targets):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")  # pyright: ignore
    return found


STILL_PATCH = {
    # It times functions where they are called from: no argument could carry its clock into a kernel.
    "examples/measure/cpu_results.py",
}
"""Files that set names of modules of ours, until they are handed what they change."""


def test_tests_and_examples_are_handed_what_they_change_and_patch_no_module():
    """What moves in a redesign is then found where it is used, and not by its name."""
    places = [path for folder in ("tests", "examples") for path in files(ROOT / folder) if path.suffix == ".py"]
    helpers = {path.stem for path in places if not path.stem.startswith(("test_", "conftest"))}
    found = {
        str(path.relative_to(ROOT)): lines for path in places if (lines := patched_modules(path, {*MODULES, *helpers}))
    }
    wrong = [line for path, lines in found.items() if path not in STILL_PATCH for line in lines]
    assert not wrong, "\n".join(wrong)
    assert found.keys() >= STILL_PATCH, (
        f"these patch nothing any more, take them out of the list: {STILL_PATCH - found.keys()}"
    )


@pytest.mark.slow
def test_a_wheel_holds_every_module_the_data_and_the_library(tmp_path):
    """Built in a copy of the tree, so that nothing of an earlier build gets in; the library is compiled without
    optimisation, which would take most of the time."""
    pytest.importorskip("setuptools", "77", reason="the wheel is built by setuptools 77 or later")
    source, out = tmp_path / "source", tmp_path / "wheel"
    for path in (ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")):
        source.mkdir(exist_ok=True)
        shutil.copy(path, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment, compiler = dict(os.environ), shutil.which("cc") or shutil.which("gcc")
    if compiler:
        quick = tmp_path / "quick-cc"
        quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        quick.chmod(0o755)
        environment["CC"] = str(quick)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
    kinds = (".py", ".json", ".safetensors", ".md", ".html", ".css", ".js")
    wanted = {
        f"{FOLDERS[folder].replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder in FOLDERS
        for path in files(ROOT / folder)
        if path.suffix in kinds
    }
    assert {name for name in wanted if "/embedded/" in name and name.endswith(".safetensors")}
    assert not wanted - held, f"missing: {wanted - held}"
    alien = {name for name in held if not name.startswith(("triforce/", "triforce_cli-"))}
    assert not alien, f"installed outside of the package: {alien}"
    if compiler:
        libraries = {f"triforce/kernels/cpu/_compiled{suffix}" for suffix in EXTENSION_SUFFIXES}
        assert libraries & held, "the compiled kernels are missing"
