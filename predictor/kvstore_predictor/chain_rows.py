"""What is known of chains now, as rows of numbers: what a learned model judges them by.

Owns how often and how soon each tenant's chains go on. No column grows or falls with the time of day: such a one would
teach when the recording was made. Reads the sessions of the session-return that it
is made with, and changes nothing there. Bounded: tenants by `TENANTS_MAX`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore_predictor.base import Array, Guess, Piece, State
from kvstore_predictor.features import Features
from kvstore_predictor.gittins import Floats, Ints
from kvstore_predictor.session_return import SessionReturn

COLUMNS = (
    "session_return", "horizon", "age", "against_pace", "pace", "turn", "length", "tokens", *Features._fields,
    "tenant_returns", "tenant_gap",
)  # fmt: skip
SESSION_RETURN = COLUMNS.index("session_return")
TENANTS_MAX = 1024
LEAST = 1e-6
_MEMORY_S = 900.0  # after which a tenant's requests count 1/e
_NOT_KNOWN = -1.0
_COUNTS = ("at_s", "requests", "returns", "gaps")
_TENANT = np.dtype([("tenant", "i8"), *((name, "f8") for name in _COUNTS)])


class ChainRows:
    """A row has a number for each of COLUMNS: log odds of session-return's chance, logarithms of times and counts,
    classes of `Features` as they are; -1: not known."""

    def __init__(self, sessions_of: SessionReturn) -> None:
        self._of = sessions_of
        self._tenants: dict[int, list[float]] = {}  # at_s, requests, returns, sum of the returns' gap classes

    def requested(self, tenant: int, now_s: float) -> None:
        """Session-return has just seen a request of the tenant."""
        sessions = self._of.sessions
        features = self._of.features[sessions.hand - 1]
        assert features is not None
        known = self._tenants.get(tenant)
        if known is None:
            if len(self._tenants) >= TENANTS_MAX:
                del self._tenants[next(iter(self._tenants))]
            known = self._tenants[tenant] = [now_s, 0.0, 0.0, 0.0]
        fade = math.exp(min(0.0, known[0] - now_s) / _MEMORY_S)  # what was restored may be ahead: a clock was set back
        is_return = features.kind == 1
        known[0] = now_s
        known[1] = known[1] * fade + 1.0
        known[2] = known[2] * fade + is_return
        known[3] = known[3] * fade + features.gap * is_return

    def forget(self, tenant: int) -> None:
        self._tenants.pop(tenant, None)

    def rows(self, guesses: Sequence[Guess], now_s: float, horizon_s: float) -> Floats:
        """One for each guess of the session-return, within `horizon_s` from now."""
        sessions = self._of.sessions
        slots: Ints = np.array([sessions.by_end(guess.tenant, guess.key) for guess in guesses], np.int64)
        if not len(slots):
            return np.empty((0, len(COLUMNS)), np.float32)
        chances = np.clip([guess.probability for guess in guesses], LEAST, 1.0 - LEAST)
        age = np.log1p(np.maximum(now_s - np.frombuffer(sessions.used_s)[slots], 0.0))
        turn = np.frombuffer(sessions.turn, np.int32)[slots]
        pace = np.where(turn > 1, np.frombuffer(sessions.pace)[slots], _NOT_KNOWN)
        tokens = np.frombuffer(sessions.tokens, np.int64)[slots]
        length = np.frombuffer(sessions.length, np.int32)[slots]
        classes = np.array([self._of.features[slot] for slot in slots.tolist()], np.float64).T
        columns = [
            np.log(chances / (1.0 - chances)), np.full(len(slots), math.log(max(horizon_s, LEAST))), age,
            np.where(turn > 1, age - pace, 0.0), pace, np.log(turn), np.log(length),
            np.where(tokens >= 0, np.log1p(np.maximum(tokens, 0)), _NOT_KNOWN), *classes,
            *np.array([self._of_tenant(guess.tenant) for guess in guesses]).T,
        ]  # fmt: skip
        return np.stack(columns, axis=1).astype(np.float32)

    def _of_tenant(self, tenant: int) -> tuple[float, float]:
        known = self._tenants.get(tenant)
        if known is None:
            return _NOT_KNOWN, _NOT_KNOWN
        _, requests, returns, gaps = known
        return returns / requests, gaps / returns if returns > LEAST else _NOT_KNOWN

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "tenants", np.array([(tenant, *known) for tenant, known in self._tenants.items()], _TENANT)

    def import_state(self, state: State, later_s: float) -> None:
        """Raises ValueError for a state that this version cannot use."""
        found: Array | None = state.get("tenants")
        if found is None or found.dtype != _TENANT or not all(np.isfinite(found[name]).all() for name in _COUNTS):
            raise ValueError("the state of another version")
        self._tenants = {
            tenant: [at_s + later_s, *counts] for tenant, at_s, *counts in found[-TENANTS_MAX:].tolist()
        }  # fmt: skip
