"""Sizes as people write them. Pure; raises ValueError with the reason."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1024,
    "m": 1000**2, "mb": 1000**2, "mib": 1024**2,
    "g": 1000**3, "gb": 1000**3, "gib": 1024**3,
    "t": 1000**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*$")
MAX_BYTES = 1 << 60


def parse_size(text: str | int, whole_bytes: int = 0) -> int:
    """Bytes of "64MiB", 4096, "25%" (of `whole_bytes`)."""
    if isinstance(text, bool):
        raise ValueError("a size is a number or a text such as '64MiB'")
    if isinstance(text, int):
        amount, unit = float(text), ""
    else:
        match = _SIZE.match(str(text))
        if match is None:
            forms = ["4096", "'64MiB'", "'1.5GiB'"] + ["'25%'"] * bool(whole_bytes)
            raise ValueError(f"{text!r} is not a size; write {', '.join(forms[:-1])} or {forms[-1]}")
        amount, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not whole_bytes:
            raise ValueError(f"{text!r}: a percentage makes no sense for this setting")
        if amount > 100:
            raise ValueError(f"{text!r} is more than everything")
        nbytes = int(whole_bytes * amount / 100)
    elif unit in _UNITS:
        nbytes = int(amount * _UNITS[unit])
    else:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; use KiB, MiB, GiB, TiB or %")
    if not 0 <= nbytes <= MAX_BYTES:
        raise ValueError(f"{text!r} is not between 0 and {MAX_BYTES} bytes")
    return nbytes


def is_size_text(text: str) -> bool:
    """Whether a text has the form of a size: decides which settings also take a plain number of bytes."""
    return _SIZE.match(text) is not None


def show_size(nbytes: int) -> str:
    """The same number for people: 1536 -> '1.5 KiB'."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def show_blocks(blocks: int, nbytes: int) -> str:
    """So many blocks for people: '1 block (1.5 KiB)'."""
    return f"{blocks} block{'' if blocks == 1 else 's'} ({show_size(nbytes)})"
