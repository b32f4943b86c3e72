"""Answers that must match a JSON schema, a regular expression or a Lark grammar, by the library llguidance.

The module translates the engine's vocabulary and a grammar's text into llguidance's forms, and makes the checks that
report a bad grammar as the caller's mistake. llguidance parses and computes masks
(https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of derivatives, masks from a walk through the
vocabulary's trie). It is optional: without it everything but constrained answers works.

JSON is written without optional white space, so that a small model cannot fill its answer with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import UsageError
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.vocabulary import CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from kvstore_proto.version import pip_install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from kvstore_engine.batching.constraint import Constraint

Kind = Literal["json_schema", "regex", "lark"]
ANY_OBJECT = '{"type":"object"}'
MAX_GRAMMAR_BYTES = 1 << 18
_SILENT = 0  # its warnings quote answers, which belong in no log
_KEPT_GRAMMARS = 64
_MOST_COMPILING_S = 0.5  # of CPU time
_NOT_TEXT = b"\xff"  # llguidance's mark of a special token: no grammar over text matches it
_MOST_MESSAGE = 300
JSON_OPTIONS = {"whitespace_flexible": False}


class GrammarError(UsageError):
    """An error: a grammar cannot be used, or the library llguidance is missing. The message says which of the two."""


class ConstraintFailed(RuntimeError):
    """An error: the parser of a grammar gave up in the middle of an answer, for example at a limit on its size."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must match: a JSON schema as JSON text, a regular expression, or a grammar in Lark's
    syntax.
    """

    kind: Kind
    text: str


def check_grammar(grammar: Grammar) -> None:
    """Raise GrammarError if `grammar` (a JSON schema, a regular expression or a Lark grammar) cannot be used to
    constrain answers, or takes more than half a second to compile.
    """
    begin_s = time.thread_time()
    error = _library().LLMatcher.validate_grammar(_compiled(grammar))
    if error and not error.startswith("WARNING"):
        raise GrammarError(f"the {_NAMES[grammar.kind]} cannot be used: {_one_line(error)}")
    if time.thread_time() - begin_s > _MOST_COMPILING_S:
        raise GrammarError(f"the {_NAMES[grammar.kind]} is too complex: it would delay other answers")


class Constrainer:
    """A maker of constraints (rules that an answer must follow) for one model. `tokenizer` is the model's, and `rows`
    is the number of entries of its logits.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer, self._rows = tokenizer, rows
        self._compile = lru_cache(_KEPT_GRAMMARS)(self._fresh)

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary now, which takes some 0.1 s, so that the first constrained request need
        not.
        """
        _ = self._vocabulary

    def constraint(self, grammar: Grammar) -> Callable[[], Constraint]:
        """Return a function that makes a new constraint by `grammar` for each answer. Raises GrammarError if the
        grammar cannot be used.
        """
        first, words = self._compile(grammar), -(-self._rows // 32)
        return lambda: _Matching(first.deep_copy(), words)

    def _fresh(self, grammar: Grammar) -> LLMatcher:
        matcher: LLMatcher = _library().LLMatcher(self._vocabulary, _compiled(grammar), log_level=_SILENT)
        if matcher.is_error():
            raise GrammarError(f"the {_NAMES[grammar.kind]} cannot be used: {_one_line(matcher.get_error())}")
        try:
            first = _Matching(matcher.deep_copy(), -(-self._rows // 32)).mask()
        except ConstraintFailed as error:
            raise GrammarError(f"no answer matches the {_NAMES[grammar.kind]}: {error}") from None
        if first is not None and not first.any():
            raise GrammarError(f"no answer matches the {_NAMES[grammar.kind]}: not even a first token is allowed")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The token bytes as a trie: some 0.1 s for 50,000 tokens, once."""
        library = _library()
        vocabulary: LLTokenizer = library.LLTokenizer(
            library.TokenizerWrapper(_Spelling(self._tokenizer)),
            n_vocab=self._rows,
            eos_token=sorted(self._tokenizer.end_ids),
        )
        return vocabulary


def special_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the special token whose name is `text`; None if the vocabulary has no such token. In a grammar
    it is written `<[id]>`.
    """
    tokens = tokenizer.vocabulary.tokens
    found = [token for token, written in enumerate(tokens) if written == text]
    return next((token for token in found if _is_special(tokenizer, token)), None)


class _Spelling:
    """The engine's tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        pieces = [tokenizer.piece(token) for token in range(len(vocabulary.tokens))]
        special = np.array([_is_special(tokenizer, token) for token in range(len(pieces))], np.bool_)
        self.tokens = [_NOT_TEXT + piece if special[token] else piece for token, piece in enumerate(pieces)]
        self.special_token_ids = [int(token) for token in np.flatnonzero(special)]
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_id = next(iter(sorted(tokenizer.end_ids)), 0)
        self._encode = tokenizer.encode_onwards

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens by which the model would write text for which a grammar leaves no choice."""
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


class _Matching:
    """The state of one answer. Implements `batching.Constraint`."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._bits: npt.NDArray[np.uint32] = np.zeros(words, np.uint32)

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> npt.NDArray[np.uint32] | None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise ConstraintFailed(f"the constraint cannot be followed: {_one_line(self._matcher.get_error())}")
        return self._bits

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)  # where that fails, the next mask says why


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def _compiled(grammar: Grammar) -> str:
    """Return the grammar in the text form that llguidance takes."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise GrammarError(f"the {_NAMES[grammar.kind]} is not Unicode: it holds half a surrogate pair") from None
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the {_NAMES[grammar.kind]} has more than {MAX_GRAMMAR_BYTES} bytes")
    matcher: type[LLMatcher] = _library().LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return matcher.grammar_from_lark(grammar.text)
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema must be an object")
    try:
        return matcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]  # a TypedDict
    except ValueError as error:
        raise GrammarError(f"the JSON schema cannot be used: {_one_line(str(error))}") from None


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    kind = tokenizer.vocabulary.kinds[token]
    if kind == USER_DEFINED:
        piece = tokenizer.piece(token)
        return piece.startswith(b"<") and piece.endswith(b">") and len(piece) > 2
    return kind in (CONTROL, UNKNOWN, UNUSED)


def _one_line(text: str) -> str:
    """Return an error as one line, without the parser's state, which quotes the answer."""
    return " ".join(text.partition("<state>")[0].split())[:_MOST_MESSAGE]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError(f"constrained answers need llguidance: {pip_install('server')}") from None
    return llguidance
