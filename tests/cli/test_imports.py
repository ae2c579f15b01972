"""No module of the command line imports itself through others, not even for type checking."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from triforce.cli import app

ROOT = Path(app.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in ROOT.rglob("*.py")}


def imports(module, path):
    """The modules within the command line that `module` imports, at any place in it."""
    package = module[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= len(package) + 1:
            continue
        base = package[: len(package) + 1 - node.level] + tuple((node.module or "").split(".") if node.module else ())
        for alias in node.names:
            found = next((name for name in ((*base, alias.name), base) if name in MODULES), None)
            if found:
                yield found


def test_no_module_imports_itself_through_others():
    graph = {module: set(imports(module, path)) for module, path in MODULES.items()}
    assert ("bench", "measure") in graph["bench", "command"], "relative imports are understood"
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(".".join(module) for module in error.args[1]))
    assert order.index(("call",)) < order.index(("commands",))
