"""The names of policies and admissions, each with the address of its maker.

This file is outside of `policies`: the configuration allows these names, and is read before that package and numpy are
loaded.
"""

from __future__ import annotations

from typing import Final

BEST: Final = "best"
LRU: Final = "lru"
CHAIN_HAZARD: Final = "chain-hazard"
POLICIES: Final[dict[str, str]] = {
    LRU: "kvstored.store.policies.lru:Lru",
    "lfu-ttl": "kvstored.store.policies.lfu_ttl:LfuTtl",
    "s3-fifo": "kvstored.store.policies.s3fifo:S3Fifo",
    CHAIN_HAZARD: "kvstored.store.policies.chain_hazard:ChainHazard",
}
FOR_STUDIES: Final = ("fifo", "lfu", "sieve", "arc", "w-tinylfu", "gdsf")  # the simulator has them
ALWAYS: Final = "always"  # the admission of everything
SECOND_TOUCH: Final = "second-touch"
WITH_WORTH: Final = (CHAIN_HAZARD,)  # those that say what a block is worth
ADMISSIONS: Final[dict[str, str]] = {
    ALWAYS: "kvstored.store.policies.admission:Always",
    SECOND_TOUCH: "kvstored.store.policies.admission:SecondTouch",
    "worth": "kvstored.store.policies.admission:ByWorth",
}

EVICTED, REUSED, ALL = SHARES = ("evicted", "reused", "all")  # which blocks a remote tier is given


def resolve(name: str) -> str:
    """Return the policy name that `name` stands for: `best` is the default policy of DRAM; any other name is itself."""
    return CHAIN_HAZARD if name == BEST else name
