"""Follows the text of one JSON object as it arrives, and says as early as possible if it is none.

The module owns the grammar of JSON (RFC 8259), without meaning: the members of the object are the original text, so
that passing it on changes no digit, no order and no white space. Nesting has no limit and needs no recursion.
"""

from __future__ import annotations

import re
from typing import Literal

State = Literal["open", "whole", "wrong"]
SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGUN_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?")
_HEX = re.compile(r"[0-9A-Fa-f]{0,4}")
_NAMES = ("true", "false", "null")
_CLOSING = {"{": "}", "[": "]"}


class JsonObject:
    """A reader of one JSON object from a text that grows. `state` is "open" while more text is needed, "whole" once the
    object is complete (it ends at index `end`), and "wrong" if the text cannot become a JSON object. `names` has the
    names of its members as written, `values` the index range of each value in the text.
    """

    def __init__(self) -> None:
        self.state: State = "open"
        self.end = 0
        self.names: list[str] = []
        self.values: list[tuple[int, int]] = []
        self._open: list[str] = []  # the brackets around the present place
        self._expected = "object"
        self._at = 0
        self._began = 0  # where the present string, number or word began
        self._value = 0  # where the present member's value began, of the object itself
        self._inside: Literal["", "string", "word"] = ""

    def follow(self, text: str) -> State:
        """Read the new part of `text`, which is all text since the object's beginning, and return the state. White
        space before the object is allowed.
        """
        while self.state == "open" and self._advance(text):
            pass
        return self.state

    def _advance(self, text: str) -> bool:
        """Pass one token or a part of one; return False if that needs more text."""
        if self._inside == "string":
            return self._string(text)
        if self._inside == "word":
            return self._word(text)
        at = end_of(SPACE, text, self._at)
        self._at = at
        if at == len(text):
            return False
        self._at = at + 1
        self._token(text[at], at)
        return True

    def _token(self, char: str, at: int) -> None:
        expected, closes = self._expected, bool(self._open) and char == _CLOSING[self._open[-1]]
        takes_value = expected in ("value", "first value")
        if (char == "{" and expected == "object") or (takes_value and char in "{["):
            self._enter(char, at)
        elif char == '"' and (takes_value or expected in ("name", "first name")):
            self._begin("string", at)
        elif takes_value and (char.isalnum() or char == "-"):
            self._begin("word", at)
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected == "comma" and char == ",":
            self._expected = "name" if self._open[-1] == "{" else "value"
        elif expected in ("comma", "first name", "first value") and closes:
            self._leave()
        else:
            self.state = "wrong"

    def _begin(self, kind: Literal["string", "word"], at: int) -> None:
        self._inside, self._began, self._at = kind, at, at + (kind == "string")
        self._mark(at)

    def _enter(self, bracket: str, at: int) -> None:
        self._mark(at)
        self._open.append(bracket)
        self._expected = "first name" if bracket == "{" else "first value"

    def _mark(self, at: int) -> None:
        if len(self._open) == 1 and self._expected == "value":
            self._value = at

    def _leave(self) -> None:
        self._open.pop()
        self._value_ended()
        if not self._open:
            self.state, self.end = "whole", self._at

    def _value_ended(self) -> None:
        self._expected = "comma"
        if len(self._open) == 1:
            self.values.append((self._value, self._at))

    def _string(self, text: str) -> bool:
        at = self._at = end_of(_PLAIN, text, self._at)
        if at == len(text):
            return False
        if text[at] == '"':
            self._at, self._inside = at + 1, ""
            self._ended(text)
        elif text[at] != "\\":
            self.state = "wrong"  # a control character
        elif at + 1 == len(text):
            return False
        elif text[at + 1] == "u":
            digits = end_of(_HEX, text, at + 2)
            if digits < at + 6 and digits == len(text):
                return False
            self._at = at + 6
            self.state = "open" if digits == at + 6 else "wrong"
        else:
            self._at = at + 2
            self.state = "open" if text[at + 1] in '"\\/bfnrt' else "wrong"
        return True

    def _word(self, text: str) -> bool:
        end = end_of(_WORD, text, self._began)
        word = text[self._began : end]
        if end == len(text):
            begun = _BEGUN_NUMBER.fullmatch(word) or any(name.startswith(word) for name in _NAMES)
            self.state = "open" if begun else "wrong"
            return False
        if not (_NUMBER.fullmatch(word) or word in _NAMES):
            self.state = "wrong"
            return True
        self._at, self._inside = end, ""
        self._ended(text)
        return True

    def _ended(self, text: str) -> None:
        """Handle the end of a string or a word, at the present place."""
        if self._expected in ("name", "first name"):
            if len(self._open) == 1:
                self.names.append(text[self._began : self._at])
            self._expected = "colon"
        else:
            self._value_ended()


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the index in `text` where a match of `pattern` that begins at index `at` ends; `at` if there is no
    match.
    """
    match = pattern.match(text, at)
    return at if match is None else match.end()
