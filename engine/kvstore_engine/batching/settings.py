"""The engine's limits and choices, with their defaults. Every list, queue and pool of the engine has its limit here."""

from dataclasses import dataclass
from typing import Literal

from kvstore_engine.errors import UsageError
from kvstore_engine.graph.step import StepLimits

Restoring = Literal["planned", "load", "compute"]
RESTORING: tuple[Restoring, ...] = ("planned", "load", "compute")
PolicyName = Literal["fcfs", "shortest", "priority"]
POLICIES: tuple[PolicyName, ...] = ("fcfs", "shortest", "priority")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The limits and choices of an inference engine. policy: the scheduling policy's name. context: the most tokens of
    a prompt and its answer; None: as many as the compute object and the pool allow. max_running: the most sequences in
    a step; the compute object's own limit applies as well.

    prefill_tokens: the most prompt tokens in a step in which no answer gets a token. A step in which answers get tokens
    may take `step_stretch` times the time that it takes without prompts, or that recent steps took. It may take at most
    `step_most_stretch` times a step in which all running answers get a token. It may always take `step_floor_s`
    seconds.

    max_queued: the most requests that wait; one more is Overloaded, but each tenant is sure of its share. max_queue_s:
    a request is also Overloaded if its expected wait is longer than this. swap_bytes: the bytes of host memory for the
    blocks of preempted answers; 0: they are computed again. ageing, level_s: parameters of the policies "shortest" and
    "priority".

    compaction: move a sequence's scattered blocks together if that saves time. restoring: how stored blocks are
    restored: as planned; always by loading ("load"); or never ("compute"). prefix_sharing: share blocks of equal
    prefixes among the requests of a tenant.
    """

    policy: PolicyName = "fcfs"
    context: int | None = None
    max_running: int = 16
    prefill_tokens: int = 256
    step_stretch: float = 1.8
    step_most_stretch: float = 4.0
    step_floor_s: float = 0.03
    max_queued: int = 1024
    max_queue_s: float = 600.0
    swap_bytes: int = 256 << 20
    ageing: float = 0.6
    level_s: float = 30.0
    compaction: bool = True
    restoring: Restoring = "planned"
    prefix_sharing: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"policy {self.policy!r} is unknown; known: {', '.join(POLICIES)}")
        if self.restoring not in RESTORING:
            raise UsageError(f"restoring {self.restoring!r} is unknown; known: {', '.join(RESTORING)}")
        for name in ("max_running", "prefill_tokens", "max_queued"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_queue_s", "level_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be over 0, got {getattr(self, name)}")
        for name in ("step_floor_s", "swap_bytes", "ageing"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.step_stretch <= 1.0:
            raise UsageError(f"step_stretch must be over 1, got {self.step_stretch}")
        if self.step_most_stretch < self.step_stretch:
            raise UsageError(f"step_most_stretch must be at least step_stretch, got {self.step_most_stretch}")

    def step_tokens(self, limits: StepLimits) -> int:
        """Return the most prompt tokens in one step, rounded down to whole blocks. Raises ValueError if `limits` allow
        fewer than one block.
        """
        tokens = min(self.prefill_tokens, limits.max_tokens) // limits.block_tokens * limits.block_tokens
        if not tokens:
            raise ValueError(f"a step takes {limits.max_tokens} tokens: too few for one block of {limits.block_tokens}")
        return tokens
