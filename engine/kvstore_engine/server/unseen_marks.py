"""Puts marks of a call that leave no trace in an answer's text where the model wrote them.

Owns their places. A text may come later than its tokens, since the engine holds back what may become a stop string,
while a mark is known by its token at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvstore_engine.tokenizer.stream import StreamingDetokenizer


class UnseenMarks:
    """Those of one answer."""

    def __init__(self, marks: Mapping[int, str], stream: StreamingDetokenizer) -> None:
        """`marks`: what each such token stands for; `stream` shows the answer's tokens as the engine does."""
        self._marks, self._stream = marks, stream
        self._written = self._shown = 0  # characters
        self._waiting: deque[tuple[int, str]] = deque()

    def put(self, token: int | None, text: str) -> str:
        """Return `text`, which comes with `token` or with the answer's end, with the marks that stand in it."""
        if token is not None and self._marks:
            self._written += len(self._stream.push(token))
            if token in self._marks:
                self._waiting.append((self._written, self._marks[token]))
        pieces = []
        while self._waiting and self._waiting[0][0] <= self._shown + len(text):
            place, mark = self._waiting.popleft()
            pieces += [text[: place - self._shown], mark]
            text, self._shown = text[place - self._shown :], place
        self._shown += len(text)
        return "".join((*pieces, text))
