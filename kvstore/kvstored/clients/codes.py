"""The numbers that the wire protocol uses for tiers, causes and steps, and its messages for terms."""

from __future__ import annotations

from kvstore_proto.terms import Terms
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.lifecycle import Cause
from kvstored.store.blocks import ResidencyView
from kvstored.tier_set import NO_TIERS, TIER_SETS, TierSet


def tier_code(residency: ResidencyView, position: int, device_tiers: TierSet = NO_TIERS) -> int:
    """Return the code that messages to clients use for the tier at `position` in the block index `residency`.
    `device_tiers` are the tiers whose copies the client reads on its own GPU; they have a code of their own."""
    if position in device_tiers:
        return pb.TIER_CODE_GPU
    if position == residency.mapped:
        return pb.TIER_CODE_HOST
    if position == residency.durable:
        return pb.TIER_CODE_NVME
    return pb.TIER_CODE_MEMORY if position < residency.in_memory else pb.TIER_CODE_REMOTE


def codes_by_mask(residency: ResidencyView, device_tiers: TierSet = NO_TIERS) -> bytes:
    """Return a table of bytes. The byte at index m is the wire's code of the fastest tier for the client in the set of
    tiers m (bit t stands for tier t), and 0 for the empty set. `device_tiers` are the tiers on the client's device."""
    fastest = (residency.fastest_of(tiers, device_tiers) for tiers in TIER_SETS[1 : 2 ** len(residency.tiers)])
    return bytes([0, *(tier_code(residency, position, device_tiers) for position in fastest)])


def miss_reason(cause: Cause) -> pb.MissReason.ValueType:
    return pb.MissReason.ValueType(cause)


def known_step(step: int) -> int:
    """Return `step` (the wire's NextStep, why an engine stopped), or 0 for a value that this version does not know."""
    return step if step in pb.NextStep.values() else pb.NEXT_STEP_UNSPECIFIED


def terms_of(message: pb.Terms) -> Terms:
    """Return the terms (time to live, priority, pins) in the wire message `message`, not checked yet."""
    return Terms(
        message.ttl_s if message.HasField("ttl_s") else None,
        message.priority if message.HasField("priority") else None,
        message.pin,
        message.unpin,
        message.pin_ttl_s if message.HasField("pin_ttl_s") else None,
    )
