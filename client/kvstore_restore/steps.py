"""What a step of the engine takes, learned from steps: a part that every step takes, and one that its tokens take.

    every step + fixed + token * tokens + attended * pairs of a token and one that it attends to

The second part is fitted to long steps (features.py). From them alone it is not seen how much is the same for every
step, and behind a prefix that was loaded hardly anything else is left: so short steps say that, and only that. The
first step of a process also warms the engine up: it counts until the second. Owns these numbers; not safe for threads.
"""

from __future__ import annotations

from kvstore_restore.costs import ComputeCost
from kvstore_restore.features import COMPUTE_PRIOR, compute_cost, compute_features
from kvstore_restore.scaled_fit import ScaledFit

_SHARE = 0.2  # of a new short step in what every step takes
_MOST = 2.0  # a short step counts for so many times what every step took until then at most: some wait for others
_LARGEST_PART = 0.5  # of a long step is what every step takes, at most


class StepCosts:
    """`step_tokens`: the most that the engine computes in one step, 0: no bound.

    `steps`: long ones, in this process.   `is_provisional`: all that is known is from the first of them.
    """

    def __init__(self, step_tokens: int = 0) -> None:
        self.steps = 0
        self.is_provisional = False
        self._step_tokens = step_tokens
        self._fit = ScaledFit(COMPUTE_PRIOR)
        self._every_s = 0.0
        self._long = (0.0, 0)  # first position and tokens of the latest long step

    @property
    def is_known(self) -> bool:
        return self._fit.samples > 0

    def seconds(self, first: float, tokens: int) -> float:
        """Predicted seconds to compute `tokens` tokens from position `first` on, in as many steps as that takes."""
        if not tokens:
            return 0.0
        own = self._own
        steps = -(-tokens // self._step_tokens) if self._step_tokens else 1
        return own.chunk_s(first, tokens) + (steps - 1) * own.fixed_s + steps * self._every_s

    def observe(self, first: float, tokens: int, seconds: float, least_tokens: int) -> bool:
        """One step took `seconds`. It is a short one if it computed fewer than `least_tokens`. Whether it said what
        tokens take.
        """
        if self.is_known and tokens < least_tokens:
            self._observe_short(seconds - self._own.chunk_s(first, tokens))
            return False
        self.steps += 1
        if self.steps == 1 and self.is_known:
            return False
        own_s = max(seconds - self._every_s, (1 - _LARGEST_PART) * seconds)
        features = compute_features(tokens, tokens * (first + tokens / 2))
        self._fit.observe(features, own_s, is_to_scale=self.is_provisional)
        self._long = first, tokens
        self.is_provisional = self.steps == 1
        return True

    def _observe_short(self, every_s: float) -> None:
        """What the latest long step is predicted to take stays as it is: of its time less is due to its tokens."""
        before_s, own_s = self._every_s, self._own.chunk_s(*self._long)
        if before_s:
            every_s = before_s + _SHARE * (min(every_s, _MOST * before_s) - before_s)
        self._every_s = min(max(every_s, 0.0), _LARGEST_PART * (own_s + before_s))
        if own_s:
            self._fit.rescale((own_s + before_s - self._every_s) / own_s)

    @property
    def _own(self) -> ComputeCost:
        """Of a step's tokens alone."""
        return compute_cost(self._fit.coefficients)

    def state(self) -> dict[str, object]:
        """What `restore` needs, as plain numbers."""
        return {"fit": self._fit.state(), "every_s": self._every_s, "long": list(self._long)}

    def restore(self, fit: dict[str, object], every_s: float, long: list[float]) -> None:
        """Continue from a saved state. ValueError, TypeError if it has another form."""
        first, tokens = long
        if not (0 <= float(every_s) < 1e6 and 0 <= first < 1e12 and 0 <= tokens < 1e12):
            raise ValueError("not the costs of steps")
        self._fit.restore(**fit)  # type: ignore[arg-type]
        self._every_s, self._long = float(every_s), (float(first), int(tokens))
