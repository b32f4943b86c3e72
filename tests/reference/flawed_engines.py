"""Connectors with one mistake each, of the kinds that authors make: the suite must find every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvstore_client import Lease, connect
from kvstore_client.testing import EngineSetting, MockEngine, Restored, open_mock_engine
from kvstore_client.testing.mock_engine import BLOCK_TOKENS, mock_fingerprint


class TrustsEndedLeases(MockEngine):
    """Never asks whether the lease was still valid after the copy."""

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        assert self._session is not None
        with self._session.get(tokens, max_blocks=(len(tokens) - 1) // BLOCK_TOKENS) as lease:
            for block in range(len(lease)):
                self._scatter(table, block, lease.payload(block))
            return lease.tokens


class KeepsLeases(MockEngine):
    """Never gives a lease back."""

    kept: list[Lease]

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        restored = super()._load(table, tokens)
        if self._session is not None:
            self.kept = [*getattr(self, "kept", []), self._session.get(tokens)]
        return restored


class TakesTheLastToken(MockEngine):
    """Restores a prompt of whole blocks whole, and has nothing to start its answer from."""

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        return super()._load(table, [*tokens, 0])


class StoresTooEarly(MockEngine):
    """Stores blocks before they are computed."""

    def store(self, tokens: Sequence[int]) -> None:
        size = mock_fingerprint("first").payload_bytes()
        payloads = [np.zeros(size, np.uint8)] * (len(tokens) // BLOCK_TOKENS)
        if self._session is not None:
            self._session.put(tokens, payloads=payloads)


class RestoresNothing(MockEngine):
    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        return 0


class FailsWithTheStore(MockEngine):
    """Treats a put that found no room, or no daemon, as an error."""

    def store(self, tokens: Sequence[int]) -> None:
        super().store(tokens)
        if self._session is not None and not self._session.lookup(tokens).blocks:
            raise RuntimeError("the prompt could not be stored")


class HalfAnAnswer(MockEngine):
    """Reports what it restored and forgets to compute the rest."""

    def restore(self, tokens: Sequence[int]) -> Restored:
        whole = super().restore(tokens)
        if not whole.tokens:
            return whole
        return Restored(whole.tokens, super().restore(tokens[: whole.tokens]).output)


def _open(kind: type[MockEngine], setting: EngineSetting) -> MockEngine:
    engine = open_mock_engine(setting)
    engine.__class__ = kind
    return engine


def trusts_ended_leases(setting: EngineSetting) -> MockEngine:
    return _open(TrustsEndedLeases, setting) if setting.socket_dir else open_mock_engine(setting)


keeps_leases = partial(_open, KeepsLeases)
takes_the_last_token = partial(_open, TakesTheLastToken)
stores_too_early = partial(_open, StoresTooEarly)
restores_nothing = partial(_open, RestoresNothing)
fails_with_the_store = partial(_open, FailsWithTheStore)
half_an_answer = partial(_open, HalfAnAnswer)


def one_fingerprint_for_all(setting: EngineSetting) -> MockEngine:
    """Leaves the model out of the fingerprint."""
    if setting.socket_dir is None:
        return open_mock_engine(setting)
    return MockEngine(setting.model, connect(setting.socket_dir, fingerprint=mock_fingerprint("any"), deadline_s=2.0))


def requires_the_store(setting: EngineSetting) -> MockEngine:
    """Does not start where there is no daemon."""
    if setting.socket_dir is None:
        return open_mock_engine(setting)
    session = connect(setting.socket_dir, fingerprint=mock_fingerprint(setting.model), required=True)
    return MockEngine(setting.model, session)
