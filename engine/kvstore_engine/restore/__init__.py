"""Using kvstored from the engine: restore a prompt's prefix instead of computing it, and store what was
computed.
"""

from kvstore_engine.restore.costs import CostModel
from kvstore_engine.restore.fingerprint import model_fingerprint
from kvstore_engine.restore.plan import RestorePlan, plan_restore
from kvstore_engine.restore.prefix import RestoreReport, restore_prefix
from kvstore_engine.restore.profile import CostProfile
from kvstore_engine.restore.session import KvSession
from kvstore_engine.restore.store import BlockStore, StoreReport

__all__ = [
    "BlockStore",
    "CostModel",
    "CostProfile",
    "KvSession",
    "RestorePlan",
    "RestoreReport",
    "StoreReport",
    "model_fingerprint",
    "plan_restore",
    "restore_prefix",
]
