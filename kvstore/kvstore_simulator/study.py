"""A study: one trace, policies crossed with admissions and capacities, one row each; the two upper bounds on top.

The module makes the rows and prints nothing. `unbounded` keeps everything, `clairvoyant` knows the future; both are
always included, so that a figure can be read against the possible one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvstore_simulator.hints import NO_HINTS, HintOptions
from kvstore_simulator.hit_value import ModelSize, Prices, hit_value, money
from kvstore_simulator.policies.clairvoyant import Clairvoyant
from kvstore_simulator.replay import Replay, ReplayResult, ReplaySettings
from kvstore_simulator.trace import Trace
from kvstored.policy_names import ALWAYS, LRU
from kvstored.store.policies import resolve

UNBOUNDED = "unbounded"
_NS_PER_HOUR = 3600 * 1_000_000_000
Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Study:
    """A study that replays one trace with every combination of `policies`, `admissions` and `capacities`, and counts
    hits. A capacity of at most 1 is a fraction of the trace's distinct blocks, a larger one a number of blocks.
    Requests before number `count_from` fill the tier and are not counted.
    """

    trace: Trace
    capacities: tuple[float, ...]
    policies: tuple[str, ...]
    admissions: tuple[str, ...]
    model: ModelSize
    ttl_s: float | None = None
    ghost_keys: int = 65_536
    count_from: int = 0
    prices: Prices | None = None
    hints: HintOptions = NO_HINTS
    keep_worth: float = 0.0

    def rows(self, progress: Progress) -> Iterator[Row]:
        """Yield a row of results for each replay when it is ready, first the upper bounds, which no policy can
        exceed.
        """
        distinct = self.trace.distinct_blocks
        yield self._row(UNBOUNDED, ReplaySettings(LRU, distinct), progress)
        others = [name for name in self.policies if name not in (Clairvoyant.name, UNBOUNDED)]
        for policy in [Clairvoyant.name, *others]:
            for admission in self.admissions if policy != Clairvoyant.name else (ALWAYS,):
                for blocks in dict.fromkeys(map(self.blocks, self.capacities)):
                    yield self._row(policy, self._settings(policy, admission, blocks), progress)

    def blocks(self, capacity: float) -> int:
        return max(1, round(capacity * self.trace.distinct_blocks if capacity <= 1 else capacity))

    def _settings(self, policy: str, admission: str, blocks: int) -> ReplaySettings:
        ttl_s, keep_worth = (None, 0.0) if policy == Clairvoyant.name else (self.ttl_s, self.keep_worth)
        block_bytes = self.model.kv_bytes_per_token * self.trace.block_tokens
        return ReplaySettings(
            resolve(policy), blocks, admission, ttl_s, self.ghost_keys, block_bytes, self.hints, keep_worth
        )

    def _row(self, policy: str, settings: ReplaySettings, progress: Progress) -> Row:
        label = f"{policy} at {settings.capacity_blocks:,} blocks"
        result = Replay(self.trace, settings).run(lambda done, total: progress(label, done, total))
        return self._report(policy, result)

    def _report(self, policy: str, result: ReplayResult) -> Row:
        trace, settings = self.trace, result.settings
        value = hit_value(trace, result.hits, self.model, self.count_from)
        block_bytes = self.model.kv_bytes_per_token * trace.block_tokens
        hours = float(trace.times_ns[-1] - trace.times_ns[self.count_from]) / _NS_PER_HOUR
        held = float(result.held_block_s[self.count_from + 1 :].sum()) / (3600 * hours) if hours else 0.0
        row: Row = {
            "policy": policy,
            "admission": settings.admission,
            "capacity_blocks": settings.capacity_blocks,
            "capacity_fraction": round(settings.capacity_blocks / trace.distinct_blocks, 6),
            "distinct_blocks": trace.distinct_blocks,
            "requests": value.requests,
            "block_accesses": value.block_accesses,
            "hits": value.hits,
            "hit_ratio": round(value.hit_ratio, 6),
            "compute_saved_ratio": round(value.compute_saved_ratio, 6),
            "seconds": round(result.seconds, 4),
            "accesses_per_second": round(trace.accesses / result.seconds),
            "resolved_policy": settings.policy if policy != UNBOUNDED else UNBOUNDED,
            "keep_worth": settings.keep_worth,
            "held_blocks_mean": round(held, 1),
            "stored_blocks": result.stored_blocks,
            "evictions": result.evicted,
            "bytes_by_lane": {
                "engine→host": result.stored_blocks * block_bytes,
                "host→engine": int(result.hits.sum()) * block_bytes,
            },
        }
        if self.prices is not None:
            sizes = (settings.capacity_blocks * block_bytes, round(held * block_bytes))
            row["cost"] = {name: round(usd, 4) for name, usd in money(self.prices, value, *sizes, hours).items()}
        return row
