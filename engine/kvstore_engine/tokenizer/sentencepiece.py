"""SentencePiece BPE ("llama" vocabularies): the encoder, and the bytes of each token.

The module owns the joining by scores and the byte fallback. It does not add the leading space: that depends on the text
before, which the caller knows.

A llama vocabulary has scores and no merges: of all neighbouring symbols whose concatenation is a token, the pair with
the highest score is joined first, the leftmost of equals (Kudo and Richardson, "SentencePiece", 2018; the order is
llama.cpp's, in `llm_tokenizer_spm_session`). Gemma's runs of spaces and newlines have equal scores, so the order among
equals decides ids. A general BPE engine ranks equals by id instead, and its merges would have to be derived from a
quarter of a million tokens at every start.

Texts are cut before spaces where no token reaches across, and the ids of each piece are remembered: most of a text is
words that were seen before.
"""

import heapq
import re
from collections.abc import Sequence

from kvstore_engine.tokenizer.vocabulary import BYTE, Vocabulary

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MAX_REMEMBERED, _MAX_REMEMBERED_CHARACTERS = 1 << 16, 32
_NO_SYMBOL = -1


class SentencePieceEncoder:
    """A function object that turns text into token ids of one SentencePiece vocabulary. The caller must have replaced
    each space by U+2581.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {text: i for i, text in enumerate(vocabulary.tokens)}
        self._scores: Sequence[float] = vocabulary.scores.tolist()
        self._unknown = vocabulary.unknown_id
        # A token with a space inside may grow across it from what stands before.
        crossing = {text[at - 1] for text in vocabulary.tokens for at in range(1, len(text)) if text[at] == SPACE}
        stops = "".join(map(re.escape, sorted(crossing)))
        self._pieces = re.compile(rf"(?<=[^{stops}])(?={SPACE})" if stops else rf"(?<=.)(?={SPACE})", re.DOTALL)
        self._remembered: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of `text`; a character that is no token becomes its bytes' tokens."""
        ids: list[int] = []
        for piece in self._pieces.split(text):
            known = self._remembered.get(piece)
            if known is None:
                known = self._encode(piece)
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                if len(piece) <= _MAX_REMEMBERED_CHARACTERS:
                    self._remembered[piece] = known
            ids += known
        return ids

    def _encode(self, text: str) -> list[int]:
        """Return the ids of one piece, by joining neighbours, best score first. A joined symbol takes the left one's
        place; "" is a removed one.
        """
        symbols = list(text)
        following = [*range(1, len(symbols)), _NO_SYMBOL]
        preceding = [_NO_SYMBOL, *range(len(symbols) - 1)]
        candidates: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            joined = symbols[left] + symbols[right]
            token_id = self._ids.get(joined)
            if token_id is not None:
                heapq.heappush(candidates, (-self._scores[token_id], left, right, joined))

        for left in range(len(symbols) - 1):
            consider(left, left + 1)
        while candidates:
            _, left, right, joined = heapq.heappop(candidates)
            # A candidate is stale if either part has been joined to something since.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(joined):
                continue
            symbols[left], symbols[right] = joined, ""
            after = following[left] = following[right]
            if after != _NO_SYMBOL:
                preceding[after] = left
                consider(left, after)
            if preceding[left] != _NO_SYMBOL:
                consider(preceding[left], left)
        return [token_id for symbol in symbols if symbol for token_id in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        found = (self._ids.get(f"<0x{byte:02X}>", self._unknown) for byte in symbol.encode())
        return [token_id for token_id in found if token_id is not None]


def token_bytes(text: str, kind: int) -> bytes:
    """Return the bytes that a token stands for. `text` is the token as the vocabulary stores it, `kind` its type, such
    as BYTE.
    """
    if kind == BYTE:
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE, " ").encode()
