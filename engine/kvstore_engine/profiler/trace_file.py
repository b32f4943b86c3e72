"""A file in the Chrome Trace Event format, for ui.perfetto.dev and chrome://tracing.

Owns the format: complete events, instants, counters, and the names of processes and tracks. It never knows what a
track means. Written as it happens, event by event; a file whose writer was killed lacks the closing bracket, which
both viewers forgive. Invariant: no track has two events that overlap without one containing the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self, TextIO

from kvstore_engine.errors import OperationError

_US = 1e6


class TraceFile:
    """Times are seconds of any one clock; the first one written becomes 0."""

    def __init__(self, path: Path) -> None:
        """Create `path`. OperationError if that cannot be."""
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OperationError(f"cannot write the trace {path}: {error.strerror}") from None
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._first = True
        self._zero_s: float | None = None
        self._tracks: dict[tuple[int, str], int] = {}
        self._groups: dict[str, int] = {}

    def group(self, name: str) -> int:
        """The number of a group of tracks ("process" in the format), made on first use."""
        if name not in self._groups:
            number = self._groups[name] = len(self._groups) + 1
            self._name("process", number, 0, name, number)
        return self._groups[name]

    def track(self, group: str, name: str) -> tuple[int, int]:
        """The numbers of a track ("thread"), made on first use; tracks are shown in the order of their making."""
        pid = self.group(group)
        key = (pid, name)
        if key not in self._tracks:
            tid = self._tracks[key] = len(self._tracks) + 1
            self._name("thread", pid, tid, name, tid)
        return pid, self._tracks[key]

    def span(self, track: tuple[int, int], name: str, begin_s: float, end_s: float, **details: object) -> None:
        """Something that lasted."""
        length = max(0.0, end_s - begin_s)
        self._write(
            {"ph": "X", "name": name, **self._at(track, begin_s), "dur": round(length * _US, 3), "args": details}
        )

    def instant(self, track: tuple[int, int], name: str, at_s: float, **details: object) -> None:
        """Something that happened."""
        self._write({"ph": "i", "s": "t", "name": name, **self._at(track, at_s), "args": details})

    def counter(self, group: str, name: str, at_s: float, **values: float) -> None:
        """What some quantities are from now on."""
        self._write({"ph": "C", "name": name, **self._at((self.group(group), 0), at_s), "args": values})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Complete the file; closing twice is closing once."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _name(self, what: str, pid: int, tid: int, name: str, place: int) -> None:
        whose = {"ph": "M", "pid": pid, "tid": tid}
        self._write({**whose, "name": f"{what}_name", "args": {"name": name}})
        self._write({**whose, "name": f"{what}_sort_index", "args": {"sort_index": place}})

    def _at(self, track: tuple[int, int], at_s: float) -> dict[str, object]:
        if self._zero_s is None:
            self._zero_s = at_s
        return {"ts": round((at_s - self._zero_s) * _US, 3), "pid": track[0], "tid": track[1]}

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False
