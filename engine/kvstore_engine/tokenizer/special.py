"""Finds special tokens in text before anything else is tokenised.

Owns the cutting of a text into stretches of plain text and special ids. It never looks inside plain text.

The order is llama.cpp's (`tokenizer_st_partition`): longest special first, over all the text that is still
plain. That is not leftmost-longest: where two specials overlap, the longer wins wherever it stands.
"""

from collections.abc import Sequence

from kvstore_engine.tokenizer.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_WHITE_SPACE = " \t\n\v\f\r"  # C's isspace


class SpecialTokens:
    """The special tokens of a vocabulary, ready to be found in text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = [
            (vocabulary.tokens[i], i)
            for i, kind in enumerate(vocabulary.kinds.tolist())
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
        special.sort(key=lambda entry: len(entry[0].encode()), reverse=True)
        self._all = tuple(special)
        self._strip_after = vocabulary.strip_after
        # A prompt that merely quotes "<|im_end|>" must not end the turn: without parse_special only the
        # tokens a model's author declared to be part of the text are recognised.
        self._user_defined = tuple(entry for entry in special if vocabulary.kinds[entry[1]] == USER_DEFINED)

    def split(self, text: str, parse_special: bool) -> Sequence[str | int]:
        """`text` as stretches: str for plain text (never empty), int for a special token's id."""
        stretches: list[str | int] = [text] if text else []
        for special, token_id in self._all if parse_special else self._user_defined:
            if special in text:
                stretches = _split_by(stretches, special, token_id, strip=token_id in self._strip_after)
        return stretches


def _split_by(stretches: Sequence[str | int], special: str, token_id: int, *, strip: bool) -> list[str | int]:
    """`stretches` with each `special` in them replaced; `strip`: the white space behind it belongs to it."""
    result: list[str | int] = []
    for stretch in stretches:
        if isinstance(stretch, int):
            result.append(stretch)
            continue
        for position, plain in enumerate(stretch.split(special)):
            if position:
                result.append(token_id)
                plain = plain.lstrip(_WHITE_SPACE) if strip else plain
            if plain:
                result.append(plain)
    return result
