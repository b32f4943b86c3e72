"""A question in a process of its own, which ends with all that it started when its time is up.

Owns that process and the file that it prints to. What it told before its end, by itself or by our hand, is kept, and so
is what it printed: of a question that hangs, where each of its threads stands.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvstore_cuda.compiler import signal_name
from support.gpu_answers import Answer, Ask, Question, Sizes, lacking, listen, one_line, why_not_imported
from support.gpu_suites import suites

_KERNELS = (
    ("launches", "every kernel runs, and its results are right", 120),
    ("errors", "error against float64, bf16 and int8", 90),
    ("decode", "paged decode of a batch against a copy; int8 against bf16", 90),
    ("decode-one", "paged decode of one long sequence against a copy", 60),
    ("crossover", "one pass against partitions: from which batch on", 90),
    ("decode-rivals", "paged decode against FlashInfer and vLLM, where they are installed", 240),
    ("beside-transfer", "TPOT beside a saturated transfer", 180),
    ("gather-batch", "gather kernel against a batch of copies: crossover", 120),
    ("hot-prefix", "a shared prefix kept in the L2 cache by a window, against none (informs)", 90),
)
YES, NO, UNKNOWN, FAILED, LEFT = "yes", "NO", "unknown", "FAILED", "left"
INTERRUPTED = "interrupted"
PATIENCE_S = 2.0  # for an end by itself
MOST_OUTPUT = 48 << 10  # characters that are kept of what a question printed: its begin and its end


def _asked(place: str, fixed: dict[str, Any], device: int, sizes: Sizes) -> Answer:
    module, _, function = place.rpartition(".")
    answer: Answer = getattr(import_module(f"support.{module}"), function)(device, sizes, **fixed)
    return answer


def _by(place: str, **fixed: Any) -> Ask:
    """Answer by a function of a module beside this one; `fixed`: further arguments."""
    return partial(_asked, place, fixed)


PROMISES = (
    Question("read-only-register", "a memfd mapped read-only can be registered", 60,
             _by("gpu_memory.registers_read_only")),
    Question("read-only-access", "read-only device memory cannot be written", 60,
             _by("gpu_memory.read_only_access_holds")),
    Question("outlives-maker", "memory outlives the kill -9 of its maker", 60,
             _by("gpu_memory.memory_outlives_its_maker")),
    Question("direct-storage", "is GPUDirect Storage there (informs)", 30,
             _by("gpu_memory.has_direct_storage")),
)  # fmt: skip
COPIES = (
    Question("copies", "copies in pieces against one large copy", 90, _by("gpu_copies.pieces")),
    Question("arena-pool", "host arena <-> paged pool, both directions, against one copy", 120,
             _by("gpu_copies.arena_and_pool")),
    Question("client-pool", "leases and puts <-> paged pool by the client, both directions", 180,
             _by("gpu_client_pool.client_pool")),
    Question("client-gather", "the client's kernel for small runs, and their size", 120,
             _by("gpu_client_pool.client_gather")),
    Question("checksums", "checksums by the device are xxhash's, and how fast", 60, _by("gpu_copies.checksums")),
)  # fmt: skip
TIER = (
    Question("resident-get", "get of blocks resident in the GPU tier", 180, _by("gpu_tier.get_of_resident")),
    Question("arrays", "K and V of a lease on the device as torch and CuPy take them", 180, _by("gpu_tier.arrays")),
    Question("worker-kills", "kill -9 of the worker: blocks and device memory", 420,
             _by("gpu_tier.worker_kills")),
)  # fmt: skip
ENGINES = (
    Question("engine-decode", "decode of our engine, SmolLM2-135M, against generate and torch's attention", 500,
             _by("decode_comparison.decode", subject="SMOLLM2_135M")),
    Question("engine-decode-1b", "the same with the shape of a model of 1B", 500,
             _by("decode_comparison.decode", subject="ONE_BILLION")),
    Question("vllm", "an 8B model in vLLM with the plugin: first token, throughput", 590,
             _by("gpu_vllm.asked", of_plugin=True)),
    Question("vllm-connector", "the same with the connector", 590, _by("gpu_vllm.asked", of_plugin=False)),
)  # fmt: skip

_ALL = (
    *PROMISES,
    *(Question(*each, _by("gpu_launches.of_card", name=each[0])) for each in _KERNELS),
    *COPIES, *TIER, *ENGINES, *suites(),
)  # fmt: skip
QUESTIONS = {each.name: each for each in _ALL}


@dataclass(frozen=True, slots=True)
class Asked:
    """The outcome of a question, the answer, and what the process printed. `is_interrupted`: whoever asks wants to ask
    no more.
    """

    how: str
    answer: Answer
    output: str = ""
    is_interrupted: bool = False


def asked(
    question: Question, device: int, limit_s: float, sizes: Sizes, folder: Path | None, hear: Callable[[Answer], None]
) -> Asked:
    """Ask for at most `limit_s`, the end of the process included. `hear` gets what is known meanwhile; the output is in
    a file of `folder` until then."""
    for_question_s = max(limit_s - PATIENCE_S, limit_s / 2)
    sizes = replace(sizes, tools_s=min(sizes.tools_s, for_question_s - PATIENCE_S / 2))  # tools end before it
    with tempfile.NamedTemporaryFile("r", errors="replace", dir=folder, prefix="running-", suffix=".log") as output:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_ask, args=(question.name, device, sizes, theirs, output.name))
        process.start()
        theirs.close()
        kind, told = _listened(ours, time.monotonic() + for_question_s, hear)
        _end(process, is_stuck=kind in ("late", INTERRUPTED), patience_s=PATIENCE_S * (1 + 2 * (kind == INTERRUPTED)))
        printed = output.read()
    if kind == "answer":
        return Asked({True: YES, False: NO, None: UNKNOWN}[told.holds], told, _both_ends(printed))
    why = {
        "late": f"no answer within {limit_s:.0f} s", "died": f"its process died ({_status(process)})",
    }.get(kind, kind)  # fmt: skip
    says = f"{why}; known until then: {told.says}" if told.says else why
    is_cut = kind == INTERRUPTED or (kind == "late" and bool(told.says))
    how = FAILED if not is_cut else NO if told.holds is False else LEFT
    return Asked(how, Answer(None, says, told.figures), _both_ends(printed), kind == INTERRUPTED)


def _listened(pipe: Connection, until_s: float, hear: Callable[[Answer], None]) -> tuple[str, Answer]:
    """Return the outcome, "answer" or the reason why there is none, and the last message."""
    told = Answer(None, "")
    try:
        while pipe.poll(max(until_s - time.monotonic(), 0.0)):
            kind, found = pipe.recv()
            if kind != "known":
                return (kind, found) if kind == "answer" else (found, told)
            told = found
            hear(told)
        return "late", told
    except (EOFError, OSError):
        return "died", told
    except KeyboardInterrupt:
        return INTERRUPTED, told


def _ask(name: str, device: int, sizes: Sizes, pipe: Connection, output: str) -> None:
    """The body of the process: what it starts, and what that prints, ends up with it."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for each in (1, 2):
        os.dup2(descriptor, each)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))

    def tell(answer: Answer) -> None:
        print(answer.says, flush=True)
        pipe.send(("known", answer))

    listen(tell)
    try:
        pipe.send(("answer", QUESTIONS[name].ask(device, sizes)))
    except (Exception, SystemExit) as error:  # one that broke does not end the others
        traceback.print_exc()
        missing = why_not_imported(error) if isinstance(error, ImportError) else lacking(str(error))
        if missing:
            pipe.send(("answer", Answer(None, f"not asked: {missing}")))
        else:
            pipe.send(("broke", one_line(f"{type(error).__name__}: {error}")))
    sys.stdout.flush()


def _end(process: BaseProcess, *, is_stuck: bool, patience_s: float) -> None:
    """End a process; of one that is stuck, it is printed first where its threads stand."""
    process.join(0.0 if is_stuck else patience_s)
    for number, wait_s in ((signal.SIGUSR1, patience_s / 10), (signal.SIGTERM, patience_s)):
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)
            process.join(wait_s)
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
    if process.is_alive():
        process.kill()
    process.join()


def _status(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return signal_name(-code) if code < 0 else f"status {code}"


def _both_ends(text: str) -> str:
    half, more = MOST_OUTPUT // 2, len(text) - MOST_OUTPUT
    return text if more <= 0 else f"{text[:half]}\n... {more} characters ...\n{text[-half:]}"
