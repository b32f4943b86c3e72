"""Envelopes of hints as vLLM carries them: what is read, what is passed over, and that none can do harm."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_connectors.vllm.kv_hints import END, PAUSE, PREFETCH, VERSION, HintedChain, KvHints


def action(kind: Any, payload: Any, version: Any = VERSION) -> Any:
    return SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)


def envelope(*actions: Any) -> Any:
    return SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ((), HintedChain()),
        ((action(PREFETCH, {}),), HintedChain(wants_prefetch=True)),
        ((action(PREFETCH, {"in_s": 30}),), HintedChain(wants_prefetch=True, prefetch_in_s=30.0)),
        ((action(PAUSE, {"next_step": "tool_call", "returns_in_s": 1.5}),), HintedChain("tool_call", 1.5)),
        ((action(PAUSE, {"next_step": "end_of_turn"}),), HintedChain("end_of_turn")),
        ((action(PAUSE, {"returns_in_s": 9, "later": "field"}),), HintedChain(None, 9.0)),
        ((action(END, {}),), HintedChain("closed")),
        ((action(PAUSE, {"returns_in_s": 9}), action(END, {})), HintedChain("closed")),
        ((action(PREFETCH, {}), action(PAUSE, {"returns_in_s": 9})), HintedChain(None, 9.0, True)),
    ],
)
def test_what_is_read(actions: tuple[Any, ...], expected: HintedChain) -> None:
    said: list[str] = []
    hints = KvHints(said.append)
    assert hints.read(envelope(*actions)) == expected
    assert (hints.ignored, hints.malformed, said) == (0, 0, [])


def test_a_request_without_hints_expects_nothing() -> None:
    hints = KvHints(print)
    assert hints.read(None) == HintedChain() and not hints.malformed


def test_actions_of_others_and_of_other_versions_are_counted_and_the_rest_is_read() -> None:
    said: list[str] = []
    hints = KvHints(said.append)
    others = (action("kv.fetch", {"block_hashes": [1]}, "1.0"), action(END, {}, "2"), action(7, None), action([], {}))
    assert hints.read(envelope(*others, action(PAUSE, {"returns_in_s": 4}))) == HintedChain(None, 4.0)
    assert (hints.ignored, hints.malformed, said) == (4, 0, [])


@pytest.mark.parametrize(
    "broken",
    [
        {"actions": [action(PREFETCH, {})]},
        SimpleNamespace(),
        SimpleNamespace(actions=None),
        envelope(SimpleNamespace()),
        envelope(None),
        envelope(action(PREFETCH, [1])),
        envelope(action(PREFETCH, {"in_s": -1})),
        envelope(action(PREFETCH, {"in_s": True})),
        envelope(action(PAUSE, {"returns_in_s": "soon"})),
        envelope(action(PAUSE, {"returns_in_s": math.nan})),
        envelope(action(PAUSE, {"returns_in_s": 1 << 400})),
        envelope(action(PAUSE, {"next_step": "nap"})),
        envelope(action(PAUSE, {"next_step": ["tool_call"], "returns_in_s": 1})),
    ],
)
def test_what_makes_no_sense_is_said_once_and_expects_nothing(broken: Any) -> None:
    said: list[str] = []
    hints = KvHints(said.append)
    assert [hints.read(broken) for _ in range(3)] == [HintedChain()] * 3
    assert (hints.malformed, len(said)) == (3, 1)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.sampled_from([PREFETCH, PAUSE, END]) | _VALUES, _VALUES, _VALUES), max_size=4))
def test_no_envelope_raises(parts: list[tuple[Any, Any, Any]]) -> None:
    KvHints(lambda why: None).read(envelope(*(action(kind, payload, version) for kind, payload, version in parts)))
