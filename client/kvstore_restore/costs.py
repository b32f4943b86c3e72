"""The costs of computing and of loading a chunk, alone and at once; pure values.

    computing n tokens from position p      alpha + beta*n + gamma*n*(p + n/2)
    loading k bytes from a tier             lambda + k/B, for each tier its own

While both run, each takes longer by a factor. Times are seconds. `learned.py` fits these values to measurements,
as coefficients for features of the order of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_TOKENS, _ATTENDED, _BYTES = 512.0, 512.0 * 1024.0, 16.0 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """The cost of computing one step, in seconds: `fixed_s` for the step, `token_s` for each token, and `attended_s`
    for each pair of a token and a token that it attends to.
    """

    fixed_s: float
    token_s: float
    attended_s: float

    @staticmethod
    def features(tokens: float, attended: float) -> tuple[float, float, float]:
        """Return the three inputs of a linear fit of a step's cost. The step computes `tokens` tokens, with `attended`
        pairs of a token and a token that it attends to.
        """
        return 1.0, tokens / _TOKENS, attended / _ATTENDED

    @classmethod
    def fitted(cls, coefficients: Sequence[float]) -> ComputeCost:
        """Return the cost with the fitted `coefficients` for `features`. A coefficient below 0 counts as 0."""
        fixed_s, token_s, attended_s = (max(0.0, value) for value in coefficients)
        return cls(fixed_s, token_s / _TOKENS, attended_s / _ATTENDED)

    def step_s(self, tokens: float, attended: float) -> float:
        """Return the predicted seconds of one step that computes `tokens` tokens, with `attended` pairs of a token and
        a token that it attends to.
        """
        return self.fixed_s + self.token_s * tokens + self.attended_s * attended if tokens else 0.0

    def chunk_s(self, first: float, tokens: int) -> float:
        """Return the predicted seconds to compute `tokens` tokens from position `first` on, in one step."""
        return self.step_s(tokens, tokens * (first + tokens / 2))


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of loading over a link, in seconds: `fixed_s` for a load, and `byte_s` for each byte."""

    fixed_s: float
    byte_s: float

    @staticmethod
    def features(nbytes: float) -> tuple[float, float]:
        """Return the two inputs of a linear fit of the cost of a load of `nbytes` bytes."""
        return 1.0, nbytes / _BYTES

    @classmethod
    def fitted(cls, coefficients: Sequence[float]) -> LinkCost:
        """Return the cost with the fitted `coefficients` for `features`. A coefficient below 0 counts as 0."""
        fixed_s, byte_s = (max(0.0, value) for value in coefficients)
        return cls(fixed_s, byte_s / _BYTES)

    def load_s(self, nbytes: float) -> float:
        """Return the predicted seconds to load `nbytes` in one piece."""
        return self.fixed_s + self.byte_s * nbytes if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Contention:
    """The factors, at least 1, by which computing takes longer while a load runs, and a load takes longer while the
    engine computes.
    """

    compute: float = 1.0
    load: float = 1.0

    def finish_s(self, compute_s: float, load_s: float) -> float:
        """Return the predicted seconds until a computation and a load have both ended, if they start together and would
        take `compute_s` and `load_s` seconds alone.
        """
        slowed_compute_s, slowed_load_s = compute_s * self.compute, load_s * self.load
        if slowed_compute_s <= slowed_load_s:
            return slowed_compute_s + load_s - slowed_compute_s / self.load
        return slowed_load_s + compute_s - slowed_load_s / self.compute


@dataclass(frozen=True, slots=True)
class RestoreCosts:
    """All costs of restoring prefixes of one model on one machine. `links` has the cost of loading from each tier, by
    the tier's name.
    """

    compute: ComputeCost
    links: Mapping[str, LinkCost]
    contention: Contention = field(default_factory=Contention)
