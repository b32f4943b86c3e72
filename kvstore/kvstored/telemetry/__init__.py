"""What the daemon counts. Telemetry asks; nobody pushes."""

from kvstored.telemetry.counters import COUNTERS, Counters
from kvstored.telemetry.flows import Flows, TierFlow

__all__ = ["COUNTERS", "Counters", "Flows", "TierFlow"]
