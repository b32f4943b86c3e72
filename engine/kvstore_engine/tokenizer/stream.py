"""Token ids to text, one at a time, without ever showing half a character.

Owns the bytes of a character that is not complete yet. It never looks ahead: what `push` returned stands.
"""

import codecs
from collections.abc import Callable


class StreamingDetokenizer:
    """Feeds tokens' bytes through an incremental UTF-8 decoder; bytes that can be no character become
    U+FFFD.
    """

    def __init__(self, piece: Callable[[int], bytes], strip_first_space: bool = False) -> None:
        """`piece(token_id)` gives a token's bytes; `strip_first_space` undoes SentencePiece's leading
        space.
        """
        self._piece = piece
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is still incomplete."""
        return self._decoded(self._next(token_id))

    def place(self, token_id: int) -> int:
        """Push `token_id`, and return the index in the whole text of the character that its first byte belongs to."""
        piece = self._next(token_id)
        if not piece:
            return self._characters
        self._decoded(piece[:1])
        is_complete = not self._decoder.getstate()[0]
        place = self._characters - is_complete
        self._decoded(piece[1:])
        return place

    def _next(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if self._strip:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return piece

    def _decoded(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        self._characters += len(text)
        return text

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)
