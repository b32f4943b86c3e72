"""A library of compiled functions, built and loaded once a process, in a thread of its own.

The module owns the attempt. Until it has ended, and where it fails, callers use their other code, with equal results.
"""

from __future__ import annotations

import ctypes as ct
import logging
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger(__name__)


class NativeLibrary:
    """The one attempt of this process to make a library with `make`, which raises BuildError or OSError where it
    cannot. `library` is the library once it is there. `name` begins the thread's name, and `loss` says what runs more
    slowly without it, in a log line of this `level`. Where the environment variable `variable` is 0, nothing is made.
    """

    def __init__(
        self, name: str, variable: str, loss: str, make: Callable[[], ct.CDLL], level: int = logging.WARNING
    ) -> None:
        self.library: ct.CDLL | None = None
        self.ended = threading.Event()
        self._name, self._variable, self._loss, self._make = name, variable, loss, make
        self._level = level
        self._lock = threading.Lock()
        self._is_begun = False

    def get(self) -> ct.CDLL | None:
        """Return the library; None when there is none, or none yet."""
        if not self._is_begun:
            self._begin()
        return self.library

    def wait(self, timeout_s: float = 600.0) -> ct.CDLL | None:
        """Return the library once the attempt to make it has ended; None when there is none."""
        self._begin()
        self.ended.wait(timeout_s)
        return self.library

    def load(self, find: Callable[[], ct.CDLL]) -> None:
        """Load the library in this thread by `find`, which raises BuildError or OSError where the library has to be
        compiled first: then the attempt is still to come.
        """
        with self._lock:
            if self._is_begun or os.environ.get(self._variable) == "0":
                return
            with suppress(RuntimeError, OSError):
                self.library = find()
                self._is_begun = True
                self.ended.set()

    def _begin(self) -> None:
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
        if os.environ.get(self._variable) == "0":
            self.ended.set()
        else:
            threading.Thread(target=self._run, name=f"{self._name}-build", daemon=True).start()

    def _run(self) -> None:
        try:
            self.library = self._make()
        except (RuntimeError, OSError) as error:  # BuildError is one; its module takes long to load
            _log.log(self._level, "%s without compiled code, more slowly: %s", self._loss, error)
        finally:
            self.ended.set()


def is_x86() -> bool:
    """Return whether the processor is an x86-64 one."""
    return platform.machine() in ("x86_64", "AMD64")


def processor_flags() -> frozenset[str]:
    """Return the names of the instructions that this x86-64 processor has; none on another one."""
    if not is_x86():
        return frozenset()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        return frozenset(next((line for line in file if line.startswith("flags")), "").split())


def has_avx2() -> bool:
    """Return whether the processor has the instructions that `native_build.AVX2` lets the compiler use."""
    return processor_flags() >= {"avx2", "fma", "f16c"}
