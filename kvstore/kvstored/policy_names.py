"""The policies and admissions that there are: each name with the address of its class.

Outside of `policies`: the configuration allows these names, and is read before that package and numpy are loaded.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final[dict[str, str]] = {
    "lru": "kvstored.policies.lru:Lru",
    "fifo": "kvstored.policies.fifo:Fifo",
    "lfu": "kvstored.policies.lfu:Lfu",
    "lfu-ttl": "kvstored.policies.lfu_ttl:LfuTtl",
    "s3-fifo": "kvstored.policies.s3fifo:S3Fifo",
    "sieve": "kvstored.policies.sieve:Sieve",
    "arc": "kvstored.policies.arc:Arc",
    "w-tinylfu": "kvstored.policies.w_tinylfu:WTinyLfu",
    "gdsf": "kvstored.policies.gdsf:Gdsf",
    "chain-hazard": "kvstored.policies.chain_hazard:ChainHazard",
}
WITH_WORTH: Final = ("chain-hazard",)  # those that say what a block is worth
ADMISSIONS: Final[dict[str, str]] = {
    "always": "kvstored.policies.admission:Always",
    "second-touch": "kvstored.policies.admission:SecondTouch",
    "worth": "kvstored.policies.admission:ByWorth",
}
