"""Costs of computing that a test assumes, in place of what its machine takes."""

from collections.abc import Sequence
from functools import partial

from kvstore_restore.learned import LearnedCosts

SLOW = (10.0, 10.0, 0.0)  # computing looks slow: all that is stored is restored, all that can be is swapped


def assume(costs: LearnedCosts, coefficients: Sequence[float] = SLOW, *, learns: bool = False) -> LearnedCosts:
    """Have `costs` predict steps by `coefficients`: seconds a step, for 512 tokens, and for 512 * 1024 pairs. Unless it
    `learns`, steps that are quicker do not change that."""
    fit: dict[str, object] = {"samples": 1, "coefficients": list(coefficients), "scale": 1.0}
    costs.steps.restore(fit, 0.0, [0.0, 0.0])
    if not learns:
        setattr(costs.steps, "observe", partial(_count, costs))  # noqa: B010 (a method, to mypy)
    return costs


def _count(costs: LearnedCosts, *step: float) -> bool:
    costs.steps.count += 1
    return False
