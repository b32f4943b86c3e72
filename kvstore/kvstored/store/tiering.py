"""Which tier of a residency index is which: the one that clients map, and what the wire calls each."""

from __future__ import annotations

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.store.blocks import ResidencyView

MAPPED = 0  # the position of the tier whose arenas clients map: the first, fastest one


def tier_code(residency: ResidencyView, position: int) -> int:
    """The wire's TierCode of the tier at `position`."""
    if position == MAPPED:
        return pb.TIER_CODE_HOST
    return pb.TIER_CODE_NVME if position == residency.durable else pb.TIER_CODE_MEMORY


def codes_by_mask(residency: ResidencyView) -> bytes:
    """By a row's tier mask, the TierCode of the fastest tier that has it; 0 for none."""
    fastest = ((mask & -mask).bit_length() - 1 for mask in range(1, 1 << len(residency.tiers)))
    return bytes([0, *(tier_code(residency, position) for position in fastest)])
