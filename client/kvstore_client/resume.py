"""The point at which a model can resume: the longest boundary between blocks that suits all of its layer groups.

The groups' blocks are looked up in one message where it can name them all; otherwise group after group, each only as
far as those before it allow. A miss raises nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvstore_client.connection import Connection
from kvstore_client.errors import invalid
from kvstore_client.prefix import KeyedPrefix, prefix_of
from kvstore_client.requests import lookup, lookups, probe
from kvstore_client.results import (
    MISS_REASONS,
    REASON_ABSENT,
    REASON_SHORT,
    REASON_UNKNOWN,
    TIER_NAMES,
    UNKNOWN_TIER,
    Lookup,
    ResumePoint,
)
from kvstore_proto.identity import BlockKeys
from kvstore_proto.matching import longest_common
from kvstore_proto.token_ids import TokenIds

_ANSWERED = (*MISS_REASONS, REASON_ABSENT, REASON_UNKNOWN)
KeysByGroup = Mapping[int, BlockKeys]


def prefixes_of(connection: Connection, tokens: TokenIds | None, keys: KeysByGroup | None) -> list[KeyedPrefix] | None:
    """Return the blocks of a prompt in every layer group, or None while `connection` is degraded. The prompt is given
    by `tokens`, or by `keys`, which maps each group's number to the keys of all its blocks. Raises
    KVStoreError(INVALID) for a wrong argument.
    """
    groups = [group.group_id for group in connection.options.fingerprint.groups]
    if keys is not None and (not isinstance(keys, Mapping) or sorted(keys) != sorted(groups)):
        raise invalid(f"keys= must be the BlockKeys of each layer group by its number; groups are {groups}")
    found = [prefix_of(connection, tokens, None if keys is None else keys[group], group) for group in groups]
    there = [prefix for prefix in found if prefix is not None]
    if len({len(prefix) for prefix in there}) > 1:
        raise invalid("keys= must have the same number of blocks for each layer group")
    return there if len(there) == len(groups) and len({id(prefix.daemon) for prefix in there}) == 1 else None


def resume_point(
    prefixes: Sequence[KeyedPrefix], deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> ResumePoint:
    """Ask the daemon for the longest block boundary at which all layer groups can resume, and return it. `prefixes` has
    the prompt's blocks in each group. `deadline_s` seconds are for all requests.
    """
    until = clock() + deadline_s
    if not len(prefixes[0]):
        return _short(prefixes[0])
    if sum(map(len, prefixes)) <= prefixes[0].daemon.max_keys:
        answers = lookups(prefixes, deadline_s)
    else:
        answers = _one_by_one(prefixes, until, clock)
    point, lacking = _common(prefixes, answers)
    if lacking is None:
        return point
    position, block = lacking
    reason = answers[position].reason
    if block != answers[position].blocks:  # it lacks that one, too: why was said for another one alone
        one = prefixes[position].tail(block).head(1)
        reason = lookup(one, max(until - clock(), 0.001), clock=clock).reason or reason
    return replace(point, reason=reason)


def probed_point(prefixes: Sequence[KeyedPrefix]) -> ResumePoint:
    """Return the longest block boundary at which all layer groups can resume, as the lookup index in shared memory
    shows it. `prefixes` has the prompt's blocks in each group. The answer may be old, see `Session.probe`.
    """
    if not len(prefixes[0]):
        return _short(prefixes[0])
    answers = [probe(prefix, may_wait=True) for prefix in prefixes]
    point, lacking = _common(prefixes, answers)
    if lacking is None:
        return point
    hoped = [[tier != TIER_NAMES[0] for tier in answer.tiers] for answer in answers]
    maps = [prefix.boundaries(present) for prefix, present in zip(prefixes, hoped, strict=True)]
    is_sure = longest_common(maps, len(prefixes[0]))[0] == point.blocks
    return replace(point, reason=REASON_ABSENT if is_sure else REASON_UNKNOWN)


def _short(prefix: KeyedPrefix) -> ResumePoint:
    return ResumePoint(reason=REASON_SHORT if 0 < prefix.chain.prompt_tokens < prefix.fingerprint.block_tokens else "")


def _one_by_one(prefixes: Sequence[KeyedPrefix], until: float, clock: Callable[[], float]) -> list[Lookup]:
    most, answers = len(prefixes[0]), list[Lookup]()
    for prefix in prefixes:
        answers.append(lookup(prefix.head(most), max(until - clock(), 0.001), clock=clock))
        most = min(most, answers[-1].blocks)
    return answers


def _common(prefixes: Sequence[KeyedPrefix], answers: Sequence[Lookup]) -> tuple[ResumePoint, tuple[int, int] | None]:
    """Return the common point without the reason for its end; and where it was ended by a group that lacks a block, the
    position of that group and the number of the block.
    """
    failed = next((answer.reason for answer in answers if answer.reason not in _ANSWERED), "")
    if failed:
        return ResumePoint(reason=failed), None
    absent = (TIER_NAMES[0], UNKNOWN_TIER)
    maps = [
        prefix.boundaries([tier not in absent for tier in answer.tiers])
        for prefix, answer in zip(prefixes, answers, strict=True)
    ]
    blocks, position = longest_common(maps, len(prefixes[0]))
    load_s = 0.0
    for prefix, answer in zip(prefixes, answers, strict=True):
        needed = prefix.group.needed_blocks(blocks, prefix.fingerprint.block_tokens)
        load_s += sum(answer.load_s[needed.start : needed.stop])
    point = ResumePoint(
        blocks=blocks,
        tokens=blocks * prefixes[0].fingerprint.block_tokens,
        ended_by=None if position is None else prefixes[position].group.group_id,
        estimated_load_s=load_s,
    )
    return point, None if position is None else (position, blocks)
