"""The wire's codes for tiers, causes and steps."""

from __future__ import annotations

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.lifecycle import Cause
from kvstored.store.blocks import ResidencyView
from kvstored.tier_set import NO_TIERS, TIER_SETS, TierSet


def tier_code(residency: ResidencyView, position: int, device_tiers: TierSet = NO_TIERS) -> int:
    """Return the TierCode of the tier at `position`. `device_tiers`: the tiers that the client reads on its device."""
    if position in device_tiers:
        return pb.TIER_CODE_GPU
    if position == residency.mapped:
        return pb.TIER_CODE_HOST
    if position == residency.durable:
        return pb.TIER_CODE_NVME
    return pb.TIER_CODE_MEMORY if position < residency.in_memory else pb.TIER_CODE_REMOTE


def codes_by_mask(residency: ResidencyView, device_tiers: TierSet = NO_TIERS) -> bytes:
    """Return, by a row's tier mask, the TierCode of the fastest tier for the client; 0 for none."""
    fastest = (residency.fastest_of(tiers, device_tiers) for tiers in TIER_SETS[1 : 2 ** len(residency.tiers)])
    return bytes([0, *(tier_code(residency, position, device_tiers) for position in fastest)])


def miss_reason(cause: Cause) -> pb.MissReason.ValueType:
    return pb.MissReason.ValueType(cause)


def known_step(step: int) -> int:
    """Return `step` (a NextStep, why an engine stopped); 0 for a value that only a newer version knows."""
    return step if step in pb.NextStep.values() else pb.NEXT_STEP_UNSPECIFIED
