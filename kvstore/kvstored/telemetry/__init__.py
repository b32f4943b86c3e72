"""The daemon's counts and recent history. The code here reads the other parts; they do not call it."""

from contextvars import ContextVar

from kvstore_proto.trace import TraceContext
from kvstored.telemetry.counters import COUNTERS, Counters
from kvstored.telemetry.deletions import DeletionLog
from kvstored.telemetry.flows import Flows, Miss, RecentMisses, TenantFlow, TierFlow
from kvstored.telemetry.history import History
from kvstored.telemetry.latency import Latencies

CURRENT: ContextVar[TraceContext | None] = ContextVar("span that is under way", default=None)
"""The span in which the present task or call runs; None outside of requests."""

__all__ = [
    "COUNTERS",
    "CURRENT",
    "Counters",
    "DeletionLog",
    "Flows",
    "History",
    "Latencies",
    "Miss",
    "RecentMisses",
    "TenantFlow",
    "TierFlow",
]
