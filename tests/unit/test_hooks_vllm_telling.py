"""Ends of answers are told to every rank's chain, a little later, and in no way that anybody waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kvstore_client.hooks.vllm.orders import Prefix
from kvstore_client.hooks.vllm.telling import Answer, Teller
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys, block_keys, pack_tokens
from tests.reference.running_daemon import eventually

TOKENS = list(range(8))


class Listening:
    """A session that notes what it hears; `fails` at first. `stored` says how many blocks there are, each time."""

    def __init__(self, root: bytes, *, fails: bool = False, stored: Iterable[int] = ()) -> None:
        self.stored = iter(stored)
        self.heard: list[tuple[Any, int]] = []
        self.is_told = threading.Event()
        self._root, self._fails = root, fails

    def keys(self, tokens: Any, group: int | None = None) -> BlockKeys | None:
        return block_keys(self._root, tokens, block_tokens=4, engine_block_tokens=4, hash_name="blake2b")

    def hint(self, tokens: Any = None, *, keys: Any = None, answer_tokens: int = 0) -> int:
        if self._fails:
            self._fails = False
            raise KVStoreError(ErrorKind.INTERNAL, "closed")
        self.heard.append((keys if keys is not None else tokens.tolist(), answer_tokens))
        found = next(self.stored, 2)
        if found == 2:
            self.is_told.set()
        return found


def test_every_shard_hears_of_it_in_its_own_keys() -> None:
    shards = [Listening(b"root of tenant 1"), Listening(b"root of tenant 2")]
    teller = Teller(shards, delay_s=0.0)
    teller.ended(Answer(Prefix(pack_tokens(TOKENS), (b"image", b"image")), 2, 5))
    assert all(shard.is_told.wait(30) for shard in shards)
    teller.close()
    (first, tokens), (second, _) = shards[0].heard[0], shards[1].heard[0]
    assert tokens == 5 and len(first) == len(second) == 2 and first != second


def test_a_session_that_refuses_costs_one_hint() -> None:
    session = Listening(b"root of tenant 1", fails=True)
    teller = Teller([session], delay_s=0.0)
    for tokens in (1, 2):
        teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, tokens))
    assert session.is_told.wait(30)
    teller.close()
    assert session.heard == [(TOKENS, 2)]


def test_it_is_told_again_while_blocks_are_missing() -> None:
    session = Listening(b"root of tenant 1", stored=(0, 1, 2))
    teller = Teller([session], delay_s=1e-3)
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 7))
    assert session.is_told.wait(30)
    teller.close()
    assert [tokens for _, tokens in session.heard] == [7] * 3


def test_what_is_never_stored_is_given_up() -> None:
    session, now = Listening(b"root of tenant 1", stored=[0] * 9), [0.0]
    teller = Teller([session], clock=lambda: now[0])
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 7))
    waits: list[float] = []
    for told in range(1, 7):
        waits.append(round(teller._waiting[0].at_s - now[0], 3))
        now[0] = teller._waiting[0].at_s
        with teller._changed:
            teller._changed.notify()
        assert eventually(lambda told=told: len(session.heard) == told and bool(teller._waiting) == (told < 6))
    teller.close()
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]


def test_nothing_is_told_before_its_time_nor_after_the_end() -> None:
    now, session = [100.0], Listening(b"root of tenant 1")
    teller = Teller([session], delay_s=5.0, clock=lambda: now[0])
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 1))
    now[0] = 104.9
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 2))
    assert not session.heard
    now[0] = 105.0
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 3))  # which wakes it up
    assert session.is_told.wait(30)
    teller.close()
    assert [tokens for _, tokens in session.heard] == [1]
    teller.ended(Answer(Prefix(pack_tokens(TOKENS)), 2, 4))
    assert len(session.heard) == 1
