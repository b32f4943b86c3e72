"""kvstored in the engine: restore a prompt's prefix instead of computing it, and store computed blocks."""

from kvstore_engine.restore.fingerprint import model_fingerprint
from kvstore_engine.restore.record import RestorationLog, RestorationRecord, RestoreReport, StoreReport
from kvstore_engine.restore.session import KvSession

__all__ = [
    "KvSession",
    "RestorationLog",
    "RestorationRecord",
    "RestoreReport",
    "StoreReport",
    "model_fingerprint",
]
