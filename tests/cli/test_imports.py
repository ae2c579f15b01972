"""Imports of the command line: no module imports itself through others, not even for type checking; and nobody looks
for garbage while PyTorch is imported."""

import ast
import os
import re
import subprocess
import sys
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


IMPORTS_PYTORCH = """
import gc, sys
from triforce.cli.call import import_pytorch

looked = []
gc.callbacks.append(lambda *_: looked.append("torch" in sys.modules))
gc.collect()
try:
    import_pytorch()
except ImportError:
    print("fails", end=" ")
print(looked.count(True), looked.count(False) > 0, gc.isenabled(), gc.get_freeze_count() > 10_000)
if "torch" in sys.modules:
    gc.unfreeze()
    import_pytorch()
    print("again", gc.get_freeze_count())
"""


def test_nobody_looks_for_garbage_while_pytorch_is_imported(tmp_path):
    """What it leaves is looked through neither later nor at the exit. If it was imported before, nothing changes."""

    def printed(path):
        command, environment = [sys.executable, "-c", IMPORTS_PYTORCH], os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert printed("") == ["0 True True True", "again 0"]
    (tmp_path / "torch.py").write_text("raise ImportError")
    assert printed(str(tmp_path)) == ["fails 0 True True True"]


def test_signals_are_delayed_only_with_pytorch():
    """A command that delays them by itself would import PyTorch later, with collections of garbage."""
    delaying = {
        name
        for name, path in MODULES.items()
        if re.search(r"\bdelayed\(", path.read_text(encoding="utf-8")) and name != ("terminal", "stopping")
    }
    assert delaying == {("call",)}
