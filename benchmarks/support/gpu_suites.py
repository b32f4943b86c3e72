"""The tests and tools that a device is for: the GPU tier's tests on it, kills of what uses it, and compute-sanitizer
over every kernel.

Owns the processes that it starts, and ends them with all that they started when their time is up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from support.gpu_answers import Answer, Question, Sizes, lacking

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "gpu"
NOT_OF_A_DEVICE = (  # ask the emulated driver
    "test_device_every_call.py", "test_device_gather.py", "test_emulated_driver.py", "test_emulated_kernels.py",
    "test_gpu_check.py", "test_gpu_every_call.py",
)  # fmt: skip
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
GET_SANITIZER = "no compute-sanitizer: it comes with the CUDA toolkit, or pip install 'nvidia-cuda-sanitizer-api>=13'"
KILLED = ("daemon", "worker", "engines")
MIXED = "any of them, in turns, while blocks are copied"
SHOWN = "CUDA_VISIBLE_DEVICES"
_NOTHING_FAILED = (0, 5)  # of pytest: all passed or skipped; no tests
_GRACE_S = 10.0  # after an interruption
_END_S = 60.0  # of kills: what is looked at after the last one
_FOUND_ERRORS = 66  # the status that compute-sanitizer is to exit with
_SUMMARY = re.compile(r"^=+ \w+ SUMMARY: .*$", re.MULTILINE)
_IN_ALL = re.compile(r"\d+ \w+.* in [\d.]+s\b")  # pytest's last line but what an interruption of its end adds
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors)")


def _has_tests() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("pytest", "hypothesis"))


def suite(path: Path, device: int, sizes: Sizes) -> Answer:
    """A file of tests, on this machine's driver."""
    if not _has_tests():
        return Answer(None, f"{path.name}: not run, pytest or hypothesis is not installed")
    variables = {"KVSTORED_TEST_GPU": "hardware"} | _showing(device)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", str(path)]
    status, text = bounded(command, sizes.tools_s, variables)
    return judged(path.name, status, text, sizes.tools_s)


def judged(name: str, status: int | None, text: str, limit_s: float) -> Answer:
    """Return the judgement by what pytest printed. Unknown where nothing passed and nothing failed, where a package is
    not installed, and of a file that was not done in time as far as all passed.
    """
    lines = text.strip().splitlines() or ["nothing was printed"]
    last = next((line for line in reversed(lines) if _IN_ALL.search(line)), lines[-1])
    counts = {word.removesuffix("s"): float(number) for number, word in _COUNTS.findall(last)}
    passed, broken = counts.get("passed", 0.0), counts.get("failed", 0.0) + counts.get("error", 0.0)
    reasons = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    missing = lacking(text)
    if missing and (not passed or (reasons and all(map(lacking, reasons)))):
        return Answer(None, f"{name}: not asked: {missing}", counts)
    said = [last.strip("= "), *reasons[:2]]
    if status is None:
        holds = None if passed and not broken else False
        return Answer(holds, f"{name}: not done within {limit_s:.0f} s; {'; '.join(said)}", counts)
    if not passed and not broken and status in _NOTHING_FAILED:
        said += [line for line in lines if line.startswith("SKIPPED")][:1]
        return Answer(None, f"{name}: nothing was asked: {'; '.join(said)}", counts)
    return Answer(status == 0, f"{name}: {'; '.join(said)}", counts)


def kills(whose: str, device: int, sizes: Sizes) -> Answer:
    """kill -9 of a daemon, its worker or engines again and again, until the time is up: are the blocks and the device's
    memory what they were?
    """
    if not _has_tests():
        return Answer(None, "not asked: pytest or hypothesis is not installed")
    wanted = sizes.engine_kills if whose == "engines" else sizes.kills
    counts = [text for each in KILLED for text in (f"--{each}", str(wanted if each == whose else 0))]
    counts = ["--mixed", str(wanted)] if whose == MIXED else counts
    kills_s = max(sizes.tools_s - _END_S, sizes.tools_s / 2)
    command = [sys.executable, "-m", "benchmarks.gpu_kills", *counts, "--seconds", str(kills_s)]
    status, text = bounded(command, sizes.tools_s, _showing(device))
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was printed")
    if not last.startswith("{"):
        if missing := lacking(text):
            return Answer(None, f"kill -9 of {whose}: not asked: {missing}")
        why = f"not done within {sizes.tools_s:.0f} s; {last}" if status is None else last
        return Answer(False, f"kill -9 of {whose}: {why}")
    found = json.loads(last)
    says = (
        f"{found['killed']} of {wanted} kill -9 of {whose}: {found['found_blocks']} of {found['blocks']} blocks are "
        f"still on the device, {found['lost_bytes']} bytes of its memory are lost"
    )
    figures = {"kills": found["killed"], "kept": found["kept"], "lost bytes": found["lost_bytes"]}
    return Answer(status == 0 and found["killed"] > 0, says, figures)


def sanitized(tool: str, device: int, sizes: Sizes) -> Answer:
    """Every kernel once, under a tool of compute-sanitizer."""
    program = sanitizer()
    if program is None:
        return Answer(None, GET_SANITIZER)
    script = ["-m", "support.gpu_launches", "--device", str(device)]
    options = ["--tool", tool, "--error-exitcode", str(_FOUND_ERRORS), "--target-processes", "application-only"]
    status, text = bounded([program, *options, sys.executable, *script], sizes.tools_s, _path_of_scripts())
    summaries = [line.strip("= ") for line in _SUMMARY.findall(text)]
    if status is None:
        return Answer(None, f"{tool}: not done within {sizes.tools_s:.0f} s, {len(summaries)} summaries")
    lines = [line.strip("= ") for line in text.strip().splitlines()] or ["nothing was printed"]
    if not summaries and (missing := lacking(text)):
        return Answer(None, f"{tool}: not asked: {missing}")
    reason = next((line for line in lines if "Error" in line), lines[-1])
    last = summaries[-1] if summaries else f"no summary, status {status}: {reason}"
    return Answer(status == 0 and bool(summaries), f"{tool} over every kernel: {last}")


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer: on the path, in a toolkit, or in its wheel."""
    found = importlib.util.find_spec("nvidia")
    wheels = [Path(place) / "cu13" / "bin" for place in (found.submodule_search_locations or ())] if found else []
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, wheels)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def bounded(command: Sequence[str], limit_s: float, variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit status and output, which is printed, too; None for a program that had to be ended, with all that it
    started. It is interrupted before that: pytest says what has passed then."""
    grace_s, status = min(_GRACE_S, limit_s / 4), None
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would be waited for as long as any has it
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | dict(variables), stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_s - grace_s)
        except BaseException as error:  # its time is over, or whoever asks was interrupted
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            text = output.read()
            print(text, flush=True)
    return status, text


def _showing(device: int) -> dict[str, str]:
    """Variables that make `device` number 0 of the programs that are started."""
    return {SHOWN: shown_alone(device, os.environ.get(SHOWN, ""))} if device else {}


def shown_alone(device: int, shown: str) -> str:
    """Return the environment that shows device number `device`, of the devices that `shown` shows, and no other; all
    are without it.
    """
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return names[device] if names else str(device)


def _path_of_scripts() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *filter(None, sys.path)])}


def suites() -> tuple[Question, ...]:
    """One for each file of tests and each tool."""
    files = [path for path in sorted(SUITE.glob("test_*.py")) if path.name not in NOT_OF_A_DEVICE]
    tests = [
        Question(path.stem.replace("_", "-"), f"tests/gpu/{path.name} on this device", 500, partial(suite, path))
        for path in files
    ]
    tools = [Question(tool, f"compute-sanitizer's {tool} over every kernel", 500, partial(sanitized, tool))
             for tool in TOOLS]  # fmt: skip
    deaths = [
        Question(f"kills-of-{each}", f"kill -9 of {each}: blocks and device memory", 500, partial(kills, each))
        for each in KILLED
    ]
    about = "kill -9 of a daemon, its worker or an engine in turns, while blocks are copied"
    deaths.append(Question("kills-mixed", about, 500, partial(kills, MIXED)))
    return (*tools, *tests, *deaths)
