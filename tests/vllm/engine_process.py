"""The driving end of `engine_child`: starts an engine process, asks it, ends it.

Owns the child, its log file and the way it ends: standard input is closed, and a child that does not go is killed
together with the workers that vLLM started (they share its session).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reference.forked import popen

CHILD = "tests.vllm.engine_child"
REPOSITORY = Path(__file__).parents[2]
END_TIMEOUT_S = 40.0
FOR_SMALL_MODELS = {
    "OMP_NUM_THREADS": "1",  # two that wait for each other at each operator take ten times the processor time
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else there is a thread for each processor all the same
    "TORCH_COMPILE_DISABLE": "1",  # else each process compiles the rank of a token among the log probabilities
}
"""The environment in which vLLM starts and computes small models on CPUs soon."""


@dataclass(frozen=True)
class Answer:
    """The answer to one batch of prompts; the lists are by prompt. `wall_s`: seconds of the whole call."""

    wall_s: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    finish: list[str]
    ttft_s: list[float | None]
    preemptions: int  # of the engine, since it started
    encoded: int = 0  # images, since it started, if it has our connector for them
    restored: int = 0


class EngineDied(AssertionError):
    """The child ended by itself; carries the end of its log."""


class EngineProcess:
    """`python`: the interpreter; without one this process's own, forked once vLLM is imported. `spec`: arguments of
    `vllm.LLM`; `transfer`: arguments of KVTransferConfig that differ from the usual ones; `encoder_transfer`: arguments
    of ECTransferConfig; `one_process`: scheduler and worker run in the child itself, which starts in a third of the
    processor time; and `pool_gib`: of engines on CPUs, 2 by default; with None `kv_cache_memory_bytes` counts.
    """

    def __init__(self, log: Path, *, python: str | None = None, **spec: Any) -> None:
        self.log = log
        (reads, orders), (answers, writes) = os.pipe(), os.pipe()
        self._orders, self._answers = os.fdopen(orders, "w"), os.fdopen(answers)
        start: Any = popen if python is None else subprocess.Popen
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]  # of connectors that tests bring
        with open(log, "ab") as said, os.fdopen(reads) as stdin, os.fdopen(writes, "w") as stdout:
            self._process = start(
                [python or sys.executable, "-m", CHILD],
                stdin=stdin,
                stdout=stdout,
                stderr=said,
                cwd=REPOSITORY,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        self._exchange(spec)

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **request: Any) -> Answer:
        """Greedy answers of just `max_tokens` tokens."""
        asked = {"prompts": [list(map(int, prompt)) for prompt in prompts], "max_tokens": max_tokens, **request}
        return Answer(**self._exchange(asked))

    def reset(self, *, connector: bool = False) -> bool:
        """Forget vLLM's own cached blocks, and with `connector` the blocks of its CPU tier. False while some are in
        use.
        """
        return bool(self._exchange({"reset_connector": connector})["reset"])

    def close(self) -> None:
        if self._answers.closed:
            return
        with contextlib.suppress(OSError):
            self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the child's own session: no other process is in it
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(json.dumps(message) + "\n")
            self._orders.flush()
        line = self._answers.readline()
        if not line:
            raise EngineDied(f"the engine ended by itself:\n{self.log.read_text(errors='replace')[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
