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
    """The setting of an engine under test. `socket_dir` has the daemon's sockets; with None the engine runs without a
    store. Engines with different `model` names must have different fingerprints.
    """

    socket_dir: Path | None
    model: str = "first"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of running a prompt: `tokens` of its tokens were restored from the store, and `output` is the answer.

    `output` can be anything that is equal for equal K/V state of the whole prompt and differs otherwise, and that can
    be pickled: token ids generated greedily, or a digest of the state.
    """

    tokens: int
    output: Any


class Engine(Protocol):
    """An engine with its connector, in one process, as the author of a connector writes it for the suite."""

    def store(self, tokens: Sequence[int], /) -> None:
        """Run the prompt `tokens` and store its blocks. When it returns, other clients can find them."""

    def restore(self, tokens: Sequence[int], /) -> PromptResult:
        """Run the prompt `tokens`, restoring as many of the tokens from the store as it has, and return the result. The
        engine may store nothing.
        """

    def close(self) -> None: ...


class EngineFailed(AssertionError):
    """The error of an engine under test that raised, ended by itself, or hangs. A connector may cause none of these."""


class EngineUnderTest(Protocol):
    """An engine as the test suite controls it: it runs prompts, and can be killed, or paused at a point."""

    def store(self, tokens: Sequence[int], /) -> None: ...
    def restore(self, tokens: Sequence[int], /) -> PromptResult: ...

    def pause_at(self, point: Point, /) -> None:
        """Make the engine pause when it next reaches `point`: "reading" is just before it reads the first leased block,
        "writing" is after it has written blocks and before any is stored. Raises unittest.SkipTest where that cannot
        be done.
        """

    def begin(self, operation: Literal["store", "restore"], tokens: Sequence[int], /) -> bool:
        """Start to store or restore the prompt `tokens`. Return True once the engine has reached the point of
        `pause_at`, and False if the operation ended without passing it.
        """

    def go_on(self) -> PromptResult | None:
        """Let the paused engine continue, wait for the end of its operation, and return the result of a restore."""

    def kill(self) -> None:
        """Kill every process of the engine with SIGKILL."""

    def close(self) -> None: ...
