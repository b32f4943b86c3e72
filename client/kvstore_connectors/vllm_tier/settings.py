"""What a user may set for the tier, in its entry of `secondary_tiers`.

Owns the names and defaults. Invariant: as in `kvstore_connectors.vllm.settings`: what makes no sense is refused when
the engine starts, with one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore_connectors.vllm.settings import parse


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`socket`: the daemon's socket directory (default: $KVSTORED_SOCKET_DIR, else /run/kvstored). `read_only`: load,
    never store. The deadlines bound one question, one load and one store of a part of a job. Stores that wait may hold
    `store_queue_mib` of vLLM's CPU tier; further ones are dropped. `keep_after_reset`: go on using what is stored after
    vLLM's caches were reset, which is right only where weights are never changed in place. `weights_digest` names model
    and weights for vLLM's plain OffloadingConnector, which says neither.
    """

    socket: str = ""
    read_only: bool = False
    lookup_deadline_ms: int = 100
    load_deadline_ms: int = 2000
    store_deadline_ms: int = 5000
    connect_timeout_ms: int = 500
    load_threads: int = 4
    store_queue_mib: int = 256
    staging_mib: int = 64
    enable_kv_events: bool = False
    keep_after_reset: bool = False
    weights_digest: str = ""


def parse_tier_settings(given: Mapping[str, Any]) -> TierSettings:
    """Raises ValueError with a sentence that names the key."""
    return parse(TierSettings, given, "secondary_tiers")
