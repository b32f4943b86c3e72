"""The requests of a session that lease and store nothing: lookups and probes of the index, hints, prefetches and
touches, deletions, explanations. Each is split into as many requests as the daemon's limit of keys requires.

The module checks an engine's expectations. A miss raises nothing; a missing answer is a reason in the result, and no
error if the request may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvstore_client import lookup_index
from kvstore_client.arguments import UINT32_MAX, count, number_between, one_of, text
from kvstore_client.daemon_session import DaemonSession, waiting_ms
from kvstore_client.errors import error_kind, invalid
from kvstore_client.prefix import KeyedPrefix
from kvstore_client.results import (
    REASON_DEADLINE,
    REASON_LIMIT,
    REASON_NO_DAEMON,
    TIER_NAMES,
    Deleted,
    Lookup,
    Prefetched,
    miss_reason,
    tier_names,
)
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import MAX_ACCOUNT_CHARACTERS, MAX_WEIGHTS_VERSION
from kvstore_proto.identity import BlockKeys
from kvstore_proto.matching import match_of
from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_proto.v1 import kvstore_pb2 as wire
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

MAX_DUE_S = 24 * 3600.0
NextStep = Literal["tool_call", "end_of_turn", "closed"]
NEXT_STEPS: Final[dict[str, wire.NextStep.ValueType]] = {
    "tool_call": wire.NEXT_STEP_TOOL_CALL,
    "end_of_turn": wire.NEXT_STEP_END_OF_TURN,
    "closed": wire.NEXT_STEP_CLOSED,
}
KEYS_A_REQUEST = 4096  # what the daemon explains at once


@dataclass(frozen=True, slots=True)
class Expectation:
    """An engine's expectation of how a chain of blocks will be used, for `Session.hint`: the chance that it continues,
    the time of its next use, and the engine's next step. Raises KVStoreError(INVALID) for values out of range.
    """

    will_continue: float | None
    due_in_s: float | None
    next_step: NextStep | None
    answer_tokens: int

    def __post_init__(self) -> None:
        if self.will_continue is not None:
            number_between("will_continue", self.will_continue, 0, 1)
        if self.due_in_s is not None:
            number_between("due_in_s", self.due_in_s, 0, MAX_DUE_S)
        if self.next_step is not None:
            one_of("next_step", self.next_step, NEXT_STEPS)
        count("answer_tokens", self.answer_tokens, most=UINT32_MAX)

    def of(self, blocks: wire.KeySet) -> wire.Hint:
        return wire.Hint(
            set=blocks,
            will_continue=self.will_continue,
            due_in_ms=None if self.due_in_s is None else round(float(self.due_in_s) * 1000),
            next_step=NEXT_STEPS[self.next_step] if self.next_step is not None else wire.NEXT_STEP_UNSPECIFIED,
            answer_tokens=self.answer_tokens,
        )

    def parts(self, keys: BlockKeys, most: int) -> Iterator[tuple[Expectation, BlockKeys]]:
        """Split this expectation about a chain of `keys`, because one request may name at most `most` keys. Yield for
        each request an expectation and its keys. The next step goes only with the end of the chain, the due time with
        all of its blocks.
        """
        if len(keys) <= most:
            yield self, keys
            return
        ended, due = replace(self, due_in_s=None), Expectation(None, self.due_in_s, None, 0)
        if self.due_in_s is not None:
            for first in range(0, len(keys), most):
                yield due, keys[first : first + most]
        if ended != Expectation(None, None, None, 0):
            yield ended, keys[len(keys) - most :]


def send_hint(prefix: KeyedPrefix, expected: Expectation) -> int:
    """Send the expectation `expected` about the chain of `prefix` to the daemon. Return the number of leading blocks of
    the prefix that are stored, or 0 without an answer.
    """
    known, most = 0, prefix.daemon.max_keys
    for part, keys in expected.parts(prefix.chain.keys, most):
        try:
            request = wire.Request(hint=part.of(prefix.key_set(keys)))
            answer = prefix.daemon.call(request, prefix.daemon.deadline_s)
        except KVStoreError:  # the values were checked: this daemon knows no hints
            return 0
        if isinstance(answer, str):
            return 0
        known = answer.hint.known_blocks
    return known if len(prefix) <= most else lookup(prefix, prefix.daemon.deadline_s).blocks


def send_prefetch(prefix: KeyedPrefix, in_s: float, budget_bytes: int) -> Prefetched:
    """Ask the daemon to promote the blocks of `prefix`, which will be needed in `in_s` seconds, up to `budget_bytes`
    bytes (0: the daemon's default). Return the numbers of blocks that are in memory and that will be promoted. If an
    answer is missing, they cover only the pieces of the prefix that were answered.
    """
    resident = scheduled = 0
    in_ms = int(in_s * 1000)
    for first, piece in prefix.pieces() if len(prefix) else ():
        blocks = piece.key_set()
        request = wire.Request(prefetch=wire.Prefetch(set=blocks, in_ms=in_ms, budget_bytes=budget_bytes))
        answer = prefix.daemon.call(request, prefix.daemon.deadline_s)
        if isinstance(answer, str):
            return Prefetched(resident, scheduled, answer)
        reply = answer.prefetch
        resident, scheduled = resident + reply.resident_blocks, scheduled + reply.scheduled_blocks
        taken = first + len(piece)
        if resident + scheduled < min(taken, first + reply.stored_blocks):
            return Prefetched(resident, scheduled, REASON_LIMIT)
        if resident + scheduled < taken:
            break
        if budget_bytes:
            budget_bytes -= reply.scheduled_bytes
            if budget_bytes <= 0:
                return Prefetched(resident, scheduled, REASON_LIMIT if taken < len(prefix) else "")
    return Prefetched(resident, scheduled)


def send_touch(prefix: KeyedPrefix, terms: Terms = NO_TERMS) -> int:
    """Count an access to the leading stored blocks of `prefix`, and set the `terms` on which they are kept. Return the
    number of these blocks. If the daemon does not answer a request, the blocks behind it are not touched or counted.
    """
    asked = wire.Terms(**terms._asdict())
    touched = 0
    for first, piece in prefix.pieces() if len(prefix) else ():
        request = wire.Request(touch=wire.Touch(set=piece.key_set(), terms=asked))
        answer = prefix.daemon.call(request, prefix.daemon.deadline_s)
        if isinstance(answer, str):
            break
        touched += answer.touch.touched
        if touched < first + len(piece):
            break
    return touched


def checked(request: ExplainRequest) -> ExplainRequest:
    """Return `request` unchanged. Raises KVStoreError(INVALID) if it is no ExplainRequest."""
    if not isinstance(request, ExplainRequest):
        raise invalid(f"request must be an ExplainRequest, got {type(request).__name__}")
    return request


def explain(
    daemon: DaemonSession, request: ExplainRequest, deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> ExplainReply | None:
    """Ask the daemon where the blocks of `request` are or why they are missing, and return its explanation. Return None
    unless the daemon sent the whole answer within `deadline_s` seconds.
    """
    until, whole = clock() + deadline_s, ExplainReply()
    for first in range(0, max(len(request.keys), 1), KEYS_A_REQUEST):
        part = ExplainRequest()
        part.CopyFrom(request)
        del part.keys[:]
        part.keys.extend(request.keys[first : first + KEYS_A_REQUEST])
        if first:
            part.recent_misses = 0
        answer = daemon.call(wire.Request(explain=part), max(until - clock(), 0.001))
        if isinstance(answer, str):
            return None
        if first:
            whole.blocks.extend(answer.explain.blocks)
        else:
            whole = answer.explain
    return whole


def bump_weights(daemon: DaemonSession, weights: str, version: int, deadline_s: float) -> int:
    """Make `version` the newest of the tenant's weights `weights`, 0: the next, and return the newest; 0 if there is no
    answer within `deadline_s` seconds. Raises KVStoreError for values out of bounds or an old version.
    """
    text("weights", weights, MAX_ACCOUNT_CHARACTERS * 4)
    version = count("version", version, most=MAX_WEIGHTS_VERSION)
    request = wire.Request(bump_weights=wire.BumpWeights(weights=weights, version=version))
    answer = _answer(daemon, request, deadline_s)
    return 0 if isinstance(answer, str) else answer.bump_weights.version


def catalogue(daemon: DaemonSession, request: wire.Catalogue, deadline_s: float) -> wire.CatalogueReply | str:
    """Send `request` about the catalogue of the tenant's objects, and return the answer, or the reason why there is
    none within `deadline_s` seconds. Raises KVStoreError for a request that the daemon refuses.
    """
    answer = _answer(daemon, wire.Request(catalogue=request), deadline_s)
    return answer if isinstance(answer, str) else answer.catalogue


def _answer(daemon: DaemonSession, request: wire.Request, deadline_s: float) -> wire.Response | str:
    """Send `request`, which is no hint and may not be lost, and return the answer, or the reason why there is none
    within `deadline_s` seconds. Raises KVStoreError for every refusal of the daemon, whose message says what to do."""
    call = daemon.begin(request, deadline_s)
    response = call.wait(deadline_s)
    if response is None:
        call.expire()
        return REASON_DEADLINE
    answer = call.judge(response)
    if isinstance(answer, str) and answer != REASON_NO_DAEMON:
        raise KVStoreError(error_kind(response.error.kind), response.error.message)
    return answer


def delete(prefix: KeyedPrefix, deadline_s: float, *, clock: Callable[[], float] = time.monotonic) -> Deleted:
    """Delete the blocks of `prefix` from every tier, the last one first, within `deadline_s` seconds, and return the
    counts. If the daemon does not answer a request, the deletion ends there.
    """
    daemon, keys = prefix.daemon, prefix.chain.keys
    total, until = Deleted(), clock() + deadline_s
    for end in range(len(keys), 0, -daemon.max_keys):
        part = keys[max(0, end - daemon.max_keys) : end]
        answer = daemon.call(wire.Request(delete=wire.Delete(set=prefix.key_set(part))), max(until - clock(), 0.001))
        if isinstance(answer, str):
            return replace(total, reason=answer)
        reply = answer.delete
        total = Deleted(
            total.blocks + reply.deleted,
            total.payload_bytes + reply.deleted_bytes,
            total.leased + reply.leased,
            total.continued + reply.continued,
            total.missing + reply.missing,
        )
    return total


def lookup(prefix: KeyedPrefix, deadline_s: float, *, clock: Callable[[], float] = time.monotonic) -> Lookup:
    """Ask the daemon which blocks of `prefix` are stored, and return its answer. A long prefix takes several requests;
    `deadline_s` seconds are for all of them.
    """
    blocks = len(prefix)
    if 0 < blocks <= prefix.daemon.max_keys:
        found = _presences((prefix,), max(deadline_s, 0.001))
        if isinstance(found, str):
            return Lookup(reason=found)
        return _whole(prefix, blocks, found[0]) if found else Lookup()
    parts, failure, until = list[wire.Presence](), "", clock() + deadline_s
    match = match_of(prefix.group.kind)
    for _, piece in prefix.pieces() if blocks else ():
        answer = _presences((piece,), max(until - clock(), 0.001))
        if isinstance(answer, str):
            failure = answer
            break
        if not answer:
            break
        parts.append(answer[0])
        if match == wire.MATCH_PREFIX and parts[-1].usable_blocks < len(piece):
            break
    return _joined(prefix, parts, failure)


def lookups(prefixes: Sequence[KeyedPrefix], deadline_s: float) -> list[Lookup]:
    """Ask the daemon in one request which blocks of several `prefixes`, of different layer groups, are stored. Return
    one answer for each prefix. All prefixes together may have no more keys than one request may name.
    """
    found = _presences(prefixes, deadline_s)
    if isinstance(found, str):
        return [Lookup(reason=found)] * len(prefixes)
    answers = [_whole(prefix, len(prefix), each) for prefix, each in zip(prefixes, found, strict=False)]
    return answers + [Lookup()] * (len(prefixes) - len(answers))


def _presences(prefixes: Sequence[KeyedPrefix], deadline_s: float) -> Sequence[wire.Presence] | str:
    """Return the daemon's answers about the `prefixes`, in one message, or the reason why there are none."""
    request = wire.Request()
    asked = request.lookup
    asked.max_wait_ms = waiting_ms(deadline_s)
    for prefix in prefixes:
        prefix.fill(asked.sets.add())
    answer = prefixes[0].daemon.call(request, deadline_s)
    return answer if isinstance(answer, str) else answer.lookup.sets


def _whole(prefix: KeyedPrefix, asked: int, found: wire.Presence) -> Lookup:
    """Return the answer about a prefix whose `asked` blocks are all in one request."""
    blocks = min(found.usable_blocks, asked)
    load_s = tuple([each / 1e6 for each in found.load_us[:blocks]])
    return Lookup(
        blocks,
        blocks * prefix.fingerprint.block_tokens,
        tier_names(found.tiers),
        sum(load_s, 0.0),
        "" if blocks == asked else miss_reason(found.miss_reason),
        load_s,
    )


def _joined(prefix: KeyedPrefix, parts: Sequence[wire.Presence], failure: str = "") -> Lookup:
    """Return one answer about a prefix from those about its pieces, the leading ones if there was a `failure`."""
    blocks, reason, tiers, load_s = 0, "", list[str](), list[float]()
    for number, found in enumerate(parts):
        first = number * prefix.daemon.max_keys
        asked = min(len(prefix) - first, prefix.daemon.max_keys)
        usable = min(found.usable_blocks, asked)
        tiers += tier_names(found.tiers)
        load_s += (each / 1e6 for each in found.load_us[:asked])
        blocks = first + usable
        if usable < asked:
            reason = miss_reason(found.miss_reason)
    if len(parts) > 1 and match_of(prefix.group.kind) != wire.MATCH_PREFIX:
        # a window may span two pieces, and a snapshot stands alone
        blocks = prefix.boundaries([tier != TIER_NAMES[0] for tier in tiers]).bit_length() - 1
    if blocks == len(prefix):
        reason = ""
    return Lookup(
        blocks=blocks,
        tokens=blocks * prefix.fingerprint.block_tokens,
        tiers=tuple(tiers),
        estimated_load_s=sum(load_s[:blocks], 0.0),
        reason=failure or reason,
        load_s=tuple(load_s[:blocks]),
    )


def probe(prefix: KeyedPrefix, *, may_wait: bool) -> Lookup:
    """Return what the lookup index in shared memory says about the blocks of `prefix`, without asking the daemon. With
    `may_wait` it may wait up to 20 ms, once, for the daemon to hand the index over.
    """
    index = prefix.daemon.index.get(may_wait=may_wait)
    found = lookup_index.probe(index, prefix.chain.keys, prefix.fingerprint, prefix.group)
    if not prefix.daemon.is_alive():  # the memory of its index remains, and shows for ever what was last
        return Lookup(reason=REASON_NO_DAEMON)
    return found
