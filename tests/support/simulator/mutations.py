"""Takes one wait at a time out of a module's classes, to see whether a test notices."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Mutation:
    """A statement that is left out, or an event that is recorded one statement too early."""

    module: ModuleType
    line: int
    source: str
    """The statement."""
    early: bool = False

    def __str__(self) -> str:
        name = self.module.__name__.rsplit(".", 1)[-1]
        return f"{name}:{self.line} {self.source}{' (recorded too early)' if self.early else ''}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the classes of the module have the methods of a source that is changed so."""
        tree = _Change(self).visit(_parsed(self.module))
        tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        classes: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(tree), str(self.module.__file__), "exec"), vars(self.module), classes)
        with ExitStack() as patches:
            for name, changed in classes.items():
                for method, function in vars(changed).items():
                    if isinstance(function, FunctionType):
                        patches.enter_context(patch.object(getattr(self.module, name), method, function))
            yield


def mutations(module: ModuleType, calls: set[str], events: set[str], classes: set[str]) -> list[Mutation]:
    """All of a module.

    Args:
        calls: statements that are calls of these methods are left out.
        events: assignments from calls of these methods, behind a call, are moved before it.
        classes: where to look.
    """
    found = []
    for node in _parsed(module).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for block in _blocks(node):
                for before, statement in zip([None, *block], block, strict=False):
                    name = _called(statement)
                    if isinstance(statement, ast.Expr) and name in calls:
                        found.append(Mutation(module, statement.lineno, ast.unparse(statement)))
                    if isinstance(statement, ast.Assign) and name in events and isinstance(before, ast.Expr):
                        found.append(Mutation(module, statement.lineno, ast.unparse(statement), early=True))
    return found


def _parsed(module: ModuleType) -> ast.Module:
    assert module.__file__
    return ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for inner in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(inner, name, None)
            if isinstance(block, list):
                yield block


def _called(statement: ast.stmt) -> str | None:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr
    return None


class _Change(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for i, statement in enumerate(block):
                if isinstance(statement, ast.stmt) and statement.lineno == self._mutation.line and _called(statement):
                    if self._mutation.early:
                        block[i - 1 : i + 1] = [copy.copy(statement), block[i - 1]]
                    else:
                        block[i] = ast.copy_location(ast.Pass(), statement)
                    return node
        return node
