"""The engine's activity as a trace in the Chrome Trace Event format, for ui.perfetto.dev and chrome://tracing.

The module owns the format, and the tracks: one for each sequence, each lane and each worker. Sequences: waiting, each
chunk of the prompt, decoding, being swapped out. Lanes: restored and swapped blocks; and for each restoration, or stage
of one, the part that steps computed, from the front, and the part that was loaded, from the back. Workers: the
scheduler's steps with the forward pass inside, and counters of the pool's use. A sequence has its track from the moment
it was queued; a sequence queued after its end may use the track again. Events are written as they happen; a file whose
writer was killed lacks the closing bracket, which both viewers accept. Invariant: events on a sequence's track never
overlap; a chunk of a step in which it was admitted begins at the admission.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from kvstore_engine.batching.events import Reason, Usage
from kvstore_engine.batching.observer import Observer, StepRecord
from kvstore_engine.errors import OperationError
from kvstore_engine.restore.record import RestorationRecord

_US = 1e6
SEQUENCES, LANES, WORKERS = "sequences", "lanes", "workers"
_FLUSH_STEPS = 64  # what a killed server loses at most

Key = tuple[str, int]


class TraceFile:
    """A writer of a trace file in Chrome's Trace Event format, which shows events on tracks along time. Times are
    seconds of any one clock; the first time written becomes 0.
    """

    def __init__(self, path: Path) -> None:
        """Create `path`. Raises OperationError if that fails."""
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
        """Return the number of the group of tracks called `name`. A new group is made for a new name."""
        if name not in self._groups:
            number = self._groups[name] = len(self._groups) + 1
            self._name("process", number, 0, name, number)
        return self._groups[name]

    def track(self, group: str, name: str) -> tuple[int, int]:
        """Return the pair of numbers that names a track: of the group `group`, and of the track `name` in it. A new
        track is made for a new name.
        """
        pid = self.group(group)
        key = (pid, name)
        if key not in self._tracks:
            tid = self._tracks[key] = len(self._tracks) + 1
            self._name("thread", pid, tid, name, tid)
        return pid, self._tracks[key]

    def span(self, track: tuple[int, int], name: str, begin_s: float, end_s: float, **details: object) -> None:
        """Write an event called `name` on `track` that lasted from `begin_s` to `end_s`, in seconds. The viewer shows
        `details` with the event.
        """
        length = max(0.0, end_s - begin_s)
        self._write(
            {"ph": "X", "name": name, **self._at(track, begin_s), "dur": round(length * _US, 3), "args": details}
        )

    def instant(self, track: tuple[int, int], name: str, at_s: float, **details: object) -> None:
        """Write an event without a length, called `name`, on `track` at the time `at_s`, in seconds. The viewer shows
        `details` with the event.
        """
        self._write({"ph": "i", "s": "t", "name": name, **self._at(track, at_s), "args": details})

    def counter(self, group: str, name: str, at_s: float, **values: float) -> None:
        """Write the values of the counter `name` of the group `group` from the time `at_s`, in seconds, on. `values`
        gives one or more numbers by name.
        """
        self._write({"ph": "C", "name": name, **self._at((self.group(group), 0), at_s), "args": values})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Write the end of the file and close it. A second call does nothing."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

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


@dataclass(slots=True)
class _Drawn:
    """A sequence under way: its track, the time up to which it is drawn, and the reason why it waits (None while it
    runs).
    """

    number: int
    track: tuple[int, int]
    until_s: float
    waits_as: str | None = "queued"


class TracingObserver(Observer):
    """An observer that writes an engine's events to the trace file `path` until `close`. Raises OperationError if the
    file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = TraceFile(path)
        self._steps = self._file.track(WORKERS, "scheduler")
        self._compute = self._file.track(WORKERS, "compute")
        self._drawn: dict[Key, _Drawn] = {}
        self._leaving: dict[Key, _Drawn] = {}  # ended in this step, whose record comes after it
        self._free: list[int] = []
        self._tracks = 0

    def close(self) -> None:
        self._file.close()

    def queued(self, request_id: str, t: float) -> None:
        self._drawing(request_id, 0, t)

    def admitted(self, request_id: str, index: int, t: float) -> None:
        self._waited(self._drawing(request_id, index, t), request_id, t)

    def restored(self, request_id: str, index: int, source: Literal["local", "daemon"], tokens: int, t: float) -> None:
        details = {"request": request_id, "answer": index, "tokens": tokens}
        self._file.instant(self._file.track(LANES, f"restore ({source})"), f"{tokens} tokens", t, **details)
        drawn = self._drawn.get((request_id, index))
        if drawn is None:
            return
        if source == "daemon" and drawn.waits_as is None:  # nothing of it ran meanwhile
            self._file.span(drawn.track, "restore", drawn.until_s, t, **details)
            drawn.until_s = max(t, drawn.until_s)
        else:
            self._file.instant(drawn.track, f"restored {source}", t, tokens=tokens)

    def restoration(self, record: RestorationRecord) -> None:
        drawn = self._drawn.get((record.request_id, record.index))
        if drawn is None:
            return
        details = {"request": record.request_id, "plan": record.plan}
        stage = "" if record.stage is None else f", stage {record.stage}"
        for work in record.work:
            track = self._file.track(LANES, f"sequence {drawn.number}{stage}: restore, {work.kind}")
            place = {"position": work.first}
            self._file.span(track, f"{work.kind} {work.tokens}", work.begin_s, work.end_s, **details, **place)

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        details = {"request": request_id, "answer": index, "stored": not reason}
        self._file.span(self._file.track(LANES, "store"), f"{tokens} tokens", begin_s, end_s, **details)

    def step(self, record: StepRecord) -> None:
        begin, end = record.begin_s, record.end_s
        steps = {"running": record.running, "prefill_tokens": record.prefill_tokens, "waiting": record.waiting}
        self._file.span(self._steps, f"step {record.number}", begin, end, **steps, budget=record.budget_tokens)
        # The forward pass ends before the sampling: drawn from where the scheduler had done, as nearly as is known.
        computed = min(record.compute_s, end - begin)
        self._file.span(self._compute, "forward", begin, begin + computed, decode_tokens=record.decode_tokens)
        for part in record.parts():
            key = (part.request_id, part.index)
            drawn = self._leaving.get(key) or self._drawing(*key, begin)
            name = f"prefill {part.tokens}" if part.kind == "prefill" else "decode"
            details = {"request": part.request_id, "position": part.position}
            self._file.span(drawn.track, name, max(begin, drawn.until_s), end, **details)
            drawn.until_s = max(end, drawn.until_s)
        for ended in self._leaving.values():
            heapq.heappush(self._free, ended.number)
        self._leaving.clear()
        used = {"used": record.used_blocks, "cached": record.cached_blocks}
        self._file.counter(WORKERS, "K/V blocks", end, **used)
        self._file.counter(WORKERS, "requests", end, running=record.running, waiting=record.waiting)
        if record.number % _FLUSH_STEPS == 0:
            self._file.flush()

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        drawn = self._drawing(request_id, index, t)
        self._file.instant(drawn.track, f"preempted: {how}", t, request=request_id)
        drawn.until_s, drawn.waits_as = max(t, drawn.until_s), "swapped out" if how == "swap" else "dropped"

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        self._swap("swap out", request_id, index, nbytes, runs, begin_s, end_s)

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        self._swap("swap in", request_id, index, nbytes, runs, begin_s, end_s)

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        drawn = self._drawing(request_id, index, t)
        self._waited(drawn, request_id, t)
        details = {"request": request_id, "tokens": usage.generated_tokens, "local": usage.local_tokens}
        self._file.instant(drawn.track, f"finished: {reason}", t, **details, daemon=usage.daemon_tokens)
        key = (request_id, index)
        if key in self._leaving:  # the same name again within a step: cancelled at once
            heapq.heappush(self._free, self._leaving[key].number)
        self._leaving[key] = self._drawn.pop(key)

    def _swap(
        self, lane: str, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float
    ) -> None:
        details = {"request": request_id, "answer": index, "bytes": nbytes, "runs": runs}
        self._file.span(self._file.track(LANES, lane), f"{nbytes / 1e6:.1f} MB", begin_s, end_s, **details)

    def _waited(self, drawn: _Drawn, request_id: str, t: float) -> None:
        if drawn.waits_as is not None:
            self._file.span(drawn.track, drawn.waits_as, drawn.until_s, t, request=request_id)
            drawn.until_s, drawn.waits_as = max(t, drawn.until_s), None

    def _drawing(self, request_id: str, index: int, t: float) -> _Drawn:
        key = (request_id, index)
        if key not in self._drawn:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                self._tracks += 1
                number = self._tracks
            self._drawn[key] = _Drawn(number, self._file.track(SEQUENCES, f"sequence {number}"), t)
        return self._drawn[key]
