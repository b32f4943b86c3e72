"""Our classes for vLLM fit vLLM's own files by what they import, override and construct: the files of a wheel for GPUs
too, which are read, not loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference.package_sources import PackageSources, named, packages
from tests.reference.signatures import differences, signature_of
from tests.reference.vllm_layouts import KV_LAYOUTS

FOUND = packages("vllm", "vllm")
if not FOUND:
    pytest.skip("vLLM is not here: make check-wheels fetches its wheel", allow_module_level=True)

CLIENT = Path(__file__).parents[3] / "client"
OURS = PackageSources("ours", CLIENT)
HOOKS = sorted(CLIENT.glob("kvstore_connectors/vllm*/**/*.py"))
pytestmark = pytest.mark.slow
each_vllm = pytest.mark.parametrize("vllm", FOUND, ids=lambda sources: sources.name)


def imports(file: Path) -> dict[str, str]:
    """Names that a file of ours takes from vLLM, with their modules; also those within functions."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= dict.fromkeys((alias.name for alias in node.names), node.module or "")
    return found


def subclasses() -> Iterator[tuple[str, ast.ClassDef, str, str]]:
    """Ours of vLLM's: module, class, and module and name of vLLM's."""
    for file in HOOKS:
        taken = imports(file)
        module = ".".join(file.relative_to(CLIENT).with_suffix("").parts).removesuffix(".__init__")
        for part in ast.parse(file.read_text()).body:
            for base in part.bases if isinstance(part, ast.ClassDef) else ():
                if isinstance(base, ast.Name) and base.id in taken:
                    assert isinstance(part, ast.ClassDef)
                    yield module, part, taken[base.id], base.id


def is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in method.decorator_list)


@each_vllm
def test_what_is_imported_is_there(vllm: PackageSources) -> None:
    wanted = {(module, name) for file in HOOKS for name, module in imports(file).items()}
    missing = [(module, name) for module, name in wanted if vllm.definition(module, name) is None]
    # What vLLM makes of a package's submodules on first use is no statement of its file.
    assert not [found for found in missing if vllm.module(".".join(found)) is None] and len(wanted) > 10


@each_vllm
def test_overridden_methods_take_vllms_calls_and_no_abstract_one_is_left(vllm: PackageSources) -> None:
    compared = set()
    for module, ours, their_module, their_name in subclasses():
        theirs, mine = vllm.methods(their_module, their_name), OURS.methods(module, ours.name)
        assert theirs or their_name == "KVConnectorMetadata", their_name
        left = {name for name, method in theirs.items() if is_abstract(method)} - mine.keys()
        assert not left, f"{ours.name} lacks {left}"
        for name in theirs.keys() & mine.keys():
            if name == "__init__" and ours.name.startswith("_"):
                continue  # only we construct it
            found = differences(signature_of(mine[name]), signature_of(theirs[name]))
            assert not found, (ours.name, name)
            compared.add(ours.name)
    assert {"KVStoreConnector", "KVStoreTier", "KVStoreOffloadingConnector"} <= compared


@each_vllm
def test_records_of_vllm_have_the_fields_that_are_given_to_them(vllm: PackageSources) -> None:
    given = 0
    for file in HOOKS:
        taken = imports(file)
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in taken:
                record = vllm.definition(taken[call.func.id], call.func.id)
                if isinstance(record, ast.ClassDef) and call.keywords:
                    fields = fields_of(vllm, taken[call.func.id], record)
                    assert {keyword.arg for keyword in call.keywords} <= fields, record.name
                    given += 1
    assert given


def fields_of(vllm: PackageSources, module: str, record: ast.ClassDef) -> set[str]:
    found = {name for name, part in named(record).items() if isinstance(part, ast.AnnAssign)}
    for base in record.bases:
        defined = vllm.definition(module, base.id) if isinstance(base, ast.Name) else None
        found |= fields_of(vllm, module, defined) if isinstance(defined, ast.ClassDef) else set()
    return found


@each_vllm
def test_no_layout_is_unknown(vllm: PackageSources) -> None:
    layouts = vllm.definition("vllm.v1.kv_cache_layout", "KVCacheLayout")
    assert isinstance(layouts, ast.ClassDef)
    assert [name for name, part in named(layouts).items() if isinstance(part, ast.Assign)] == list(KV_LAYOUTS)
