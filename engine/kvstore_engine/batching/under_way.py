"""Which requests are under way, and how their tenants stand by it.

Owns one count for each request: of its units that have not ended.
"""

from collections import Counter

from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.policies import VirtualTokens


class UnderWay:
    """Of one engine. `tenants` are told who comes and goes."""

    def __init__(self, tenants: VirtualTokens) -> None:
        self._tenants = tenants
        self._units: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._units

    def enter(self, sequence: Sequence) -> None:
        """A unit with `sequence` begins."""
        self._units[sequence.request.id] += 1
        self._tenants.enter(sequence.request.tenant)

    def leave(self, sequence: Sequence) -> None:
        """It has ended."""
        self._tenants.leave(sequence.request.tenant)
        self._units[sequence.request.id] -= 1
        if not self._units[sequence.request.id]:
            del self._units[sequence.request.id]
