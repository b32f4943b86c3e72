"""Write docs/api.md from the docstrings of what a user of the packages calls: `make docs`.

Owns which names are public interface and how they are laid out. Every sentence of api.md stands in the source, so the
page is not committed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

TARGET = Path(__file__).with_name("api.md")
MODULES = {  # module -> its public names, in the order of the page
    "kvstore_client": (
        "connect",
        "Session",
        "Lease",
        "LeaseStream",
        "LayerStreams",
        "LeasedRun",
        "LeaseArray",
        "by_arrays",
        "Slot",
        "PutReceipt",
        "PutTerms",
        "Lookup",
        "ResumePoint",
        "Prefetched",
        "Statistics",
        "Fingerprint",
        "LayerGroup",
        "StatePart",
        "BlockKeys",
        "KVStoreError",
        "ErrorKind",
        "DaemonUnavailable",
    ),
    "kvstore_client.aio": ("connect", "AsyncSession", "AsyncLeaseStream"),
    "kvstore_tiers.base": ("Tier", "Slot", "Segment", "Outcome"),
    "kvstored.store.policies.base": ("EvictionPolicy", "Learns", "Listens", "Weighs"),
}
_HEAD = """# API reference

Written by `make docs` from the docstrings; do not edit it here. Sizes are bytes, times seconds, unless a
name says otherwise. The command line: [kvstored](kvstored.md), [kvctl](kvctl.md), [kvengine](kvengine.md).
"""


def page() -> str:
    return "\n".join([_HEAD, *(line for name, names in MODULES.items() for line in _module(name, names))])


def _module(name: str, names: tuple[str, ...]) -> Iterator[str]:
    module = import_module(name)
    yield f"## {name}\n"
    yield f"{_text(module)}\n"
    for member in names:
        yield from _member(member, getattr(module, member))


def _member(name: str, member: object) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isroutine(member) or is_dataclass(member):  # other classes are made by a function
        yield _signature(name, member)
    yield f"{_text(member)}\n"
    if inspect.isclass(member):
        for attribute, value in _public(member):
            if isinstance(value, property):
                yield f"**{attribute}**: {_text(value)}\n" if _text(value) else f"**{attribute}**\n"
            else:
                yield _signature(attribute, value)
                yield f"{_text(value)}\n"


def _public(cls: type) -> Iterator[tuple[str, object]]:
    ours = [each for each in reversed(cls.__mro__) if each.__module__.startswith("kvstore_")]
    for attribute, value in {name: value for each in ours for name, value in vars(each).items()}.items():
        if not attribute.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            yield attribute, value


def _signature(name: str, member: object) -> str:
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    signature = inspect.signature(function)  # type: ignore[arg-type]
    shown = [known for known in signature.parameters.values() if known.name not in ("self", "cls")]
    returns = signature.return_annotation
    if inspect.isclass(member) or returns in ("None", None):
        returns = inspect.Signature.empty
    text = str(signature.replace(parameters=shown, return_annotation=returns))
    text = re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,)=\s]|$)", r"\1\3", text)  # annotations are kept as strings
    text = re.sub(r"<factory>|<object object at .*?>|<built-in function \w+>", "...", text)
    return f"```python\n{name}{text}\n```\n"


def _text(member: object) -> str:
    return inspect.cleandoc(getattr(member, "__doc__", None) or "").replace("<", "\\<")


if __name__ == "__main__":
    TARGET.write_text(page())
