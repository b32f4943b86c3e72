"""Sizes, times, shares and counts as people read them, and sizes as people write them. Pure.

Two or three significant digits: 1536 is "1.5 KiB", 300 MiB are "300 MiB", 0.0031 s are "3.1 ms".
"""

from __future__ import annotations

import re

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgtp", 1)
    for tail, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*$")
MAX_BYTES = 1 << 60


def human_bytes(nbytes: float) -> str:
    """Return the size `nbytes` as text: 1536 becomes "1.5 KiB". It has one decimal below 100 of a unit, and none from
    there on.
    """
    value, unit = float(nbytes), 0
    while round(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{1 if unit and value < 99.95 else 0}f} {_BYTE_UNITS[unit]}"


def human_seconds(seconds: float) -> str:
    """Return the time `seconds` as text: 0.0031 becomes "3.1 ms", 7384 "2 h 3 min". It has at most three digits below a
    minute.
    """
    if seconds < 0.9995e-3:
        return f"{_digits(seconds * 1e6)} µs" if seconds > 0 else "0 s"
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_digits(seconds)} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def human_share(part: float, whole: float) -> str:
    """Return the share of `part` in `whole` as text: 3 of 4 becomes "75 %". Return "-" if `whole` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def human_count(count: int) -> str:
    """Return `count` as text, with its digits in groups of three: 1234 becomes "1,234"."""
    return f"{count:,}"


def human_blocks(count: int, nbytes: int | None = None) -> str:
    """Return a number of blocks as text: 1 becomes "1 block". With `nbytes` their size follows: "1,234 blocks (1.5
    GiB)".
    """
    size = "" if nbytes is None else f" ({human_bytes(nbytes)})"
    return f"{plural(count, 'block')}{size}"


def plural(count: int, noun: str) -> str:
    """Return `count` with its noun as text: 2 and "slot" become "2 slots"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_count(count: float) -> str:
    """Return `count` as short text for the axis of a chart: 12500 becomes "12.5k"."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if count >= limit:
            return f"{_digits(count / divisor)}{letter}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def parse_size(text: str | int, whole_bytes: int = 0) -> int:
    """Return the bytes of the size `text`: 4096, "64MiB", or "25%" of `whole_bytes` if that is given. Raises ValueError
    with the reason.
    """
    if isinstance(text, bool):
        raise ValueError("a size is a number or a text such as '64MiB'")
    match = _SIZE.match(f"{abs(text)}" if isinstance(text, int) else text)
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
    elif unit in _FACTORS:
        nbytes = int(min(amount * _FACTORS[unit], 2.0 * MAX_BYTES))  # hundreds of digits are infinity
    else:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; use KiB, MiB, GiB, TiB or %")
    if isinstance(text, int):
        nbytes = text
    if not 0 <= nbytes <= MAX_BYTES:
        raise ValueError(f"{text!r} is not between 0 and {MAX_BYTES} bytes")
    return nbytes


def is_size_text(text: str) -> bool:
    """Return whether `text` is a number with or without a unit, such as "64MiB" or "25%". The unit is not checked. It
    decides which settings also take a plain number of bytes.
    """
    return _SIZE.match(text) is not None


def _digits(value: float) -> str:
    """Return a number with three digits, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
