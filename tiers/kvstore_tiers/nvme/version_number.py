"""The version numbers in small files of a directory: a number that is too high is a newer version, no number is damage.

Reads what is there and no more; changes nothing.
"""

from __future__ import annotations

from pathlib import Path

_MOST_BYTES = 64  # of a file that says a version; what follows is none of ours
_MOST_DIGITS = 9


def version_number(text: bytes) -> int | None:
    """The number that the text is; None where it is not one."""
    digits = text.strip()
    return int(digits) if digits.isdigit() and len(digits) <= _MOST_DIGITS else None


def version_text(path: Path) -> bytes:
    """What a version's file says, without blanks and zero bytes; b"" where it says nothing or is not there. Raises
    OSError."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).strip(b"\0 \n")
    except FileNotFoundError:
        return b""
