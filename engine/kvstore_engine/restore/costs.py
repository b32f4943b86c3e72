"""What it costs on this machine to compute tokens, and to load blocks instead; refitted while serving.

Owns two linear models and nothing that acts on them. Times are wall seconds of this process on this machine.

    computing n tokens from position p in one step   a + b*n + c*n*(p + n/2)        (attention reads what
    precedes) loading k bytes that the daemon says take e s    l + m*e + k/B

as in CacheFlow and Cake (per-chunk costs, refitted online) with the fixed costs a and l added: without them a
short prefix looks cheaper to load than it is.
"""

from collections.abc import Iterable

from kvstore_client.restore.regression import RecursiveLeastSquares

# Features are scaled by these, so that coefficients are seconds per typical step and of one order of
# magnitude.
_TOKENS, _ATTENDED, _BYTES = 512.0, 512.0 * 1024.0, 16.0 * 1024 * 1024
# A small model on a laptop core; wrong by a factor for most, and replaced by the first measurements.
_COMPUTE_PRIOR = (0.003, 0.5, 0.1)
_LOAD_PRIOR = (0.001, 1.0, 0.004)


class CostModel:
    """Costs of one model with one number of threads. Not safe for use by two threads at once."""

    def __init__(self) -> None:
        self.compute = RecursiveLeastSquares(_COMPUTE_PRIOR, uncertainty=10.0)
        self.load = RecursiveLeastSquares(_LOAD_PRIOR, uncertainty=1.0)

    def step_s(self, tokens: int, position: int) -> float:
        """Seconds to compute `tokens` tokens from `position` on, in one forward step."""
        return self.compute.predict(_compute_features(tokens, position)) if tokens else 0.0

    def batch_s(self, pieces: Iterable[tuple[int, int]]) -> float:
        """Seconds of one step of several pieces, each (tokens, position)."""
        return self.compute.predict(_batch_features(pieces))

    def observe_batch(self, pieces: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step of these pieces took `seconds`."""
        self.compute.observe(_batch_features(pieces), seconds)

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        """Seconds to compute positions [start, end) in steps of at most `step_tokens`."""
        return sum(
            self.step_s(min(step_tokens, end - position), position) for position in range(start, end, step_tokens)
        )

    def load_s(self, nbytes: int, estimated_s: float) -> float:
        """Seconds to load blocks of `nbytes`, whose promotion the daemon estimates at `estimated_s`."""
        return self.load.predict(_load_features(nbytes, estimated_s)) if nbytes else 0.0

    def observe_step(self, tokens: int, position: int, seconds: float) -> None:
        """A forward step of `tokens` from `position` took `seconds`."""
        if tokens > 0:
            self.compute.observe(_compute_features(tokens, position), seconds)

    def observe_load(self, nbytes: int, estimated_s: float, seconds: float) -> None:
        """Loading `nbytes`, with a promotion estimated at `estimated_s`, took `seconds`."""
        if nbytes > 0:
            self.load.observe(_load_features(nbytes, estimated_s), seconds)


def _compute_features(tokens: int, position: int) -> tuple[float, float, float]:
    return 1.0, tokens / _TOKENS, tokens * (position + tokens / 2) / _ATTENDED


def _batch_features(pieces: Iterable[tuple[int, int]]) -> tuple[float, float, float]:
    rows = [_compute_features(tokens, position) for tokens, position in pieces]
    return 1.0, sum(row[1] for row in rows), sum(row[2] for row in rows)


def _load_features(nbytes: int, estimated_s: float) -> tuple[float, float, float]:
    return 1.0, estimated_s, nbytes / _BYTES
