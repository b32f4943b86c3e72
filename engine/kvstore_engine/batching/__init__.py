"""The engine of many sequences: requests in, events out, one step at a time."""

from kvstore_engine.batching.compute import Compute, VerifiedCompute
from kvstore_engine.batching.constraint import Constraint
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Event, Finished, Reason, Token, Usage
from kvstore_engine.batching.intake import Overloaded
from kvstore_engine.batching.observer import Observer, SequencePart, StepRecord
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import POLICIES, EngineSettings

__all__ = [
    "POLICIES",
    "BatchEngine",
    "Compute",
    "Constraint",
    "EngineSettings",
    "Event",
    "Finished",
    "Observer",
    "Overloaded",
    "Reason",
    "Request",
    "RequestSettings",
    "SequencePart",
    "StepRecord",
    "Token",
    "Usage",
    "VerifiedCompute",
]
