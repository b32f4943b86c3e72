"""Four kinds of text that every installation carries or makes: English, a licence, Python source, JSON."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

_PACKAGES = ("kvstore_client", "kvstore_engine", "kvstore_proto", "kvstore_restore")


def texts(most_characters: int) -> dict[str, str]:
    """Return a text of each kind, of `most_characters` at most."""
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "english": _docstrings, "licence": _licences, "python": _sources, "json": _records,
    }  # fmt: skip
    return {name: _first(make(), most_characters) for name, make in kinds.items()}


def _first(parts: Iterator[str], most_characters: int) -> str:
    made, size = [], 0
    for part in parts:
        made.append(part)
        size += len(part)
        if size >= most_characters:
            break
    return "\n\n".join(made)[:most_characters]


def _files() -> Iterator[Path]:
    for name in _PACKAGES:
        spec = find_spec(name)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            yield from sorted(path for path in Path(folder).rglob("*.py") if not path.name.endswith("_pb2.py"))


def _sources() -> Iterator[str]:
    for path in _files():
        yield path.read_text()


def _docstrings() -> Iterator[str]:
    for source in _sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield " ".join(text.split())


def _licences() -> Iterator[str]:
    """Yield licences that Python and its packages came with."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from (path.read_text(errors="replace") for path in (library / "LICENSE.txt",) if path.is_file())
    places = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/**/LICENSE*"))
    yield from (path.read_text(errors="replace") for path in places if path.is_file())


def _records() -> Iterator[str]:
    chosen = np.random.default_rng(5)
    words = ("block", "chain", "layer", "lease", "model", "prefix", "queue", "slot", "tenant", "token")
    for number in range(100_000):
        a, b, c = (words[at] for at in chosen.integers(0, len(words), 3))
        record = {
            "id": number, "name": f"{a}-{b}", "kind": c, "bytes": int(chosen.integers(1, 1 << 20)),
            "share": round(float(chosen.random()), 4), "is_durable": bool(chosen.random() < 0.5),
            "tags": [a, c], "place": {"tier": b, "offset": int(chosen.integers(0, 1 << 16)) * 4096},
        }  # fmt: skip
        yield json.dumps(record, indent=2)
