"""The types that the suite and an engine share: how an engine is set up, and what it answers.

Only types. `Engine` is what most authors write: it runs in a child process that the suite makes, so that it can be
killed and paused. `EngineUnderTest` is what the suite drives; an engine with processes of its own implements that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Point = Literal["reading", "writing"]
"""Where an engine can be paused: about to read the first leased block; blocks written, none stored yet."""


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The setting of an engine. With `socket_dir` None the engine runs without a store. Engines of two `model` names
    must have different fingerprints.
    """

    socket_dir: Path | None
    model: str = "first"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of a prompt: `tokens` of it were restored, and `output` followed.

    `output` can be anything that is equal for equal K/V state of the whole prompt and differs otherwise, and that can
    be pickled: token ids generated greedily, or a digest of the state.
    """

    tokens: int
    output: Any


class Engine(Protocol):
    """An engine with its connector, in one process."""

    def store(self, tokens: Sequence[int], /) -> None:
        """Run the prompt and store its blocks; on return other clients can find what was stored."""

    def restore(self, tokens: Sequence[int], /) -> PromptResult:
        """Run the prompt and restore what the store has of it. Need not store anything."""

    def close(self) -> None: ...


class EngineFailed(AssertionError):
    """The engine raised, ended by itself, or hangs. A connector may cause none of these."""


class EngineUnderTest(Protocol):
    """An engine that the suite can also kill, and pause at a point."""

    def store(self, tokens: Sequence[int], /) -> None: ...
    def restore(self, tokens: Sequence[int], /) -> PromptResult: ...

    def pause_at(self, point: Point, /) -> None:
        """Let the engine stop when it reaches the point next. Raises unittest.SkipTest where that cannot be done."""

    def begin(self, operation: Literal["store", "restore"], tokens: Sequence[int], /) -> None:
        """Start an operation that will reach the point. Returns when it has reached it."""

    def go_on(self) -> PromptResult | None:
        """Let the paused operation go on. Return its result."""

    def kill(self) -> None:
        """Kill every process of the engine with SIGKILL."""

    def close(self) -> None: ...
