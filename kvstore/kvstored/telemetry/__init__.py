"""The daemon's counts and recent history. The code here reads the other parts; they do not call it."""

from kvstored.telemetry.counters import COUNTERS, Counters
from kvstored.telemetry.deletions import DeletionLog
from kvstored.telemetry.flows import Flows, Miss, RecentMisses, TenantFlow, TierFlow
from kvstored.telemetry.history import History
from kvstored.telemetry.latency import Latencies

__all__ = [
    "COUNTERS",
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
