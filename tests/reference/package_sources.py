"""The Python files of a library, installed or in a wheel that `make check-wheels` has fetched.

Nothing of it is imported: what a wheel for GPUs loads is not on every machine.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

WHEELS = Path(__file__).parents[2] / ".wheels"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class PackageSources:
    """`root` holds the packages; `name` says which version of what it is."""

    def __init__(self, name: str, root: Path | zipfile.Path) -> None:
        self.name, self._root = name, root
        self.module = cache(self._module)

    def _module(self, name: str) -> ast.Module | None:
        """A module by its dotted name; None where there is none, or no source of it."""
        place = self._root
        for part in name.split("."):
            place = place / part
        for file in (place / "__init__.py", self._root / f"{name.replace('.', '/')}.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def definition(self, module: str, name: str) -> ast.AST | None:
        """Return the definition of a name in a module: defined, assigned or imported there; None if nothing is."""
        tree = self.module(module)
        return None if tree is None else named(tree).get(name)

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """Return the methods of a class and of its bases as far as they are in these sources, by name."""
        found: dict[str, Function] = {}
        defined = self.definition(module, name)
        if isinstance(defined, ast.ImportFrom) and defined.module:
            return self.methods(defined.module, name)
        if not isinstance(defined, ast.ClassDef):
            return found
        for base in reversed(defined.bases):
            if isinstance(base, ast.Name):
                found |= self.methods(module, base.id)
        return found | {part.name: part for part in defined.body if isinstance(part, Function)}


def packages(distribution: str, package: str) -> list[PackageSources]:
    """All there are: each wheel that was fetched, else what is installed."""
    wheels = sorted(WHEELS.glob(f"{distribution.replace('-', '_')}-*.whl"))
    if wheels:
        return [PackageSources("-".join(wheel.name.split("-")[:2]), zipfile.Path(wheel)) for wheel in wheels]
    found = find_spec(package)
    if found is None or found.origin is None:
        return []
    return [PackageSources(f"{package} as installed", Path(found.origin).parents[1])]


def named(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Return what is defined, assigned or imported at the top of a module or class, also under `if` and `try`, by its
    name.
    """
    return {name: statement for statement in _statements(tree.body) for name in _names(statement)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef | Function):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
