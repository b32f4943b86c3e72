"""The scrubber's position, kept over restarts: the slot that comes next, and when passes began and ended.

A small JSON file in the state directory, replaced by rename. Losing it costs a pass from the front, nothing else, so it
is not synced and anything odd in it counts as lost.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvstore_tiers.replaced_file import replace_file

_END = 2**63  # above every number that is meant


@dataclass
class Position:
    """Wall-clock seconds, 0 for never. `slab` and `slot` name what is read next, in the order of numbers."""

    slab: int = 0
    slot: int = 0
    pass_began_s: float = 0.0  # of the pass under way; 0 between passes
    pass_bytes: int = 0
    pass_slots: int = 0
    last_pass_s: float = 0.0  # when a whole pass last ended
    last_pass_began_s: float = 0.0

    def due_in_s(self, interval_s: float, now_s: float) -> float:
        """Seconds until a pass should begin; 0 when one is under way. A clock that was set back does not stop us."""
        if self.pass_began_s:
            return 0.0
        waited_s = now_s - self.last_pass_began_s
        return max(0.0, interval_s - waited_s) if waited_s >= 0 else 0.0

    def begin(self, now_s: float) -> None:
        if not self.pass_began_s:
            self.slab = self.slot = self.pass_bytes = self.pass_slots = 0
            self.pass_began_s = now_s

    def end(self, now_s: float) -> None:
        self.last_pass_s, self.last_pass_began_s, self.pass_began_s = now_s, self.pass_began_s, 0.0
        self.slab = self.slot = 0


def load(path: Path) -> Position:
    try:
        raw = json.loads(path.read_bytes())
        position = Position(**{field.name: type(field.default)(raw[field.name]) for field in fields(Position)})  # type: ignore[misc]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Position()
    return position if all(0 <= value < _END for value in asdict(position).values()) else Position()


def save(path: Path, position: Position) -> None:
    """Raises OSError."""
    replace_file(path, json.dumps(asdict(position)).encode(), durable=False)
