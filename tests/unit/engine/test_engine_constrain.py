"""Constrained answers: each allowed text is a prefix of a match, and each finished one is a whole match."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.constrain import Constrainer, ConstraintFailed, Grammar, GrammarError, check_grammar
from kvstore_engine.server.tools import CallMarks, ToolCall, ToolCallReader, call_grammar, next_step, strict_grammar
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.vocabulary import CONTROL, USER_DEFINED
from tests.reference.tiny_llama import byte_level_vocabulary, sentencepiece_vocabulary

pytest.importorskip("llguidance", reason="the extra server is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the extra dev is not installed")

_ROWS_PAST = 5  # embeddings may be padded past the vocabulary
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["é", "b"]}, "maxItems": 2},
        "n": {"type": "integer", "minimum": 3, "maximum": 12},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[byte_level_vocabulary, sentencepiece_vocabulary])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_metadata(request.param())


@pytest.fixture(scope="module")
def constrainer(tokenizer: Tokenizer) -> Iterator[Constrainer]:
    made = Constrainer(tokenizer, len(tokenizer.vocabulary.tokens) + _ROWS_PAST)
    made.prepare()
    yield made


def _answer(constrainer: Constrainer, tokenizer: Tokenizer, grammar: Grammar, seed: int) -> str:
    """Tokens drawn at random from what is allowed, until the constraint or an end token ends it."""
    constraint, random = constrainer.constraint(grammar)(), np.random.default_rng(seed)
    text = b""
    for _ in range(400):
        if constraint.finished:
            return text.decode()
        mask = constraint.mask()
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert allowed.size
        assert allowed.max() < len(tokenizer.vocabulary.tokens)
        token = int(random.choice(allowed))
        if token in tokenizer.end_ids:
            return text.decode()
        text += tokenizer.piece(token)
        constraint.accept(token)
    raise AssertionError(f"no end: {text!r}")


@given(seed=st.integers(0, 1 << 30))
def test_an_answer_is_valid_json(constrainer: Constrainer, tokenizer: Tokenizer, seed: int) -> None:
    text = _answer(constrainer, tokenizer, Grammar("json_schema", json.dumps(_SCHEMA)), seed)
    jsonschema.validate(json.loads(text), _SCHEMA)


@given(seed=st.integers(0, 1 << 30))
def test_an_answer_matches_a_regular_expression(constrainer: Constrainer, tokenizer: Tokenizer, seed: int) -> None:
    pattern = "(é|[a-c]{1,3})-[0-9]{2}"
    assert re.fullmatch(pattern, _answer(constrainer, tokenizer, Grammar("regex", pattern), seed))


def test_an_answer_follows_a_grammar(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    grammar = Grammar("lark", 'start: "yes" | "no" | "(" start ")"\n')
    texts = {_answer(constrainer, tokenizer, grammar, seed) for seed in range(20)}
    assert len(texts) > 1
    assert all(re.fullmatch(r"\(*(yes|no)\)*", text) for text in texts)
    assert all(text.count("(") == text.count(")") for text in texts)


@pytest.mark.parametrize("names", [("f",), ("f", 'g "é"')])
def test_a_forced_call_may_refer_to_definitions_of_its_own(
    constrainer: Constrainer, tokenizer: Tokenizer, names: tuple[str, ...]
) -> None:
    parameters = {
        "type": "object",
        "properties": {"colour": {"$ref": "#/$defs/Colour"}},
        "required": ["colour"],
        "additionalProperties": False,
        "$defs": {"Colour": {"enum": ["red", "green"]}},
    }
    grammar = Grammar(
        "lark", call_grammar([{"name": name, "parameters": parameters} for name in names], CallMarks.of(tokenizer))
    )
    check_grammar(grammar)
    called = set()
    for seed in range(8):
        reader = ToolCallReader()
        (call,) = [*reader.push(_answer(constrainer, tokenizer, grammar, seed)), *reader.finish()]
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments)["colour"] in ("red", "green")
        called.add(call.name)
    assert called == set(names)


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_a_forced_call_is_marked_by_special_tokens_where_there_are_such(kind: int) -> None:
    vocabulary = byte_level_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    first = len(tokens)
    vocabulary["tokenizer.ggml.tokens"] = [*tokens, "<tool_call>", "</tool_call>"]
    vocabulary["tokenizer.ggml.token_type"] = np.append(vocabulary["tokenizer.ggml.token_type"], [kind, kind])
    tokenizer = Tokenizer.from_metadata(vocabulary)
    marks = CallMarks.of(tokenizer)
    assert (marks.unseen != {}) == (kind == CONTROL)
    grammar = Grammar("lark", call_grammar([{"name": "f", "parameters": {"const": {}}}], marks))
    check_grammar(grammar)
    constraint, chosen = Constrainer(tokenizer, first + 2).constraint(grammar)(), []
    while not constraint.finished:
        mask = constraint.mask()
        assert mask is not None
        chosen.append(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1]))
        constraint.accept(chosen[-1])
    assert (chosen[0], chosen[-1]) == (first, first + 1)
    assert not {first, first + 1} & set(chosen[1:-1])
    assert next_step(tokenizer, "tool", chosen) == "tool_call"
    assert next_step(tokenizer, "person", chosen) == next_step(tokenizer, "tool", chosen[1:]) == "end_of_turn"
    reader, stream = ToolCallReader(), tokenizer.stream(continues=True)
    found = [piece for token in chosen for piece in reader.push(stream.push(token) + marks.unseen.get(token, ""))]
    assert [call.name for call in found if isinstance(call, ToolCall)] == ["f"]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"[^\s\S]"),
        Grammar("lark", "start: start"),
        Grammar("lark", "start: A\nA: /a/ & /b/"),
        Grammar("lark", 'start: <nobody_has_this> "a"'),
        Grammar("json_schema", json.dumps({"type": "string", "minLength": 5, "maxLength": 2})),
        Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": False}, "required": ["a"]})),
    ],
)
def test_a_grammar_that_nothing_matches_is_the_callers_mistake(constrainer: Constrainer, grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"no answer matches|cannot be used"):
        constrainer.constraint(grammar)


def test_answers_of_one_request_do_not_share_their_state(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    make = constrainer.constraint(Grammar("regex", "ab"))
    first, second = make(), make()
    (token,) = tokenizer.encode("a", add_special=False).tolist()[-1:]
    before = np.copy(second.mask() if second.mask() is not None else [])
    first.accept(token)
    np.testing.assert_array_equal(second.mask(), before)


def test_a_token_that_is_not_allowed_fails_the_answer(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constraint = constrainer.constraint(Grammar("regex", "ab"))()
    constraint.accept(tokenizer.encode("z", add_special=False).tolist()[-1])
    assert not constraint.finished
    with pytest.raises(ConstraintFailed):
        constraint.mask()


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", '{"type": "wrong"}', "cannot be used"),
        ("json_schema", '{"$ref": "#/nowhere"}', "cannot be used"),
        ("regex", "(ab", "regular expression cannot be used"),
        ("regex", "\ud800", "is not Unicode"),
        ("lark", "start: missing", "grammar cannot be used"),
        ("lark", "x" * (1 << 19), "more than"),
    ],
)
def test_a_bad_grammar_is_the_callers_mistake(constrainer: Constrainer, kind: Any, text: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        check_grammar(Grammar(kind, text))
    with pytest.raises(GrammarError, match=says):
        constrainer.constraint(Grammar(kind, text))


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install '.\[server\]'"):
        check_grammar(Grammar("regex", "a"))


_STRICT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
_FUNCTIONS = [{"name": "é", "parameters": _STRICT, "strict": True}, {"name": "g", "parameters": _STRICT}]


def _with_marks(special: bool) -> Tokenizer:
    vocabulary = byte_level_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    if special:
        vocabulary["tokenizer.ggml.tokens"] = [*tokens, "<tool_call>", "</tool_call>", "<think>", "</think>"]
        vocabulary["tokenizer.ggml.token_type"] = np.append(vocabulary["tokenizer.ggml.token_type"], [USER_DEFINED] * 4)
    return Tokenizer.from_metadata(vocabulary)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("1 < 2, <tool or so", True),
        ("", True),
        ('Yes.\n<tool_call>\n{"name": "é", "arguments": {"x": 12}}\n</tool_call>\nThen.', True),
        ('<tool_call>{"name":"g","arguments":{"y":[ 1.5 ]}}</tool_call>' * 2, True),
        ('<think>I may.</think>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', True),
        ("The mark <tool_call> opens", False),
        ('<tool_call>{"name": "é", "arguments": {"x": "12"}}</tool_call>', False),
        ('<tool_call>{"name": "é", "arguments": {}}</tool_call>', False),
        ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', False),
        ('<tool_call>{"name": "g", "arguments": {}}', False),
    ],
)
def test_calls_of_strict_tools_follow_their_schemas(special: bool, text: str, is_allowed: bool) -> None:
    tokenizer = _with_marks(special)
    grammar = Grammar("lark", strict_grammar(_FUNCTIONS, CallMarks.of(tokenizer)))
    check_grammar(grammar)
    constraint = Constrainer(tokenizer, len(tokenizer.vocabulary.tokens)).constraint(grammar)()
    ids = tokenizer.encode(text, add_special=False, parse_special=True).tolist()
    assert (max(ids, default=0) >= len(tokenizer.vocabulary.tokens) - 4) == (special and ">" in text)
    for token in [*ids, min(tokenizer.end_ids)]:
        mask = constraint.mask()
        assert mask is not None
        if not mask[token // 32] >> (token % 32) & 1:
            assert not is_allowed
            return
        if token in ids:
            constraint.accept(token)
    assert is_allowed
    reader = ToolCallReader()
    reader.push(text)
    reader.finish()
    assert reader.calls == text.count("<tool_call>")
