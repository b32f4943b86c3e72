"""Records of the engine's work and its times: latencies, throughput, memory, and a trace to look at."""

from kvstore_engine.batching.observer import FanOut
from kvstore_engine.profiler.histogram import Histogram
from kvstore_engine.profiler.profiler import Profiler
from kvstore_engine.profiler.tracing_observer import TracingObserver

__all__ = ["FanOut", "Histogram", "Profiler", "TracingObserver"]
