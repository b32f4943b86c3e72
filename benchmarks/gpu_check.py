"""Asks what only a GPU can answer: the questions that the GPU tier's design and the engine's kernels rest on.

`make gpu-check` runs it. Each answer is one line, and is kept at once, so that a run that is cut off leaves what it
has found; speeds are ratios against copies in the same run. Exits with 1 when a promise does not hold or a question
failed, with 2 when there is nothing to ask, with 3 when all is well so far and questions were left for lack of time,
with 130 when it was interrupted.
Owns nothing that outlives it: what may break a context runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from support.gpu_answers import FULL, SMALL, Answer, Question, why_not_imported
from support.gpu_asked import FAILED, LEFT, NO, QUESTIONS, YES, Asked, asked

SO_FAR = "so far"  # what is known of a question that has not ended
TELL_S = 5.0  # is printed of one that takes longer
LEAST_S = 5.0  # a question that has less time is not begun


@dataclass(frozen=True, slots=True)
class Record:
    """A line of the file: what was asked when, of which device, and the answer; and what the question printed, where
    the answer is not yes."""

    at: str
    device: str
    question: str
    answer: str
    seconds: float
    says: str
    figures: dict[str, float]
    output: str = ""

    def line(self) -> str:
        return f"{self.answer:7} {self.question}: {self.says} [{self.seconds:.0f} s]"


class Run:
    """Asks questions of `device_name`, one after another, and keeps each answer as soon as it is there."""

    def __init__(self, options: argparse.Namespace, device_name: str) -> None:
        self._options, self._device_name = options, device_name
        today = datetime.date.today().isoformat()
        self._kept = options.out / f"gpu-check-{today}.jsonl" if options.out else None
        self._began_s = 0.0

    def ask(self, questions: list[Question]) -> tuple[list[Record], bool]:
        """The records, and whether it was interrupted: what follows is not asked then."""
        ends_s, records = time.monotonic() + self._options.seconds, []
        for question in questions:
            self._began_s = time.monotonic()
            found = self._asked(question, ends_s - self._began_s)
            records.append(self._keep(question, found))
            if found.is_interrupted:
                return records, True
        return records, False

    def _asked(self, question: Question, left_s: float) -> Asked:
        if left_s < LEAST_S:
            return Asked(LEFT, Answer(None, "no time was left"))
        options = self._options
        limit_s = min(left_s, options.limit, question.limit_s)
        return asked(
            question, options.device, limit_s, SMALL if options.small else FULL, options.out,
            lambda answer: self._tell(self._record(question, SO_FAR, answer, "")),
        )  # fmt: skip

    def _tell(self, record: Record) -> None:
        if not self._options.json and (record.answer != SO_FAR or record.seconds >= TELL_S):
            print(record.line(), flush=True)

    def _record(self, question: Question, how: str, answer: Answer, output: str) -> Record:
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Record(
            at, self._device_name, question.name, how, round(time.monotonic() - self._began_s, 1),
            " ".join(answer.says.split()), {name: float(value) for name, value in answer.figures.items()}, output,
        )  # fmt: skip

    def _keep(self, question: Question, found: Asked) -> Record:
        record = self._record(question, found.how, found.answer, "" if found.how == YES else found.output)
        self._tell(record)
        if self._kept is not None:
            try:
                with self._kept.open("a") as file:
                    file.write(json.dumps(asdict(record)) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:  # the other answers are printed all the same
                print(f"gpu-check: this answer is not kept: {error}", file=sys.stderr, flush=True)
        elif found.how == FAILED and not self._options.json:
            print(found.output, end="", file=sys.stderr, flush=True)
        return record


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for name in options.only or ():
        if name not in QUESTIONS:
            near = difflib.get_close_matches(name, QUESTIONS, 1)
            did_you_mean = f"did you mean {near[0]}? " if near else ""
            print(f"gpu-check: there is no question {name!r}: {did_you_mean}--list prints all", file=sys.stderr)
            return 2
    if options.list:
        print("\n".join(f"{each.name:24} {each.limit_s:4.0f} s  {each.about}" for each in QUESTIONS.values()))
        return 0
    try:
        device_name, greeting = _device(options.device)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()  # it can be written to
    except ImportError as error:
        print(f"gpu-check: {why_not_imported(error)}: docs/gpu.md says what is needed", file=sys.stderr)
        return 2
    except OSError as error:  # no driver, no device, no folder
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    if not options.json:
        print(greeting, flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background ignores the first: what is started would, too
        signal.signal(number, signal.default_int_handler)
    run = Run(options, device_name)
    records, is_interrupted = run.ask([QUESTIONS[name] for name in options.only or QUESTIONS])
    if options.json:
        print(json.dumps([asdict(record) for record in records]))
    if is_interrupted:
        return 130
    answers = {record.answer for record in records}
    return 1 if answers & {NO, FAILED} else 3 if LEFT in answers else 0


def _device(index: int) -> tuple[str, str]:
    """Return the device's name, and the line that a run begins with. Raises ImportError, NoDriver, DriverError."""
    from kvstore_console.units import human_bytes
    from kvstore_cuda.device import CudaDevice

    driver = CudaDevice(index).use_in_this_thread()
    free, total = driver.memory_bytes()
    made, minor = divmod(driver.version, 1000)
    room = f"{human_bytes(free)} of {human_bytes(total)} free"
    today = datetime.date.today().isoformat()
    return driver.name, f"{today}: {driver.name}, driver of CUDA {made}.{minor // 10}, {room}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA device (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the questions and their limits, ask none")
    parser.add_argument("--only", action="append", metavar="NAME", help="ask this question; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=10800.0, metavar="S", help="end within this time (default: %(default).0f)"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="S", help="for one question at most (default: %(default).0f)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="append each answer to a dated file there, and what a question printed"
    )
    parser.add_argument("--json", action="store_true", help="print the answers as one JSON list, at the end")
    parser.add_argument("--small", action="store_true", help="move little: shows that it runs, measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
