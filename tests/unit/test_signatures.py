"""Our own means to compare signatures: what they find, and what they let pass."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.reference.package_sources import PackageSources
from tests.reference.signatures import differences, signature_of


@pytest.mark.parametrize(
    ("callee", "calls", "found"),
    [
        ("a, b=1", "a, b=2", []),
        ("a, b=1, *, c=3", "a", []),
        ("a, *rest, **more", "a, *rest, **more", []),
        ("a", "a, b", ["b is missing, or elsewhere"]),
        ("b, a", "a, b", ["a is missing, or elsewhere", "b is missing, or elsewhere"]),
        ("a, b", "a, b=1", ["b has no default"]),
        ("a, b", "a", ["b has no default"]),
        ("a, *, b", "a, b", ["b is missing, or elsewhere"]),
        ("a", "a, **more", ["**more is missing"]),
    ],
)
def test_differences(callee: str, calls: str, found: list[str]) -> None:
    assert differences(*(signature_of(function(f"def f({each}): ...")) for each in (callee, calls))) == found


def test_a_signature_that_is_read_is_the_one_of_the_function() -> None:
    def example(a: int, /, b: int, c: int = 2, *rest: int, d: int, e: int = 4, **more: Any) -> None: ...

    read = signature_of(function("def f(a, /, b, c=2, *rest, d, e=4, **more): ..."))
    assert not differences(read, signature(example)) and not differences(signature(example), read)


def test_a_class_has_the_methods_of_its_bases(tmp_path: Path) -> None:
    package = tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("from lib.base import Base\n")
    (package / "base.py").write_text("class Base:\n  def f(self, a): ...\n  def g(self): ...\n")
    (package / "more.py").write_text("from lib import Base\nif True:\n  class More(Base):\n    def f(self, b): ...\n")
    methods = PackageSources("a test", tmp_path).methods("lib.more", "More")
    assert set(methods) == {"f", "g"} and list(signature_of(methods["f"]).parameters) == ["self", "b"]


def function(text: str) -> ast.FunctionDef:
    (found,) = ast.parse(text).body
    assert isinstance(found, ast.FunctionDef)
    return found
