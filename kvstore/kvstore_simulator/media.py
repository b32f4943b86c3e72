"""Media as queues: how long a transfer waits and takes, and how much went where.

A transfer passes two media. It queues, first come first served, at the slower of the two; the other one only counts its
bytes. There it first takes one of `parallel` places, waits out the latency, then has the medium to itself for as long
as its bytes take. So many small transfers are bound by latency and places, few large ones by bandwidth. Everything
about a transfer is known when it comes, since transfers keep their order. Pure: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapreplace

from kvstore_simulator.machine import MediumSpec
from kvstored.clock import NS_PER_S


@dataclass(slots=True)
class _Line:
    """Who is next: one for both directions, or one for each."""

    free_ns: int = 0


@dataclass(slots=True)
class Pipe:
    """One direction of one medium. `busy_ns` is time that its bytes took, without waiting and latency."""

    bytes_per_s: float
    line: _Line
    nbytes: int = 0
    busy_ns: int = 0

    def took_ns(self, nbytes: int) -> int:
        return round(nbytes * NS_PER_S / self.bytes_per_s)

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.busy_ns += self.took_ns(nbytes)


class Medium:
    """One medium of a machine, with a queue for each direction, or one for both."""

    def __init__(self, spec: MediumSpec) -> None:
        self.spec = spec
        line = _Line()
        self.reading = Pipe(spec.read_bytes_per_s, line)
        self.writing = Pipe(spec.write_bytes_per_s, _Line() if spec.duplex else line)
        self.latency_ns = round(spec.latency_s * NS_PER_S)
        self.places = [0] * spec.parallel  # a heap: when each is free

    @property
    def busy_ns(self) -> int:
        """Of the busier direction where they do not share, else of both."""
        reading, writing = self.reading.busy_ns, self.writing.busy_ns
        return max(reading, writing) if self.spec.duplex else reading + writing


@dataclass(frozen=True, slots=True)
class Passage:
    """When the bytes of a transfer begin to move, and when the last has arrived."""

    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class SimulatedLane:
    """From one medium to another. `moved` has (end, bytes) of each transfer, for plots."""

    name: str
    source: Medium
    target: Medium
    nbytes: int = 0
    transfers: int = 0
    waited_ns: int = 0
    moved: list[tuple[int, int]] = field(default_factory=list)

    def send(self, nbytes: int, now_ns: int) -> Passage:
        """Queue a transfer; what will become of it."""
        reading, writing = self.source.reading, self.target.writing
        is_source_slower = reading.bytes_per_s <= writing.bytes_per_s
        medium, pipe = (self.source, reading) if is_source_slower else (self.target, writing)
        place_ns = max(now_ns, medium.places[0])
        begin_ns = max(place_ns + medium.latency_ns, pipe.line.free_ns)
        end_ns = begin_ns + pipe.took_ns(nbytes)
        if self.source is self.target and not medium.spec.duplex:
            end_ns += (writing if pipe is reading else reading).took_ns(nbytes)  # each byte passes twice
        heapreplace(medium.places, end_ns)
        pipe.line.free_ns = end_ns
        reading.count(nbytes)
        writing.count(nbytes)
        self.nbytes += nbytes
        self.transfers += 1
        self.waited_ns += begin_ns - medium.latency_ns - now_ns
        self.moved.append((end_ns, nbytes))
        return Passage(begin_ns, end_ns)
