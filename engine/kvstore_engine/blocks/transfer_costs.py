"""What it costs here to copy blocks, by bytes and by pieces; refitted with every transfer.

Owns one linear model and nothing that acts on it:  copying takes  f + bytes/B + r * runs  seconds.
"""

from kvstore_engine.restore.regression import RecursiveLeastSquares

# Scaled to be of one order of magnitude: seconds per transfer, per 16 MiB, per 100 pieces.
_BYTES, _RUNS = 16.0 * 1024 * 1024, 100.0
_PRIOR = (2e-5, 0.003, 0.0005)


class TransferCosts:
    """Costs of copies between the pool and other memory, or within it. Not safe for use by two threads at once."""

    def __init__(self) -> None:
        self.copy = RecursiveLeastSquares(_PRIOR, uncertainty=1.0)

    def copy_s(self, nbytes: int, runs: int) -> float:
        """Seconds to copy `nbytes` in `runs` contiguous pieces of the pool."""
        return self.copy.predict((1.0, nbytes / _BYTES, runs / _RUNS)) if nbytes else 0.0

    @property
    def run_s(self) -> float:
        """Seconds that one more piece adds to a transfer of the same bytes; never negative."""
        return max(0.0, self.copy_s(1, 1) - self.copy_s(1, 0))

    def observe(self, nbytes: int, runs: int, seconds: float) -> None:
        """A transfer took `seconds`."""
        if nbytes > 0:
            self.copy.observe((1.0, nbytes / _BYTES, runs / _RUNS), seconds)
