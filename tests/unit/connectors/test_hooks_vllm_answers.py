"""Ends of answers are reported to every rank's chain, a little later, and no request waits for that."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvstore_connectors.vllm.answers import AnswerReporter, EndedAnswer
from kvstore_connectors.vllm.kv_hints import PAUSE, PREFETCH, VERSION
from kvstore_connectors.vllm.orders import RequestPrefix
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys, block_keys, pack_tokens
from tests.reference.running_daemon import eventually

TOKENS = list(range(8))


class Listening:
    """A session that notes what it hears; `fails` at first. `stored` says how many blocks there are, each time."""

    def __init__(self, root: bytes, *, fails: bool = False, stored: Iterable[int] = ()) -> None:
        self.stored = iter(stored)
        self.heard: list[tuple[Any, int]] = []
        self.expected: list[tuple[Any, Any]] = []
        self.prefetched: list[Any] = []
        self.is_reported = threading.Event()
        self._root, self._fails = root, fails

    def keys(self, tokens: Any, group: int | None = None) -> BlockKeys | None:
        return block_keys(self._root, tokens, block_tokens=4, engine_block_tokens=4, hash_name="blake2b")

    def prefetch(self, tokens: Any = None, *, keys: Any = None, in_s: float | None = None) -> None:
        self.prefetched.append(in_s)

    def hint(
        self,
        tokens: Any = None,
        *,
        keys: Any = None,
        due_in_s: Any = None,
        next_step: Any = None,
        answer_tokens: int = 0,
    ) -> int:
        if self._fails:
            self._fails = False
            raise KVStoreError(ErrorKind.INTERNAL, "closed")
        self.expected.append((next_step, due_in_s))
        self.heard.append((keys if keys is not None else tokens.tolist(), answer_tokens))
        found = next(self.stored, 2)
        if found == 2:
            self.is_reported.set()
        return found


def test_every_shard_hears_of_it_in_its_own_keys() -> None:
    shards = [Listening(b"root of tenant 1"), Listening(b"root of tenant 2")]
    reporter = AnswerReporter(shards, say=print, delay_s=0.0)
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS), (b"image", b"image")), 2, 5))
    assert all(shard.is_reported.wait(30) for shard in shards)
    reporter.close()
    (first, tokens), (second, _) = shards[0].heard[0], shards[1].heard[0]
    assert tokens == 5 and len(first) == len(second) == 2 and first != second


def test_a_session_that_refuses_costs_one_hint() -> None:
    session = Listening(b"root of tenant 1", fails=True)
    reporter = AnswerReporter([session], say=print, delay_s=0.0)
    for tokens in (1, 2):
        reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, tokens))
    assert session.is_reported.wait(30)
    reporter.close()
    assert session.heard == [(TOKENS, 2)]


def test_it_is_reported_again_while_blocks_are_missing() -> None:
    session = Listening(b"root of tenant 1", stored=(0, 1, 2))
    reporter = AnswerReporter([session], say=print, delay_s=1e-3)
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 7))
    assert session.is_reported.wait(30)
    reporter.close()
    assert [tokens for _, tokens in session.heard] == [7] * 3


def test_what_is_never_stored_is_given_up() -> None:
    session, now = Listening(b"root of tenant 1", stored=[0] * 9), [0.0]
    reporter = AnswerReporter([session], say=print, clock=lambda: now[0])
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 7))
    waits: list[float] = []
    for sent in range(1, 7):
        waits.append(round(reporter._waiting[0].at_s - now[0], 3))
        now[0] = reporter._waiting[0].at_s
        with reporter._changed:
            reporter._changed.notify()
        assert eventually(lambda sent=sent: len(session.heard) == sent and bool(reporter._waiting) == (sent < 6))
    reporter.close()
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]


def test_nothing_is_reported_before_its_time_nor_after_the_end() -> None:
    now, session = [100.0], Listening(b"root of tenant 1")
    reporter = AnswerReporter([session], say=print, delay_s=5.0, clock=lambda: now[0])
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 1))
    now[0] = 104.9
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 2))
    assert not session.heard
    now[0] = 105.0
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 3))  # which wakes it up
    assert session.is_reported.wait(30)
    reporter.close()
    assert [tokens for _, tokens in session.heard] == [1]
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 4))
    assert len(session.heard) == 1


def test_what_an_orchestrator_expects_is_reported_with_the_answer_and_counts_down() -> None:
    session, now = Listening(b"root of tenant 1", stored=(0, 2)), [0.0]
    actions = [
        SimpleNamespace(
            action_type=PAUSE, action_version=VERSION, payload={"next_step": "tool_call", "returns_in_s": 3}
        ),
        SimpleNamespace(action_type=PREFETCH, action_version=VERSION, payload={"in_s": 2.5}),
    ]
    reporter = AnswerReporter([session], say=print, clock=lambda: now[0])
    reporter.ended(EndedAnswer(RequestPrefix(pack_tokens(TOKENS)), 2, 7, SimpleNamespace(actions=actions)))
    for at_s, sent in ((1.0, 1), (2.0, 2)):
        assert eventually(lambda: bool(reporter._waiting))
        now[0] = at_s
        with reporter._changed:
            reporter._changed.notify()
        assert eventually(lambda sent=sent: len(session.heard) == sent)
    assert eventually(lambda: bool(session.prefetched))
    reporter.close()
    assert session.expected == [("tool_call", 2.0), ("tool_call", 1.0)]
    assert session.prefetched == [0.5], "once, when its blocks are there"
