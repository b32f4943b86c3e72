"""The policies and admissions that there are: each name with the address of what makes it.

Outside of `policies`: the configuration allows these names, and is read before that package and numpy are loaded.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final[dict[str, str]] = {
    "lru": "kvstored.store.policies.lru:Lru",
    "fifo": "kvstored.store.policies.fifo:Fifo",
    "lfu": "kvstored.store.policies.lfu_ttl:lfu",
    "lfu-ttl": "kvstored.store.policies.lfu_ttl:LfuTtl",
    "s3-fifo": "kvstored.store.policies.s3fifo:s3_fifo",
    "sieve": "kvstored.store.policies.sieve:sieve",
    "arc": "kvstored.store.policies.arc:arc",
    "w-tinylfu": "kvstored.store.policies.w_tinylfu:w_tinylfu",
    "gdsf": "kvstored.store.policies.gdsf:Gdsf",
    "chain-hazard": "kvstored.store.policies.chain_hazard:ChainHazard",
}
WITH_WORTH: Final = ("chain-hazard",)  # those that say what a block is worth
ADMISSIONS: Final[dict[str, str]] = {
    "always": "kvstored.store.policies.admission:Always",
    "second-touch": "kvstored.store.policies.admission:SecondTouch",
    "worth": "kvstored.store.policies.admission:ByWorth",
}
