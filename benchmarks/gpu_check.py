"""What only a GPU can answer: the questions that the GPU tier's design and the engine's kernels rest on.

`make gpu-check` runs it. Each answer is one line, and is kept at once, so that a run that is cut off leaves what it
has found; speeds are ratios against copies in the same run. Exits with 1 when a promise does not hold or a question
failed, with 2 when there is no GPU to ask, with 3 when all is well so far and questions were left for lack of time.
Owns nothing that outlives it: what may break a context runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from support.gpu_answers import FULL, SMALL, Answer, Question, Sizes
from support.gpu_checksums import CHECKSUMS
from support.gpu_client_copies import CLIENT_GATHER
from support.gpu_client_pool import CLIENT_POOL
from support.gpu_copies import COPIES
from support.gpu_engine import ENGINE_DECODE
from support.gpu_kernel_questions import KERNEL_QUESTIONS
from support.gpu_promises import PROMISES
from support.gpu_suites import suites
from support.gpu_tier import TIER
from support.gpu_vllm import VLLM

from kvstore_console.units import human_bytes
from kvstore_tiers.gpu.driver import Driver, NoDriver

YES, NO, UNKNOWN, FAILED, LEFT = "yes", "NO", "unknown", "FAILED", "left"
LEAST_S = 5.0  # a question that has less time is not begun
_ALL = (
    *PROMISES, *KERNEL_QUESTIONS, *COPIES, CLIENT_POOL, CLIENT_GATHER, *CHECKSUMS, *TIER, *ENGINE_DECODE,
    *VLLM, *suites(),
)  # fmt: skip
QUESTIONS = {each.name: each for each in _ALL}


@dataclass(frozen=True, slots=True)
class Record:
    """A line of the file: what was asked when, of which device, and the answer."""

    at: str
    device: str
    question: str
    answer: str
    seconds: float
    says: str
    figures: dict[str, float]

    def line(self) -> str:
        return f"{self.answer:7} {self.question}: {self.says} [{self.seconds:.0f} s]"


def _ask(name: str, device: int, sizes: Sizes, pipe: Connection) -> None:
    os.setsid()  # what it starts ends with it
    try:
        answer: Answer | str = QUESTIONS[name].ask(device, sizes)
    except (Exception, SystemExit) as error:  # one that broke does not end the others
        answer = f"{type(error).__name__}: {error}"
    pipe.send(answer)


def asked(question: Question, device: int, limit_s: float, sizes: Sizes) -> tuple[str, Answer]:
    """How it went, and the answer: of a process that is killed when `limit_s` are over."""
    sizes = replace(sizes, tools_s=min(sizes.tools_s, limit_s - LEAST_S / 2))  # tools have sessions of their own
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_ask, args=(question.name, device, sizes, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit_s) else f"no answer within {limit_s:.0f} s"
    except EOFError:
        found = "its process died"
    _end(process, 0.0 if isinstance(found, str) else LEAST_S)
    if isinstance(found, str):
        return FAILED, Answer(False, found)
    return {True: YES, False: NO, None: UNKNOWN}[found.holds], found


def _end(process: multiprocessing.process.BaseProcess, patience_s: float) -> None:
    process.join(patience_s)
    if process.is_alive() and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()


def run(chosen: list[Question], options: argparse.Namespace, device_name: str) -> list[Record]:
    """Each question in turn; a record is written before the next one is asked."""
    ends_s = time.monotonic() + options.seconds
    today = datetime.date.today().isoformat()
    kept = options.out / f"gpu-check-{today}.jsonl" if options.out else None
    sizes, records = SMALL if options.small else FULL, []
    for question in chosen:
        left_s, began_s = ends_s - time.monotonic(), time.monotonic()
        if left_s < LEAST_S:
            answer = LEFT, Answer(None, "no time was left")
        else:
            answer = asked(question, options.device, min(left_s, options.limit, question.limit_s), sizes)
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = Record(
            at, device_name, question.name, answer[0], round(time.monotonic() - began_s, 1), answer[1].says,
            {name: float(value) for name, value in answer[1].figures.items()},
        )  # fmt: skip
        records.append(record)
        if not options.json:
            print(record.line(), flush=True)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
    return records


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(f"{each.name:24} {each.limit_s:4.0f} s  {each.about}" for each in QUESTIONS.values()))
        return 0
    try:
        driver = Driver(options.device)
    except NoDriver as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    free, total = driver.memory_bytes()
    if not options.json:
        today = datetime.date.today().isoformat()
        made, minor = divmod(driver.version, 1000)
        room = f"{human_bytes(free)} of {human_bytes(total)} free"
        print(f"{today}: {driver.name}, driver of CUDA {made}.{minor // 10}, {room}", flush=True)
    records = run([QUESTIONS[name] for name in options.only or QUESTIONS], options, driver.name)
    if options.json:
        print(json.dumps([asdict(record) for record in records]))
    answers = {record.answer for record in records}
    return 1 if answers & {NO, FAILED} else 3 if LEFT in answers else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA device (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the questions and their limits, ask none")
    parser.add_argument(
        "--only", action="append", choices=QUESTIONS, metavar="NAME", help="ask this question; may be repeated"
    )
    parser.add_argument(
        "--seconds", type=float, default=10800.0, metavar="S", help="end within this time (default: %(default).0f)"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="S", help="for one question at most (default: %(default).0f)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="append each answer to a dated file there")
    parser.add_argument("--json", action="store_true", help="print the answers as one JSON list, at the end")
    parser.add_argument("--small", action="store_true", help="move little: shows that it runs, measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
