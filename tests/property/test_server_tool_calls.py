"""Tool calls are read out of any text, cut anywhere, as a plain reader of the whole text finds them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.server.json_text import JsonObject
from kvstore_engine.server.tools import ToolCall, ToolCallReader, understands
from tests.reference.examples import examples

_DECODER = json.JSONDecoder(
    object_pairs_hook=lambda pairs: pairs, parse_float=str, parse_int=str, parse_constant=lambda name: 1 / 0
)
_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
_PLAIN = ("f", '{"x": "<b>"}')


def _read(pieces: list[str], *, in_thought: bool = False) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(in_thought)
    found = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert "" not in found
    text = "".join(part for part in found if isinstance(part, str))
    return text, [(part.name, part.arguments) for part in found if isinstance(part, ToolCall)]


def _cut(answer: str, size: int) -> list[str]:
    return [answer[first : first + size] for first in range(0, len(answer), size)]


def _plainly(answer: str, *, in_thought: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The same by the whole text and Python's JSON."""
    texts, calls, at = [], [], 0
    may_think = True
    while at < len(answer):
        begin = re.compile(r"\s*<think>").match(answer, at) if may_think else None
        if begin or in_thought:
            end = answer.find("</think>", at)
            end = len(answer) if end < 0 else end + len("</think>")
            texts.append(answer[at:end])
            at, in_thought = end, False
            continue
        if read := _call_at(answer, at):
            call, at = read
            calls.append(call)
            may_think = True
            continue
        texts.append(answer[at])
        may_think = may_think and answer[at].isspace()
        at += 1
    text = "".join(texts)
    return ("" if calls and not text.strip() else text), calls


def _call_at(answer: str, at: int) -> tuple[tuple[str, str], int] | None:
    opening = re.compile(r"<tool_call>[ \t\r\n]*(?=\{)").match(answer, at)
    if opening is None:
        return None
    try:
        pairs, end = _DECODER.raw_decode(answer, opening.end())
    except (ValueError, ZeroDivisionError):
        return None
    closing = re.compile(r"[ \t\r\n]*</tool_call>").match(answer, end)
    rest = answer[end:].lstrip(" \t\r\n")
    names = [name for name, _ in pairs]
    if closing is None and not "</tool_call>".startswith(rest):
        return None
    if sorted(names) not in (["name"], ["arguments", "name"], ["name", "parameters"]):
        return None
    name = dict(pairs)["name"]
    if not isinstance(name, str) or re.search(r'"name"\s*:\s*[^\s"]', answer[opening.end() : end]):
        return None
    arguments = "{}"
    for at in range(opening.end(), end):  # the value's text: what follows the outermost member's colon
        member = re.compile(r'"(?:arguments|parameters)"\s*:\s*').match(answer, at)
        depth = answer[opening.end() : at]
        if member and depth.count("{") - depth.count("}") == 1:
            value, stop = _DECODER.raw_decode(answer, member.end())
            arguments = _unwrapped(value) if answer[member.end()] == '"' else None
            arguments = answer[member.end() : stop] if arguments is None else arguments
            break
    return (name, arguments), len(answer) if closing is None else closing.end()


def _unwrapped(text: str) -> str | None:
    """The text, if it is a JSON object."""
    try:
        _DECODER.decode(text)
    except (ValueError, ZeroDivisionError):
        return None
    return text if text.lstrip().startswith("{") else None


_VALUES = st.recursive(
    st.sampled_from(
        ["1e400", "-0", "0.12345678901234567890", "1.0", "true", "null", '"a </tool_call> b"',
         '"\\" <tool_call>\\n\\u00e9"',
         '"\\\\"', '"<think>"', '""', '"{\\"a\\": 1e400}"', '"{}x"']
    ),
    lambda inner: st.lists(inner, max_size=3).map(lambda values: f"[ {', '.join(values)}]")
    | st.lists(st.tuples(st.sampled_from(['"a"', '"b "', '"a"']), inner), max_size=3).map(
        lambda pairs: "{" + " ,".join(f"{name}:{value}" for name, value in pairs) + " }"
    ),
    max_leaves=6,
)  # fmt: skip
_CALLS = st.builds(
    lambda space, value, name, last: (
        f'<tool_call>{space}{{"name": "{name}"{space},"{last}": {value}}}{space}</tool_call>',
        name,
        json.loads(value) if value.startswith('"{\\"') else value,
    ),
    st.sampled_from(["", "\n", " \t", "\r\n"]),
    _VALUES,
    st.sampled_from(["f", "größe", "a b"]),
    st.sampled_from(["arguments", "parameters"]),
)
_PROSE = st.sampled_from(
    ["a", " ", "\n", "The mark <tool_call> opens", "</tool_call>", "<tool_call>", "<tool", "{", '"name"', "1 < 2 ",
     "</think>",
     '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name":"f","arguments":{"x":[1,}}</tool_call>', "🙂 é",
     '<tool_call>{"name":"f","arguments":{}} and', '<tool_call>{"name":"f","more":1}</tool_call>', "<think>"]
)  # fmt: skip


@given(st.lists(_PROSE | _CALLS, max_size=7), st.booleans(), st.data())
@settings(max_examples=examples(300))
def test_every_cut_of_a_text_gives_the_same_content_and_calls(
    parts: list[Any], in_thought: bool, data: st.DataObject
) -> None:
    answer = "".join(part if isinstance(part, str) else part[0] for part in parts)
    expected = _plainly(answer, in_thought=in_thought)
    assert _read([answer], in_thought=in_thought) == expected
    assert _read(list(answer), in_thought=in_thought) == expected
    places = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[first:last] for first, last in zip([0, *places], [*places, len(answer)], strict=True)]
    assert _read(pieces, in_thought=in_thought) == expected


@given(
    st.lists(_CALLS, min_size=1, max_size=4), st.lists(st.sampled_from(["", "\n", "Then.\n", " - a  b"]), min_size=5)
)
@settings(max_examples=examples(100))
def test_calls_are_the_models_characters_and_the_rest_is_content(calls: list[Any], texts: list[str]) -> None:
    answer = texts[0] + "".join(call[0] + text for call, text in zip(calls, texts[1:], strict=False))
    content = "".join(texts[: len(calls) + 1])
    expected = (content if content.strip() else "", [(name, value) for _, name, value in calls])
    assert all(_read([answer[:cut], answer[cut:]]) == expected for cut in range(len(answer) + 1))


@given(st.text(alphabet='<tool_call>/ {}"name:\\\n', max_size=60), st.integers(1, 9))
def test_no_character_of_an_answer_is_lost(answer: str, size: int) -> None:
    assert _read(_cut(answer, size)) == (answer, [])


@given(st.text(alphabet='{}[]",:\\u0e1-.+tfn \n\x01é', max_size=30) | _VALUES.map(lambda value: f'{{"a":{value} }}'))
@settings(max_examples=examples(500))
def test_an_object_is_followed_as_python_reads_it(text: str) -> None:
    text = "{" + text.removeprefix("{")
    try:
        end = _DECODER.raw_decode(text)[1]
    except (ValueError, ZeroDivisionError):
        end = None
    whole, piecewise = JsonObject(), JsonObject()
    whole.follow(text)
    for size in range(len(text) + 1):
        piecewise.follow(text[:size])
    assert (whole.state, whole.end, whole.names, whole.values) == (
        piecewise.state, piecewise.end, piecewise.names, piecewise.values
    )  # fmt: skip
    assert (whole.state == "whole") == (end is not None)
    assert end is None or (whole.end == end and len(whole.names) == len(whole.values))


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("plain text", "plain text", []),
        ("  \n", "  \n", []),
        (_CALL, "", [_PLAIN]),
        (f"\n{_CALL}\n\n{_CALL}\n", "", [_PLAIN] * 2),
        (f"Let me see.\n{_CALL}\n{_CALL}\nOne  line.\n", "Let me see.\n\n\nOne  line.\n", [_PLAIN] * 2),
        (_CALL.removesuffix("</tool_call>"), "", [_PLAIN]),
        (_CALL.removesuffix("_call>"), "", [_PLAIN]),
        (_CALL.removesuffix("}\n</tool_call>"), _CALL.removesuffix("}\n</tool_call>"), []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": "{\\"a\\": 1e400}", "name": "f"}</tool_call>', "", [("f", '{"a": 1e400}')]),
        ('<tool_call>{"name": "f", "arguments": "Rome"}</tool_call>', "", [("f", '"Rome"')]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", '""')]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
            "",
            [("f", '"{\\"a\\": \\"\\ud83d\\"}"')],
        ),
        ('<tool_call>{"name": "\\ud83d"}</tool_call>', '<tool_call>{"name": "\\ud83d"}</tool_call>', []),
        ('<tool_call>{"\\u006eame": "f"}</tool_call>', "", [("f", "{}")]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call> x', '<tool_call>{"name": 5}</tool_call> x', []),
        ('<tool_call>{"name": "f", "name": "g"}</tool_call>', '<tool_call>{"name": "f", "name": "g"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>',) * 2 + ([],),
        ("a <tool_call> cut off", "a <tool_call> cut off", []),
        ("1 < 2 <tool", "1 < 2 <tool", []),
        (f"<tool_call>{_CALL}", "<tool_call>", [_PLAIN]),
        (f"<think>I may {_CALL}</think>\n{_CALL}", f"<think>I may {_CALL}</think>\n", [_PLAIN]),
        (f"<think>unclosed {_CALL}", f"<think>unclosed {_CALL}", []),
        (f"The mark <think> opens a thought. {_CALL}", "The mark <think> opens a thought. ", [_PLAIN]),
        (f"{_CALL}\n<think>{_CALL}</think>", f"\n<think>{_CALL}</think>", [_PLAIN]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tool_calls_are_read_however_the_text_is_cut(answer: str, text: str, calls: list[Any], size: int) -> None:
    assert _read(_cut(answer, size)) == (text, calls)


def test_a_thought_that_the_prompt_has_opened_holds_no_call() -> None:
    answer = f"I may {_CALL} or not.</think>{_CALL}"
    assert _read([answer], in_thought=True) == (f"I may {_CALL} or not.</think>", [_PLAIN])
    assert _read([_CALL], in_thought=True) == (_CALL, [])


def test_text_goes_on_once_no_call_can_follow_a_mark() -> None:
    reader = ToolCallReader()
    assert reader.push("The mark <tool_call>") == ["The mark "]
    assert reader.push(" ") == []
    assert reader.push("opens") == ["<tool_call>", " opens"]
    assert reader.push(' <tool_call>{"name": "f", "x"') == [" ", "<tool_call>", '{"name": "f", "x"']


def test_a_template_with_these_marks_around_another_format_is_not_understood() -> None:
    assert understands("<tool_call>\n{{ call | tojson }}\n</tool_call>")
    assert not understands("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>")
    assert not understands("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>")
    assert not understands("{{ tools }}")
