"""What each tenant has been served: the virtual token counter.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant that has been served least is next. An
idle tenant that becomes active is raised to the least of the active ones, so that none saves up turns. A prompt token
counts 1, a generated one 2 (it holds a place for a whole step), as in the paper.

Owns one number for each tenant. It never knows requests.
"""

from collections import Counter

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
_MOST_IDLE = 1024


class VirtualTokens:
    """The counters. A tenant is active from its first request's `enter` to its last one's `leave`."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """A request of `tenant` has arrived."""
        if not self._active[tenant]:
            least = min((self._served[other] for other, count in self._active.items() if count), default=None)
            if least is None:
                least = max(self._served.values(), default=0.0)  # all were idle: no tenant has a claim on another
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` has ended."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            if len(self._served) - len(self._active) > _MOST_IDLE:
                idle = min((name for name in self._served if name not in self._active), key=self._served.__getitem__)
                del self._served[idle]

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens were computed for `tenant`."""
        if tenant in self._active:
            self._served[tenant] += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> float:
        """The tenant's counter; only differences between tenants have a meaning."""
        return self._served.get(tenant, 0.0)
