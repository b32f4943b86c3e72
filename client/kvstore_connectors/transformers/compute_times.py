"""What calls of the model took, for the choice between loading and computing, as soon as that is known.

A device may still be computing when its call returns: then it is asked again at the next one, and never waited for.
Owns the latest call whose time is not known yet.
"""

from __future__ import annotations

from kvstore_connectors.moments import Moment
from kvstore_restore.choice import LoadChoice


class ComputeTimes:
    """`choice`: None where nothing is to be learned."""

    def __init__(self, choice: LoadChoice | None) -> None:
        self._choice = choice
        self._open: tuple[int, int, Moment, Moment] | None = None

    def ended(self, first: int, tokens: int, begin: Moment, end: Moment) -> None:
        """`tokens` tokens from position `first` on were computed between these."""
        self._open = first, tokens, begin, end
        self.report()

    def report(self) -> None:
        """Report the latest call to the choice, if its time is known by now."""
        if self._choice is None or self._open is None:
            return
        first, tokens, begin, end = self._open
        seconds = end.seconds_since(begin)
        if seconds is not None:
            self._choice.observe_compute(first, tokens, seconds)
            self._open = None
