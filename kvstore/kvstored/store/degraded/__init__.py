"""Degraded modes: what is shed when a medium or the machine fails, how it is said, and how it comes back."""

from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.degraded.modes import DegradedModes, Mode

__all__ = ["DegradedModes", "Mode", "TierBreaker"]
