"""Requests that restore their prefixes on one compute and one link for each tier, in simulated time.

Drives the client's own pointers with the true costs, which the planner's costs may differ from. A step of computing and
a load of a chunk are not interrupted. While both kinds of work run, each goes on at its share of speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_restore.batch import DEFAULT, Remaining, Rule, in_turn
from kvstore_restore.costs import RestoreCosts
from kvstore_restore.plan import Prefix, plan
from kvstore_restore.pointers import Pointers

CAUTION = 1.2  # a step that was begun in error cannot be ended
COMPUTE = ""  # the name of the computing server among those of the tiers


@dataclass(eq=False)
class Restored:
    """One request: as it is given, as it is under way, and when it was done."""

    number: int
    arrived_s: float
    prefix: Prefix
    pointers: Pointers = field(default_factory=lambda: Pointers(()))
    done_s: float = 0.0


@dataclass
class _Work:
    request: Restored
    chunk: int
    left_s: float  # alone


class Machine:
    """`true`: what work costs. `believed`: what the planner and the guard expect. `always_both`: no plan and no guard,
    as Cake's rule.
    """

    def __init__(
        self,
        true: RestoreCosts,
        believed: RestoreCosts | None = None,
        rule: Rule = DEFAULT,
        *,
        always_both: bool = False,
    ) -> None:
        self._true = true
        self._believed = believed or true
        self._rule = rule
        self._always_both = always_both
        self._now_s = 0.0
        self._busy: dict[str, _Work] = {}
        self._active: list[Restored] = []

    def run(self, requests: Sequence[Restored]) -> list[float]:
        """Seconds from arrival to done, of each request."""
        coming = sorted(requests, key=lambda request: request.arrived_s, reverse=True)
        while coming or self._active:
            while coming and coming[-1].arrived_s <= self._now_s + 1e-12:
                self._enter(coming.pop())
            self._start()
            self._advance(coming[-1].arrived_s if coming else float("inf"))
        return [request.done_s - request.arrived_s for request in requests]

    def _enter(self, request: Restored) -> None:
        if self._always_both:
            # Cake: a chunk that is being loaded is left to the link.
            request.pointers = Pointers(
                request.prefix.tiers, overtakes=lambda chunk: not self._is_loading(request, chunk)
            )
        else:
            chosen = plan(request.prefix, self._believed, layerwise=False)
            request.pointers = Pointers(
                request.prefix.tiers,
                overtakes=lambda chunk: self._overtakes(request, chunk),
                loads=chosen.axis != "compute",
                computes=chosen.axis != "load",
            )
        self._active.append(request)

    def _start(self) -> None:
        waiting = [Remaining(at, each.arrived_s, each.pointers.left) for at, each in enumerate(self._active)]
        if COMPUTE not in self._busy:
            for turn in in_turn(waiting, self._rule.compute, self._now_s):
                request = self._active[turn.number]
                chunk = request.pointers.next_compute()
                if chunk is not None:
                    seconds = request.prefix.compute_s(chunk, request.prefix.layers, self._true)
                    self._busy[COMPUTE] = _Work(request, chunk, seconds)
                    break
        for tier in self._true.links:
            if tier in self._busy:
                continue
            for turn in in_turn(waiting, self._rule.load, self._now_s):
                request = self._active[turn.number]
                chunk = request.pointers.next_load(tier)
                if chunk is not None:
                    seconds = request.prefix.load_s(chunk, request.prefix.layers, self._true)
                    self._busy[tier] = _Work(request, chunk, seconds)
                    break

    def _advance(self, until_s: float) -> None:
        """To the next end of work, or to `until_s`."""
        contention = self._true.contention
        loading = any(name != COMPUTE for name in self._busy)
        both = loading and COMPUTE in self._busy
        factors = {
            name: (contention.compute if name == COMPUTE else contention.load) if both else 1.0 for name in self._busy
        }
        ends = [work.left_s * factors[name] for name, work in self._busy.items()]
        step_s = min([*ends, until_s - self._now_s])
        if step_s == float("inf"):
            raise RuntimeError("requests are waiting and nothing can be done for them")
        self._now_s += step_s
        for name, work in list(self._busy.items()):
            work.left_s -= step_s / factors[name]
            if work.left_s <= 1e-12:
                del self._busy[name]
                if name == COMPUTE:
                    work.request.pointers.computed_chunk(work.chunk)
                else:
                    work.request.pointers.loaded_chunk(work.chunk)
        computing = self._busy.get(COMPUTE)
        for request in list(self._active):
            # The prompt's rest can be computed once no step of its own is under way.
            if request.pointers.is_done and (computing is None or computing.request is not request):
                request.done_s = self._now_s
                self._active.remove(request)

    def _is_loading(self, request: Restored, chunk: int) -> bool:
        work = self._busy.get(request.prefix.tiers[chunk])
        return work is not None and work.request is request and work.chunk == chunk

    def _overtakes(self, request: Restored, chunk: int) -> bool:
        """By what is believed: computing `chunk` from now on is done before loading it and all later ones is."""
        costs, prefix = self._believed, request.prefix
        computing_s = prefix.compute_s(chunk, prefix.layers, costs) * costs.contention.compute
        tier = prefix.tiers[chunk]
        work = self._busy.get(tier)
        under_way = work is not None and work.request is request
        stored = request.pointers.stored(tier)
        loading_s = sum(prefix.load_s(each, prefix.layers, costs) for each in stored)
        if work is not None and under_way:
            share = work.left_s / max(prefix.load_s(work.chunk, prefix.layers, self._true), 1e-12)
            loading_s += prefix.load_s(work.chunk, prefix.layers, costs) * share
        return computing_s * CAUTION <= loading_s * costs.contention.load
