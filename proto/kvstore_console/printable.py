"""Text that came from a disk or a wire, made fit for a terminal and for a log: what is not printable is spelled out.

A terminal obeys escape sequences, and a line break in a name makes one log line look like two. JSON is safe by itself.
Owns that one rule. Invariant: what is returned holds printable characters and blanks only; printable text comes back
as it is, so that it may pass here twice.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """On one line: controls, line breaks, formatting characters and lone surrogates as \\x1b, \\n, \\u202e, \\udcff."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """The same for text of our own making that has lines."""
    return "\n".join(map(printable, text.split("\n")))
