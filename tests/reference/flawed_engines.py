"""Connectors with one mistake each, of the kinds that authors make: the suite must find every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_client import LayerGroup, Lease, connect
from kvstore_client.testing import (
    EngineSetting,
    KindsEngine,
    MockEngine,
    PromptResult,
    open_kinds_engine,
    open_mock_engine,
)
from kvstore_client.testing.mock_engine import BLOCK_TOKENS, mock_fingerprint
from kvstore_client.testing.mock_kinds import FULL, GROUPS, LATENT, SLIDING, WINDOW


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


class MissesEveryOther(MockEngine):
    """Passes its deadline at every other prompt, which is no mistake: a busy machine does that to any connector."""

    prompts = 0

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        self.prompts += 1
        return 0 if self.prompts % 2 else super()._load(table, tokens)


class FailsWithTheStore(MockEngine):
    """Treats a put that found no room, or no daemon, as an error."""

    def store(self, tokens: Sequence[int]) -> None:
        super().store(tokens)
        if self._session is not None and not self._session.lookup(tokens).blocks:
            raise RuntimeError("the prompt could not be stored")


class HalfAnAnswer(MockEngine):
    """Reports what it restored and forgets to compute the rest."""

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        whole = super().restore(tokens)
        if not whole.tokens:
            return whole
        return PromptResult(whole.tokens, super().restore(tokens[: whole.tokens]).output)


class TakesWhatOneGroupHas(KindsEngine):
    """Full attention: asks one layer group how far all can resume, and does not look at what came of the others."""

    def _load(self, tokens: Sequence[int]) -> int:
        if self._session is None:
            return 0
        blocks = self._session.lookup(tokens[:-1], group=FULL).blocks
        for group in GROUPS:
            needed = self.needed(group, blocks)
            with self._session.get(
                tokens, group=group.group_id, first_block=needed.start, max_blocks=len(needed)
            ) as lease:
                for place, block in enumerate(needed[: len(lease)]):
                    self.scatter(group.group_id, block, lease.payload(place))
        return blocks * BLOCK_TOKENS


class LoadsAShorterWindow(KindsEngine):
    """Sliding window: as many blocks as the window has whole ones."""

    def needed(self, group: LayerGroup, boundary: int) -> range:
        whole = super().needed(group, boundary)
        return whole[-(WINDOW // BLOCK_TOKENS) :] if group.kind == "sliding" else whole


class MixesTheWidths(KindsEngine):
    """Latent: takes the two tensors for halves of equal width."""

    def scatter(self, group: int, block: int, payload: np.ndarray) -> None:
        super().scatter(group, block, np.roll(payload, len(payload) // 2) if group == LATENT else payload)


class TakesAnEarlierState(KindsEngine):
    """Recurrent: takes the state at the beginning of the last block for the one at its end."""

    def needed(self, group: LayerGroup, boundary: int) -> range:
        whole = super().needed(group, boundary)
        return range(whole.start - 1, whole.stop - 1) if group.kind == "recurrent" and boundary > 1 else whole


class NeedsAllWindows(KindsEngine):
    """Sliding window: hits only where every block before the boundary is stored."""

    def _load(self, tokens: Sequence[int]) -> int:
        if self._session is not None and "absent" in self._session.lookup(tokens, group=SLIDING).tiers[:-1]:
            return 0
        return super()._load(tokens)


def _open(kind: type[Any], setting: EngineSetting) -> Any:
    engine: Any = open_mock_engine(setting) if issubclass(kind, MockEngine) else open_kinds_engine(setting)
    engine.__class__ = kind
    return engine


def trusts_ended_leases(setting: EngineSetting) -> MockEngine:
    return _open(TrustsEndedLeases, setting) if setting.socket_dir else open_mock_engine(setting)


keeps_leases = partial(_open, KeepsLeases)
takes_the_last_token = partial(_open, TakesTheLastToken)
stores_too_early = partial(_open, StoresTooEarly)
restores_nothing = partial(_open, RestoresNothing)
misses_every_other = partial(_open, MissesEveryOther)
fails_with_the_store = partial(_open, FailsWithTheStore)
half_an_answer = partial(_open, HalfAnAnswer)
takes_what_one_group_has = partial(_open, TakesWhatOneGroupHas)
loads_a_shorter_window = partial(_open, LoadsAShorterWindow)
mixes_the_widths = partial(_open, MixesTheWidths)
takes_an_earlier_state = partial(_open, TakesAnEarlierState)
needs_all_windows = partial(_open, NeedsAllWindows)


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
