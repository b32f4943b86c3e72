"""The house rules that can be read off a source text or its tree. Pure: one of them in, findings out, one line each.

Each rule is shown a text that breaks it in test_tidy_sources.py, so that none of them can pass by finding nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

MAX_FILE_LINES = 400  # of a test: MAX_TEST_LINES
MAX_TEST_LINES = 600
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"})
HEAVY_IMPORTS = frozenset({"torch", "cuda", "cupy", "kvikio", "sklearn", "redis", "xllamacpp", "tokenizers"})
_LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
_BARE_OPENING = re.compile(
    r"(of|as|by|with|without|in|into|at|on|to|from|under|between|among|after|before|past|beside|behind|beyond"
    r"|they|them|it|its|he)\b(?![-/`(])(?! [0-9])"
    r"|(this|these|those) (is|are|was|were|has|have|of|that|which)\b"
    r"|(one|ones|all|both|each|none) (of (them|these|those)\b|[,.:;])",
    re.IGNORECASE,
)
_QUESTION_OPENING = re.compile(
    r"(what|whether|how|why|when|where|which|who|whose)\b|see (the (module|class)\b|above|`[^`]*`[.,])", re.IGNORECASE
)
_VAGUE_REFERENCE = re.compile(
    r"\b(so (many|much|long)(?! (as|that)\b)|th(at|ose) of|those (that|who)|as (there|here)|or at all"
    r"|such an?|the same (as|for|of)|to be had|what is to be)\b",
    re.IGNORECASE,
)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements have statements
VIEW_MAKERS = frozenset({"memoryview", "cast", "mmap", "getbuffer", "toreadonly"})


def too_long(source: str, most: int = MAX_FILE_LINES) -> list[str]:
    lines = source.count("\n")
    return [f"{lines} lines, at most {most}"] if lines > most else []


def forbidden_name(path: str) -> list[str]:
    """A file or folder name that says nothing about what is in it."""
    words = {word for part in re.split(r"[/.]", path.lower()) for word in part.split("_")}
    return [f"the name says nothing: {word}" for word in sorted(words & FORBIDDEN_NAMES)]


def leftovers(source: str) -> list[str]:
    return [
        f"line {number}: {match[0]}"
        for number, line in enumerate(source.splitlines(), 1)
        if (match := _LEFTOVERS.search(line))
    ]


def missing_docstring(tree: ast.Module) -> list[str]:
    return [] if not tree.body or ast.get_docstring(tree) else ["no module docstring"]


def bare_openings(tree: ast.Module) -> list[str]:
    """Docstrings that open with a preposition or a pronoun: a reader has to find the noun or the verb elsewhere."""
    return [
        f"{place}: opens with {match[0]!r}" for place, text in _docstrings(tree) if (match := _BARE_OPENING.match(text))
    ]


def question_openings(tree: ast.Module) -> list[str]:
    """Docstrings that open as a question does, or send the reader to another place, instead of saying what is done."""
    return [
        f"{place}: opens with {match[0]!r}"
        for place, text in _docstrings(tree)
        if (match := _QUESTION_OPENING.match(text))
    ]


def vague_references(tree: ast.Module) -> list[str]:
    """Docstrings with a pronoun in the place of a noun: "that of the other", "as there", "such a one"."""
    return [
        f"{place}: {match[0]!r} in place of a noun"
        for place, text in _docstrings(tree)
        if (match := _VAGUE_REFERENCE.search(text))
    ]


def long_functions(tree: ast.Module) -> list[str]:
    """A function that only holds a class or other functions is measured by those."""
    return [
        f"{function.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        for function in _functions(tree)
        if (length := _own_lines(function)) > MAX_FUNCTION_LINES
    ]


def relative_imports(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: relative import"
        for node in _statements(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def heavy_imports(tree: ast.Module) -> set[str]:
    """Heavy modules that are imported outside `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in _runtime_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found.update(name.partition(".")[0] for name in names)
    return found & HEAVY_IMPORTS


def children_of_the_terminal(tree: ast.Module) -> list[str]:
    """Calls that start a process in our process group: it gets a terminal's signals, before it can ignore them, too."""
    return [
        f"line {node.lineno}: needs process_group=0"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else "") in {"Popen", "create_subprocess_exec"}
        and not {"process_group", "start_new_session"} & {keyword.arg for keyword in node.keywords}
    ]


def memoryview_copies(tree: ast.Module) -> list[str]:
    """Slices of a memoryview or an mmap that are assigned to: such a copy holds the GIL while it runs.

    It stalled the control thread for 11.5 ms where np.copyto and ctypes.memmove, which release it, took 0.03.
    A name counts as a view from the assignment that makes it one, through slices of it.
    """
    views: set[str] = set()
    nodes = [*ast.walk(tree)]
    grown = True
    while grown:
        before = len(views)
        for node in nodes:
            views.update(_bound_views(node, views))
        grown = len(views) > before
    return [
        f"line {node.lineno}: {ast.unparse(target)} = … copies with the GIL held"
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice) and _is_view(target.value, views)
    ]


@lru_cache(maxsize=1)
def _statements(tree: ast.Module) -> list[ast.AST]:
    """Return `tree` and each statement in it, for rule after rule; expressions, which are most of a tree, hold none."""
    found: list[ast.AST] = [tree]
    for node in found:
        for field in _BLOCKS:
            found += getattr(node, field, ())
    return found


@lru_cache(maxsize=1)
def _docstrings(tree: ast.Module) -> list[tuple[str, str]]:
    """Return the place and the text of each docstring, the text in one line."""
    found = []
    for node in _statements(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if text := ast.get_docstring(node):
            place = "module" if isinstance(node, ast.Module) else f"line {node.lineno}, {node.name}"
            found.append((place, " ".join(text.split())))
    return found


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in _statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    whole = (function.end_lineno or function.lineno) - function.lineno + 1
    inner = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in function.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return whole - inner


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        yield node
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _runtime_nodes(child)


def _bound_views(node: ast.AST, views: set[str]) -> set[str]:
    """Names that `node` binds to a view."""
    if isinstance(node, ast.Assign) and _is_view(node.value, views):
        return {ast.unparse(target) for target in node.targets}
    if isinstance(node, ast.AnnAssign) and (
        ast.unparse(node.annotation) == "memoryview" or (node.value is not None and _is_view(node.value, views))
    ):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "memoryview":
        return {node.arg}
    if isinstance(node, ast.withitem) and node.optional_vars is not None and _is_view(node.context_expr, views):
        return {ast.unparse(node.optional_vars)}
    return set()


def _is_view(value: ast.expr, views: set[str]) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        return (called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)) in VIEW_MAKERS
    if isinstance(value, ast.Subscript):
        return _is_view(value.value, views)
    return ast.unparse(value) in views
