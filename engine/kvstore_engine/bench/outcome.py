"""What became of one request, and of a whole run.

Owns plain values. All times are seconds since the run began; latencies count from when the request was due.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """`token_s`: when each piece of the answer came; `generated` tokens may have come in fewer pieces.

    reused_tokens: of the prompt, not computed (None: the server does not say). message: why it failed.
    """

    id: str
    kind: str
    due_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    generated: int = 0
    queued_s: float | None = None
    reused_tokens: int | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.message and bool(self.token_s)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None of an answer of one."""
        if self.generated < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.generated - 1)

    @property
    def total_s(self) -> float:
        return self.end_s - self.due_s


@dataclass(frozen=True, slots=True)
class Run:
    """All outcomes, how long it took, and what the engine's profiler says (empty of a server somewhere else)."""

    outcomes: list[Outcome]
    seconds: float
    profile: dict[str, object] = field(default_factory=dict)
