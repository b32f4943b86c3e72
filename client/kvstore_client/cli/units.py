"""Numbers as people read them. Binary prefixes for bytes, two significant places at most."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in _BYTE_UNITS:
        if value < 1024 or unit == _BYTE_UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes every value")


def human_seconds(seconds: float) -> str:
    """0.0031 -> "3.1 ms", 7384 -> "2 h 3 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def human_share(part: int, whole: int) -> str:
    """3 of 4 -> "75 %"; "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def human_count(count: int) -> str:
    """Digits in groups of three."""
    return f"{count:,}"


def human_blocks(count: int) -> str:
    """1 -> "1 block", 1234 -> "1,234 blocks"."""
    return f"{count:,} block{'' if count == 1 else 's'}"
