"""What is resident of a prefix: asked of the daemon, or read from the lookup index. Moves nothing, and never raises for
a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvstore_client import lookup_index
from kvstore_client.prefix import Prefix
from kvstore_client.results import REASON_NO_DAEMON, Lookup, miss_reason, tier_name
from kvstore_proto.v1 import kvstore_pb2 as wire


def lookup(prefix: Prefix, deadline_s: float, *, clock: Callable[[], float] = time.monotonic) -> Lookup:
    """What the daemon says of a prefix, in several requests where it has more keys than one may name."""
    daemon, chain = prefix.daemon, prefix.chain
    deadline = clock() + deadline_s
    whole = Lookup()
    for start in range(0, len(chain), daemon.max_keys):
        keys = chain.keys[start : start + daemon.max_keys]
        request = wire.Request(lookup=wire.Lookup(sets=[prefix.key_set(keys)]))
        answer = daemon.call(request, max(deadline - clock(), 0.001))
        if isinstance(answer, str):
            return replace(whole, reason=answer)
        if not answer.lookup.sets:
            break
        found = answer.lookup.sets[0]
        blocks = whole.blocks + min(found.usable_blocks, len(keys))
        load_s = tuple(each / 1e6 for each in found.load_us[: found.usable_blocks])
        whole = Lookup(
            blocks=blocks,
            tokens=blocks * prefix.fingerprint.block_tokens,
            tiers=whole.tiers + tuple(map(tier_name, found.tiers)),
            estimated_load_s=whole.estimated_load_s + sum(load_s),
            reason=miss_reason(found.miss_reason) if blocks < len(chain) else "",
            load_s=whole.load_s + load_s,
        )
        if blocks < start + len(keys):
            break
    return whole


def probe(prefix: Prefix, *, may_wait: bool) -> Lookup:
    """What the lookup index says of a prefix."""
    index = prefix.daemon.index.get(may_wait=may_wait)
    found = lookup_index.probe(index, prefix.chain.keys, prefix.fingerprint, prefix.group)
    if not prefix.daemon.is_alive():  # the memory of its index remains, and shows for ever what was last
        return Lookup(reason=REASON_NO_DAEMON)
    return found
