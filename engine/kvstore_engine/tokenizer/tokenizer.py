"""The tokenizer of one model: text to ids, ids to text, and a digest for the cache's fingerprint.

The module owns the order of steps: special tokens first, then plain stretches, then BOS and EOS. `byte_level` or
`sentencepiece` encodes a plain stretch. Correctness is equality with llama.cpp, id by id.
"""

import codecs
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore_engine.tokenizer import byte_level, sentencepiece
from kvstore_engine.tokenizer.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, TokenizerError, Vocabulary

_WHITE_SPACE = " \t\n\v\f\r"  # C's isspace


class StreamingDetokenizer:
    """A decoder that takes token ids one by one and returns their text as it becomes complete. Bytes that form no
    character become U+FFFD.
    """

    def __init__(self, piece: Callable[[int], bytes], strip_first_space: bool = False) -> None:
        """Make a decoder. `piece(token_id)` returns a token's bytes. With `strip_first_space` a space at the start of
        the first token is removed, since SentencePiece adds one to each text.
        """
        self._piece = piece
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def push(self, token_id: int) -> str:
        """Add `token_id`, and return the text that is complete since the last call. It is "" as long as a character
        lacks bytes.
        """
        return self._decoded(self._next(token_id))

    def place(self, token_id: int) -> int:
        """Add `token_id`, and return the index, in the text of all tokens so far, of the character that contains the
        token's first byte.
        """
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
        """Return the last text after all tokens were added: U+FFFD if the last character lacks bytes, otherwise ""."""
        return self._decoder.decode(b"", final=True)


class SpecialTokens:
    """A splitter of text at special tokens, which is done before anything else is tokenised. The whole text is searched
    for the longer special tokens first, as in llama.cpp: of two that overlap, the longer is found.
    """

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
        """Return `text` as a list, in order, of plain texts (str, never empty) and ids of special tokens (int). Tokens
        of the type CONTROL are found only with `parse_special`; without it their names in the text are plain text.
        """
        stretches: list[str | int] = [text] if text else []
        for special, token_id in self._all if parse_special else self._user_defined:
            if special in text:
                stretches = _split_by(stretches, special, token_id, strip=token_id in self._strip_after)
        return stretches


def _split_by(stretches: Sequence[str | int], special: str, token_id: int, *, strip: bool) -> list[str | int]:
    """Return `stretches` with each `special` in them replaced; `strip`: the white space behind it belongs to it."""
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


class Tokenizer:
    """A tokenizer that turns text into a model's token ids and back. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.end_ids = vocabulary.end_ids  # of tokens that end a generation: EOS, end of turn, and their kin
        sentence_piece = vocabulary.model == "llama"
        self._encode_stretch: Callable[[str], list[int]] = (
            sentencepiece.SentencePieceEncoder(vocabulary)
            if sentence_piece
            else byte_level.byte_level_encoder(vocabulary)
        )
        self._special = SpecialTokens(vocabulary)
        self._pieces: dict[int, bytes] = {}
        self._sentence_piece = sentence_piece
        silent = sentence_piece or byte_level.pre_tokenizer(vocabulary.pre).add_bos
        self.add_bos = silent if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_eos = bool(vocabulary.add_eos)
        prefix = vocabulary.add_space_prefix
        self._space_prefix = sentence_piece and prefix is not False
        for flag, token_id, name in (
            (self.add_bos, vocabulary.bos_id, "bos"),
            (self.add_eos, vocabulary.eos_id, "eos"),
        ):
            if flag and token_id is None:
                raise TokenizerError(
                    f"the file asks to add a {name.upper()} token but has no valid tokenizer.ggml.{name}_token_id"
                )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Return the tokenizer that a GGUF file's `metadata` describe. Raises TokenizerError if that is impossible."""
        return cls(Vocabulary.from_metadata(metadata))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> npt.NDArray[np.int32]:
        """Return the token ids of `text`, int32 [n].

        With `add_special`, BOS and EOS are added if the model wants them. With `parse_special`, names of control tokens
        in the text become these tokens: right for a rendered chat template, wrong for text that a user typed. Raises
        TokenizerError for a text with a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None
        ids: list[int] = []
        if add_special and self.add_bos:
            ids.append(_required(self.vocabulary.bos_id))
        after_special = True
        for stretch in self._special.split(text, parse_special):
            if isinstance(stretch, int):
                ids.append(stretch)
            else:
                ids.extend(self._encode_plain(stretch, after_special))
            after_special = isinstance(stretch, int)
        if add_special and self.add_eos:
            ids.append(_required(self.vocabulary.eos_id))
        return np.array(ids, np.int32)

    def encode_onwards(self, text: str) -> list[int]:
        """Return the token ids of a plain `text` that continues an earlier text. No space is put before it."""
        return list(self._encode_plain(text, after_special=False))

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:
        if self._sentence_piece:
            if after_special and self._space_prefix:
                text = " " + text
            text = text.replace(" ", sentencepiece.SPACE)
        return self._encode_stretch(text)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of the tokens `ids`. Control tokens are shown only with `special`. Broken UTF-8 becomes
        U+FFFD.
        """
        stream = self.stream(special)
        return "".join([*(stream.push(int(token_id)) for token_id in ids), stream.finish()])

    def stream(self, special: bool = False, continues: bool = False) -> StreamingDetokenizer:
        """Return a decoder that turns the tokens of one answer into text one by one. With `special` it shows control
        tokens. With `continues` it keeps a leading space, because text precedes the answer.
        """
        piece = self.piece if special else self._visible_piece
        return StreamingDetokenizer(piece, strip_first_space=self._space_prefix and not continues)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of the token `token_id`; for a control token, the bytes of its name. Raises IndexError for
        an unknown id.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            if not 0 <= token_id < len(self.vocabulary.tokens):
                raise IndexError(f"token id {token_id} is outside a vocabulary of {len(self.vocabulary.tokens)}")
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        text, kind = self.vocabulary.tokens[token_id], int(self.vocabulary.kinds[token_id])
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text.encode()
        return sentencepiece.token_bytes(text, kind) if self._sentence_piece else byte_level.token_bytes(text)

    def _visible_piece(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return b"" if token_id in self._hidden else piece

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """The ids that are never shown as text."""
        return frozenset(np.flatnonzero(np.isin(self.vocabulary.kinds, (CONTROL, UNKNOWN))).tolist())

    @cached_property
    def digest(self) -> str:
        """A digest, 32 hex digits, of everything in the vocabulary that influences which token ids a text gets."""
        vocabulary = self.vocabulary
        state = hashlib.blake2b(digest_size=16)
        flags = (self.add_bos, self.add_eos, self._space_prefix, vocabulary.bos_id, vocabulary.eos_id)
        state.update(repr((vocabulary.model, vocabulary.pre, len(vocabulary.tokens), flags)).encode())
        for strings in (vocabulary.tokens, vocabulary.merges):
            state.update("\0".join(strings).encode())
        for numbers in (vocabulary.kinds, vocabulary.scores):
            state.update(np.ascontiguousarray(numbers).tobytes())
        if vocabulary.strip_after:
            state.update(repr(sorted(vocabulary.strip_after)).encode())
        return state.hexdigest()


def _required(token_id: int | None) -> int:
    assert token_id is not None, "checked at construction"
    return token_id
