"""Using kvstored from the engine: restore a prompt's prefix instead of computing it, and store what was
computed.
"""

from kvstore_engine.restore.costs import CostModel
from kvstore_engine.restore.fingerprint import model_fingerprint
from kvstore_engine.restore.plan import RestorePlan, plan_restore
from kvstore_engine.restore.profile import CostProfile
from kvstore_engine.restore.report import RestoreReport, StoreReport
from kvstore_engine.restore.session import KvSession

__all__ = [
    "CostModel",
    "CostProfile",
    "KvSession",
    "RestorePlan",
    "RestoreReport",
    "StoreReport",
    "model_fingerprint",
    "plan_restore",
]
