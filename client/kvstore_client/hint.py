"""What helps the daemon decide which blocks to keep and to promote: hints, prefetches and touches.

Owns the check of what an engine expects. An answer that is missing is no error here: all of these may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvstore_client.arguments import UINT32_MAX, count, number_between, one_of
from kvstore_client.lookup import lookup
from kvstore_client.prefix import Prefix
from kvstore_client.results import REASON_LIMIT, Prefetched
from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import BlockKeys
from kvstore_proto.v1 import kvstore_pb2 as wire

MAX_DUE_S = 24 * 3600.0
NextStep = Literal["tool_call", "end_of_turn", "closed"]
NEXT_STEPS: Final[dict[str, wire.NextStep.ValueType]] = {
    "tool_call": wire.NEXT_STEP_TOOL_CALL,
    "end_of_turn": wire.NEXT_STEP_END_OF_TURN,
    "closed": wire.NEXT_STEP_CLOSED,
}


@dataclass(frozen=True, slots=True)
class Expectation:
    """See `Session.hint`. Raises KVStoreError(INVALID) for values out of range."""

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
        """Expectations and their keys, where one request takes `most` keys. How a chain ended concerns its end; when it
        is due concerns all of its stored blocks.
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


def send_hint(prefix: Prefix, expected: Expectation) -> int:
    """How many leading blocks of the prefix the daemon has; 0 without an answer."""
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


def send_prefetch(prefix: Prefix, in_s: float, budget_bytes: int) -> Prefetched:
    """See `Session.prefetch`. What was answered, where an answer is missing."""
    resident = scheduled = 0
    in_ms = int(in_s * 1000)
    for first, piece in prefix.pieces() if len(prefix) else ():
        blocks = piece.key_set(piece.chain.keys)
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


def send_touch(prefix: Prefix) -> int:
    """Return how many leading blocks of `prefix` the daemon has. A request without an answer ends the count."""
    touched = 0
    for first, piece in prefix.pieces() if len(prefix) else ():
        request = wire.Request(touch=wire.Touch(set=piece.key_set(piece.chain.keys)))
        answer = prefix.daemon.call(request, prefix.daemon.deadline_s)
        if isinstance(answer, str):
            break
        touched += answer.touch.touched
        if touched < first + len(piece):
            break
    return touched
