"""What an engine expects of a chain, checked, and as it goes over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvstore_client.errors import invalid
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
class Expected:
    """See `Session.hint`. Raises KVStoreError(INVALID) for what cannot be expected."""

    will_continue: float | None
    due_in_s: float | None
    next_step: NextStep | None
    answer_tokens: int

    def __post_init__(self) -> None:
        if self.will_continue is not None and not 0.0 <= self.will_continue <= 1.0:
            raise invalid(f"will_continue must be from 0 to 1, got {self.will_continue}")
        if self.due_in_s is not None and not 0.0 <= self.due_in_s <= MAX_DUE_S:
            raise invalid(f"due_in_s must be from 0 to {MAX_DUE_S:.0f} seconds, got {self.due_in_s}")
        if self.next_step is not None and self.next_step not in NEXT_STEPS:
            raise invalid(f"next_step {self.next_step!r} is unknown; known: {', '.join(NEXT_STEPS)}")
        if not 0 <= self.answer_tokens < 1 << 32:
            raise invalid(f"answer_tokens must be from 0 to 4,294,967,295, got {self.answer_tokens}")

    def of(self, blocks: wire.KeySet) -> wire.Hint:
        """That this is expected of these blocks."""
        return wire.Hint(
            set=blocks,
            will_continue=self.will_continue,
            due_in_ms=None if self.due_in_s is None else round(self.due_in_s * 1000),
            next_step=NEXT_STEPS[self.next_step] if self.next_step is not None else wire.NEXT_STEP_UNSPECIFIED,
            answer_tokens=self.answer_tokens,
        )

    def parts(self, keys: BlockKeys, most: int) -> Iterator[tuple[Expected, int, BlockKeys]]:
        """What to say of which keys, and the number of the first, where a request takes `most` keys: how a chain ended
        is said of its end; that it is due of its beginning, where lies what is stored of it.
        """
        if len(keys) <= most:
            yield self, 0, keys
            return
        ended, due = replace(self, due_in_s=None), Expected(None, self.due_in_s, None, 0)
        if self.due_in_s is not None:
            yield due, 0, keys[:most]
        if ended != Expected(None, None, None, 0):
            yield ended, len(keys) - most, keys[len(keys) - most :]
