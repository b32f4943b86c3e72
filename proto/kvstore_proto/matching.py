"""The rule for how far a chain can be restored when some of its blocks are present. The daemon answers by it, and
clients use it when they read the lookup index.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.v1 import kvstore_pb2 as pb

_MATCHES = {"sliding": pb.MATCH_WINDOW, "recurrent": pb.MATCH_EXACT}


def match_of(kind: str) -> pb.Match.ValueType:
    """Return the matching rule of a kind of layer group."""
    return _MATCHES.get(kind, pb.MATCH_PREFIX)


def restorable_blocks(present: Sequence[bool], match: int, window_blocks: int) -> int:
    """Return how many leading blocks can be restored; `match` is a `Match` of the wire.

    prefix: the leading run. window: the longest prefix whose last `window_blocks` are all present (sliding-window
    layers need no more, as in Gemma and Mistral). exact: up to the last block that is present (a recurrent snapshot
    needs no other block). An unknown match counts as prefix.
    """
    if match == pb.MATCH_EXACT:
        return next((i + 1 for i in range(len(present) - 1, -1, -1) if present[i]), 0)
    if match != pb.MATCH_WINDOW:
        return present.index(False) if False in present else len(present)
    run = best = 0
    for i, is_present in enumerate(present):
        run = run + 1 if is_present else 0
        if run >= min(max(window_blocks, 1), i + 1):
            best = i + 1
    return best
