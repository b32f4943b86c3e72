"""The conformance suite of the tier contract, shipped so that the author of a tier can test it.

    from kvstore_tiers.testing import TierContract, tier_state_machine

    class TestMyTier(TierContract):
        def make_tier(self, capacity_bytes):
            return MyTier(capacity_bytes)

    TestMyTierStateful = tier_state_machine(lambda: MyTier(1 << 20)).TestCase

`CodecContract` is the suite for a codec, and for the tiers that keep its bytes. The import needs neither pytest nor
hypothesis; running the state machine needs hypothesis.
"""

from __future__ import annotations

from kvstore_tiers.testing.codec_contract import CodecContract
from kvstore_tiers.testing.contract import TierContract
from kvstore_tiers.testing.stateful import tier_state_machine
from kvstore_tiers.testing.transfers import block, finish, finish_all

__all__ = ["CodecContract", "TierContract", "block", "finish", "finish_all", "tier_state_machine"]
