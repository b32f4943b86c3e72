"""The rule for the boundaries between blocks where a layer group can resume, when some of its blocks are present. The
daemon answers by it, and clients use it when they read the lookup index or join the answers of several groups.

A set of boundaries is a whole number: bit b says that a resume behind the first b blocks is possible. Bit 0 is always
set, because nothing is needed there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.v1 import kvstore_pb2 as pb

_MATCHES = {"sliding": pb.MATCH_WINDOW, "recurrent": pb.MATCH_EXACT, "items": pb.MATCH_EXACT}
_DIGITS = bytes([ord("0"), *[ord("1")] * 255])  # of one base-two digit for each block


def match_of(kind: str) -> pb.Match.ValueType:
    """Return the rule by which blocks of a layer group of this `kind` allow a resume, as a `Match` of the wire:
    MATCH_WINDOW for "sliding", MATCH_EXACT for "recurrent" and "items", and MATCH_PREFIX for all other kinds.
    """
    return _MATCHES.get(kind, pb.MATCH_PREFIX)


def boundaries(present: Sequence[bool], match: int, window_blocks: int) -> int:
    """Return the block boundaries at which a layer group can resume, as the bits of a number: bit b means a resume
    behind the first b blocks. `present` says for each block whether it is stored; `match` is a `Match` of the wire.

    prefix: every boundary up to the first missing block. window: each boundary before which the last `window_blocks`
    blocks are present, or all blocks if there are fewer. exact: right behind each block that is present. An unknown
    match counts as prefix.
    """
    if match not in (pb.MATCH_EXACT, pb.MATCH_WINDOW):
        return (2 << (present.index(False) if False in present else len(present))) - 1
    bits = int(bytes(reversed(present)).translate(_DIGITS) or b"0", 2)
    if match == pb.MATCH_EXACT:
        return bits << 1 | 1
    window = min(max(window_blocks, 1), len(present) + 1)
    runs, length = bits << window | (1 << window) - 1, 1  # as if the blocks before the first were present
    while length < window:  # bit b of runs: the blocks from b - window on, `length` in a row
        step = min(length, window - length)
        runs, length = runs & runs >> step, length + step
    return runs


def restorable_blocks(present: Sequence[bool], match: int, window_blocks: int) -> int:
    """Return the largest number of leading blocks after which a layer group can resume. `present` says for each block
    whether it is stored. `match` is the group's rule, a `Match` of the wire, and `window_blocks` the length of its
    window.
    """
    if match == pb.MATCH_PREFIX:
        return present.index(False) if False in present else len(present)
    return boundaries(present, match, window_blocks).bit_length() - 1


def longest_common(sets: Sequence[int], most: int) -> tuple[int, int | None]:
    """Return the longest boundary, of at most `most` blocks, that is in all `sets`, and the position of the set that
    prevents a longer one. Each set is a number whose bit b says that a group can resume behind the first b blocks. The
    position is None if the boundary is `most`. If several sets shorten the boundary, the last one to do so counts.
    """
    ended, is_agreed = None, False
    while not is_agreed:
        is_agreed = True
        for position, allowed in enumerate(sets):
            longest = (allowed & (2 << most) - 1).bit_length() - 1
            if longest < most:
                most, ended, is_agreed = longest, position, False
    return most, ended
