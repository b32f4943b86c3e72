"""Lists what can go wrong with a call of the driver, and every call that can: the cells that a sweep tries.

Owns the control file and the trace of an emulated driver in other processes, which it may be given by its `variables`.
Never decides what has to hold afterwards.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.gpu.test_gpu_worker import order
from tests.reference.examples import EVERY_CASE

FAILS, BREAKS, HANGS, KILLS = WAYS = "801", "700", "hang", "kill"
_LOOKED_UP, _EACH = "cuGetProcAddress", 50  # by the library, over 500 functions in one go


class Cell(NamedTuple):
    """The `number`-th call of a name, and what becomes of it."""

    call: str
    number: int
    what: str

    @property
    def rule(self) -> str:
        return f"{self.call}:{self.number}={self.what}"


def cells(calls: Mapping[str, int]) -> list[Cell]:
    """Each call, every time that it was made, in each way; of functions that the library looks up each 50th."""
    return [
        Cell(name, number, what)
        for name, count in sorted(calls.items())
        for number in range(1, count + 1)
        if name != _LOOKED_UP or number % _EACH == 1 or number == count
        for what in WAYS
    ]


@contextmanager
def tried(cell: Cell) -> Iterator[None]:
    """Try a cell: what goes wrong names its cell; where every case is tried, so does what is under way."""
    began_s = time.monotonic()
    try:
        yield
    except BaseException as error:
        error.add_note(f"the cell: {cell.rule}")
        raise
    finally:
        if EVERY_CASE:
            print(f"{cell.rule} {time.monotonic() - began_s:.1f} s", flush=True)


class DriverFaults:
    def __init__(self, directory: Path) -> None:
        self._control, self._trace = directory / "control", directory / "trace"
        self._control.touch()
        self._trace.touch()
        self.variables = {"EMULATED_CUDA_CONTROL": str(self._control), "EMULATED_CUDA_TRACE": str(self._trace)}

    def begin(self, rule: str = "") -> None:
        self._trace.write_text("")
        order(self._control, rule)

    def end(self) -> Counter[str]:
        """No call fails from here on. What was called since `begin`; calls that a rule met are NAME=WHAT, and work that
        ran is "run"."""
        order(self._control, "")
        return Counter(line for line in self._trace.read_text().splitlines() if not re.match(r"run\d", line))

    @property
    def has_met(self) -> bool:
        """Return whether a rule has met a call."""
        return "=" in self._trace.read_text()
