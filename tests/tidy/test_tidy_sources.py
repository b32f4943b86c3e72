"""House rules for source files: size, names, docstrings, no leftovers, no copies that hold the GIL."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.tidy import source_rules as rules
from tests.tidy.tree import PACKAGES, all_python, all_source, modules, relative

_ALLOWED_TO_BE_LONG: set[str] = set()  # stays empty: split the file instead
_NAMES_THE_RULES = {"tests/tidy/source_rules.py", "tests/tidy/test_tidy_sources.py"}  # they must spell the words


GIL_FREE = ("kvstored", "kvstore_tiers", "kvstore_client")
OF_TREES = (rules.long_functions, rules.missing_docstring, rules.relative_imports)
OF_DOCSTRINGS = (rules.bare_openings, rules.question_openings, rules.vague_references)


def _findings(paths: Iterable[Path], rule: Callable[[str], list[str]]) -> list[str]:
    return [f"{relative(path)}: {found}" for path in paths for found in rule(path.read_text())]


def test_no_file_is_too_long() -> None:
    paths = [path for path in all_source() if relative(path) not in _ALLOWED_TO_BE_LONG]
    assert len(paths) > 100
    tests = [path for path in paths if relative(path).startswith("tests/")]
    assert _findings(set(paths) - set(tests), rules.too_long) == []
    assert _findings(tests, lambda text: rules.too_long(text, rules.MAX_TEST_LINES)) == []


def test_every_name_says_what_is_in_the_file() -> None:
    assert [
        f"{relative(path)}: {found}" for path in all_source() for found in rules.forbidden_name(relative(path))
    ] == []


def test_nothing_is_left_for_later() -> None:
    paths = [path for path in all_source() if relative(path) not in _NAMES_THE_RULES]
    assert _findings(paths, rules.leftovers) == []


def test_functions_are_short_docstrings_clear_and_imports_absolute() -> None:
    """One test, so that each file is parsed once. A docstring is read alone, in a help text or an editor, and often in
    a second language.
    """
    # No payload is copied there with the GIL held; that worker has one thread.
    copies = {path for path in modules(*GIL_FREE) if path.name != "library_worker.py"}
    found = []
    for path in all_python():
        text = path.read_text()
        tree, chosen = ast.parse(text), list(OF_TREES)
        if path in copies and any(word in text for word in rules.VIEW_MAKERS):
            chosen.append(rules.memoryview_copies)
        if relative(path) not in _NAMES_THE_RULES:
            chosen += OF_DOCSTRINGS
        for rule in chosen:
            found += [f"{relative(path)}: {finding}" for finding in rule(tree)]
    assert found == []


def test_a_heavy_module_is_imported_in_one_place_of_a_tower() -> None:
    """Connectors are the exception: each is for one engine, and brings that engine's libraries."""
    places = defaultdict(set)
    for path in modules():
        text = path.read_text()
        if "kvstore_connectors" in path.parts or not any(name in text for name in rules.HEAVY_IMPORTS):
            continue
        for name in rules.heavy_imports(ast.parse(text)):
            tower = "inference" if relative(path).startswith(("engine/", "client/")) else "storage"
            places[name, tower].add(path.parent)
    assert ("torch", "storage") not in places
    assert {*map(relative, places["torch", "inference"])} == {"engine/kvstore_engine/torch_executor"}
    assert {name: sorted(map(relative, where)) for name, where in places.items() if len(where) > 1} == {}


def test_a_terminals_signals_are_for_the_process_that_was_started_there() -> None:
    found = []
    for path in modules():
        if {"testing", "bench"}.isdisjoint(path.parts) and "stdin" in (text := path.read_text()):
            found += [f"{relative(path)}: {finding}" for finding in rules.children_of_the_terminal(ast.parse(text))]
    assert found == []


def test_every_package_is_typed() -> None:
    assert [name for name, path in PACKAGES.items() if not (path / "py.typed").exists()] == []


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (rules.too_long, "x\n" * 401, "x\n" * 400),
        (rules.forbidden_name, "kvstore/kvstored/lease_manager.py", "kvstore/kvstored/leases.py"),
        (rules.forbidden_name, "kvstore/utils/sizes.py", "kvstore/utilities_of_war.txt"),
        (rules.leftovers, "x = 1  # TODO later\n", "todos = 1\n"),
        (rules.leftovers, "raise NotImplementedError\n", "return NotImplemented\n"),
    ],
)
def test_the_rules_of_texts_find_what_they_forbid(rule: Callable[[str], object], bad: str, good: str) -> None:
    assert rule(bad)
    assert not rule(good)


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (rules.long_functions, "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
        (rules.missing_docstring, "import os\n", '"""What it owns."""\nimport os\n'),
        (
            rules.bare_openings,
            'def f():\n    """Of the tenant the blocks."""\n',
            'def f():\n    """Return blocks."""\n',
        ),
        (
            rules.bare_openings,
            'class A:\n    """As `B`, without a lock."""\n',
            'class A:\n    """Like `B`, but no lock."""\n',
        ),
        (rules.bare_openings, '"""These are kept: blocks."""\n', '"""These blocks are kept."""\n'),
        (rules.bare_openings, '"""It keeps the blocks."""\n', '"""On-disk format of blocks."""\n'),
        (rules.question_openings, '"""What the daemon does."""\n', '"""Say what the daemon does."""\n'),
        (rules.question_openings, 'async def f():\n    """Whether it ended."""\n', '"""Return whether it ended."""\n'),
        (rules.question_openings, 'class A:\n    """See the module."""\n', '"""Seeds of the tags."""\n'),
        (rules.vague_references, '"""Keep as many as there are."""\n', '"""Keep all blocks."""\n'),
        (
            rules.vague_references,
            '"""The key and that of the\n    parent."""\n',
            '"""Say that offsets are sorted."""\n',
        ),
        (rules.vague_references, '"""Those that wait are dropped."""\n', '"""Waiting calls are dropped."""\n'),
        (rules.relative_imports, "from . import x\n", "from kvstored import x\n"),
        (rules.heavy_imports, "def f():\n    import torch\n", "if TYPE_CHECKING:\n    import torch\n"),
        (rules.children_of_the_terminal, "subprocess.Popen(words)\n", "subprocess.Popen(words, process_group=0)\n"),
        (rules.memoryview_copies, "v = memoryview(b)\nv[0:4] = data\n", "v = np.zeros(4)\nv[0:4] = data\n"),
        (
            rules.memoryview_copies,
            "m = mmap.mmap(fd, 9)\nself.v = m\nself.v[a:b] = d\n",
            "m = mmap.mmap(fd, 9)\nm[0] = 1\n",
        ),
        (
            rules.memoryview_copies,
            "def f(v: memoryview):\n    w = v[2:]\n    w[:4] = d\n",
            "raw = bytearray(8)\nraw[:4] = d\n",
        ),
    ],
)
def test_the_rules_of_trees_find_what_they_forbid(rule: Callable[[ast.Module], object], bad: str, good: str) -> None:
    assert rule(ast.parse(bad))
    assert not rule(ast.parse(good))
