"""What is resident of a prefix: asked of the daemon, or read from the lookup index. Moves nothing, and never raises for
a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore_client import lookup_index
from kvstore_client.prefix import Prefix
from kvstore_client.results import MISS_REASONS, REASON_NO_DAEMON, TIER_NAMES, Lookup, miss_reason, tier_name
from kvstore_proto.matching import match_of, restorable_blocks
from kvstore_proto.v1 import kvstore_pb2 as wire


def lookup(prefix: Prefix, deadline_s: float, *, clock: Callable[[], float] = time.monotonic) -> Lookup:
    """What the daemon says of a prefix, in several requests where it has more keys than one may name."""
    blocks, reason, tiers, load_s = 0, "", list[str](), list[float]()
    until, match = clock() + deadline_s, match_of(prefix.group.kind)
    for first, piece in prefix.pieces() if len(prefix) else ():
        request = wire.Request(lookup=wire.Lookup(sets=[piece.key_set(piece.chain.keys)]))
        answer = prefix.daemon.call(request, max(until - clock(), 0.001))
        if isinstance(answer, str):
            reason = answer
            break
        if not answer.lookup.sets:
            break
        found = answer.lookup.sets[0]
        usable = min(found.usable_blocks, len(piece))
        tiers += map(tier_name, found.tiers)
        load_s += (each / 1e6 for each in found.load_us[: len(piece)])
        if match == wire.MATCH_PREFIX or len(piece) == len(prefix):
            blocks = first + usable
        else:  # a window may span two pieces, and a snapshot stands alone
            blocks = restorable_blocks([tier != TIER_NAMES[0] for tier in tiers], match, prefix.window_blocks)
        if usable < len(piece):
            reason = miss_reason(found.miss_reason)
            if match == wire.MATCH_PREFIX:
                break
    is_known = reason in MISS_REASONS
    return Lookup(
        blocks=blocks,
        tokens=blocks * prefix.fingerprint.block_tokens,
        tiers=tuple(tiers),
        estimated_load_s=sum(load_s[:blocks], 0.0),
        reason=reason if blocks < len(prefix) or not is_known else "",
        load_s=tuple(load_s[:blocks]),
    )


def probe(prefix: Prefix, *, may_wait: bool) -> Lookup:
    """What the lookup index says of a prefix."""
    index = prefix.daemon.index.get(may_wait=may_wait)
    found = lookup_index.probe(index, prefix.chain.keys, prefix.fingerprint, prefix.group)
    if not prefix.daemon.is_alive():  # the memory of its index remains, and shows for ever what was last
        return Lookup(reason=REASON_NO_DAEMON)
    return found
