"""Text that came from a disk or a wire, made safe for a terminal and for a log: unprintable characters are escaped.

A terminal obeys escape sequences, and a line break in a name makes one log line look like two. JSON is safe by itself.
Invariant: the result holds printable characters and blanks only; printable text is unchanged, so text may pass here
twice.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return `text` as one line, with unprintable characters escaped: controls, line breaks, formatting characters and
    lone surrogates become \x1b, \n, \u202e, \udcff.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks kept and every other unprintable character escaped. Use it for text that this
    program wrote.
    """
    return "\n".join(map(printable, text.split("\n")))
