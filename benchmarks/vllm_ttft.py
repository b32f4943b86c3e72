"""vLLM on CPUs: how much sooner is the first token there, and what does the connector cost when it helps nothing?

SmolLM2-135M in bfloat16, greedy, prompts of 1,000 and 2,000 random tokens that no other request shares, 16 new tokens.
Five vLLM engines in processes of their own take turns, each request once with each, the order rotated by round:
without a connector (the baseline of all ratios); storing, where nothing can hit; a second process, which finds what the
storing one stored; one whose daemon is absent; and one whose daemon is stopped (SIGSTOP) just before each request, so
that each pays a look-up's deadline. Time to first token is vLLM's own figure (arrival to first token), the whole
request is the wall time of `generate`. Medians.

Needs the environment that `make test-vllm` makes (.venv-vllm, or KVSTORED_VLLM_PYTHON), and runs under the main one.
KVSTORED_VLLM_BLOCK_SIZE sets vLLM's block size (default: vLLM's own, 128 on CPUs).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from support import vllm_engine
from support.daemon import BenchDaemon, bench_daemon, stopped
from support.report import AT_LEAST, Row, main, median, progress
from support.vllm_engine import Answer, EngineDied, EngineProcess

from kvstore_proto.v1 import admin_pb2

LENGTHS = (1000, 2000)
SPEED_UPS = {1000: 6.0, 2000: 8.0}
NEW_TOKENS = 16
ROOM = ("host.capacity=2GiB", "nvme.capacity=2GiB")
BASELINE, STORING, SECOND, ABSENT, STOPPED = "baseline", "storing", "second", "absent", "stopped"
Figures = dict[tuple[str, int], list[float]]


def measure(quick: bool) -> list[Row]:
    first_token: Figures = defaultdict(list)
    whole: Figures = defaultdict(list)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvvllm-")))
        daemon, other = stack.enter_context(bench_daemon(*ROOM)), stack.enter_context(bench_daemon(*ROOM))
        sockets = {
            BASELINE: None,
            STORING: daemon.socket_dir,
            SECOND: daemon.socket_dir,
            ABSENT: directory / "no-daemon",
            STOPPED: other.socket_dir,
        }
        model = vllm_engine.model()
        engines = {}
        for name, socket in sockets.items():
            engines[name] = stack.enter_context(_engine(directory / f"{name}.log", model, socket))
            progress(f"{name}: engine is up")
            engines[name].ask([_prompt(0, 300)], NEW_TOKENS)  # first use: threads, allocations
        for number in range(2 if quick else 7):
            for length in LENGTHS:
                prompt = _prompt(1 + number * len(LENGTHS) + LENGTHS.index(length), length)
                for name in _turns(number):
                    answer = _ask(name, engines[name], prompt, daemon, other)
                    first_token[name, length].append(_ttft_s(answer))
                    whole[name, length].append(answer.wall_s)
                progress(f"round {number}, {length} tokens: " + _line(first_token, length))
    return [row for length in LENGTHS for row in _rows(length, first_token, whole)]


def _rows(length: int, first_token: Figures, whole: Figures) -> Iterator[Row]:
    ttft = {name: median(first_token[name, length]) * 1e3 for name in (BASELINE, STORING, SECOND, ABSENT, STOPPED)}
    of_all = {name: median(whole[name, length]) * 1e3 for name in (BASELINE, STORING)}
    at = f"vllm_ttft_{length}"
    yield Row(f"{at}_speed_up", ttft[BASELINE], "ms", ttft[SECOND], "ms warm", AT_LEAST, SPEED_UPS[length])
    for name in (STORING, ABSENT, STOPPED):
        yield Row(f"{at}_{name}", ttft[name], "ms", ttft[BASELINE], "ms without", target=1.05)
    yield Row(f"vllm_request_{length}_{STORING}", of_all[STORING], "ms", of_all[BASELINE], "ms without", target=1.05)


def _turns(number: int) -> list[str]:
    """The order of a round. The second process comes after the storing one."""
    free = [BASELINE, STORING, ABSENT, STOPPED]
    turned = free[number % 4 :] + free[: number % 4]
    turned.insert(turned.index(STORING) + 1, SECOND)
    return turned


def _ask(name: str, engine: EngineProcess, prompt: list[int], daemon: BenchDaemon, other: BenchDaemon) -> Answer:
    if name == STOPPED:
        with stopped(other.pid):
            return engine.ask([prompt], NEW_TOKENS)
    answer = engine.ask([prompt], NEW_TOKENS)
    if name == STORING:
        daemon.admin("Flush", admin_pb2.FlushRequest())  # no writing beside the next measurement
    if name == SECOND and answer.cached[0] < len(prompt) - 129:
        raise SystemExit(f"only {answer.cached[0]} of {len(prompt)} tokens were restored: not a warm request")
    if name != SECOND and answer.cached[0]:
        raise SystemExit(f"{answer.cached[0]} tokens were cached for the engine {name!r}: not a cold request")
    return answer


def _engine(log: Path, model: str, socket: Path | None) -> EngineProcess:
    block_size = os.environ.get("KVSTORED_VLLM_BLOCK_SIZE")
    arguments = {"block_size": int(block_size)} if block_size else {}
    return vllm_engine.started(log, model, None if socket is None else {"socket": str(socket)}, **arguments)


def _prompt(seed: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(100, 40_000, tokens)]


def _ttft_s(answer: Answer) -> float:
    (seconds,) = answer.ttft_s
    if seconds is None:
        raise SystemExit("this vLLM does not report the time to the first token")
    return seconds


def _line(figures: Figures, length: int) -> str:
    return ", ".join(
        f"{name} {seconds[-1] * 1e3:.0f} ms" for (name, tokens), seconds in figures.items() if tokens == length
    )


if __name__ == "__main__":
    try:
        sys.exit(main(measure, __doc__))
    except EngineDied as error:
        sys.exit(str(error))
