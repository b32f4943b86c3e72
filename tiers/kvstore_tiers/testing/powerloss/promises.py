"""The promises that a recorded process had made at a tick, read from its marks.

    put      the items are about to be written: from now on they may be there
    durable  their writer learned that they are durable: they must be there
    freed    the items are about to be freed: from now on they may be gone
    gone     the items were freed and a sync was answered since: they must not come back

Owns the meaning of marks. An item names a block in the log's workload. Never looks at a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore_tiers.testing.powerloss.log import Kind, Operation

Item = int | str


@dataclass
class Promises:
    durable: set[Item] = field(default_factory=set)
    gone: set[Item] = field(default_factory=set)
    tried: set[Item] = field(default_factory=set)  # all that were ever put

    def take(self, mark: dict[str, list[Item]]) -> None:
        """Add the promises of `mark`, a note in the log: lists of blocks by the kind of promise ("put", "durable",
        "freed" or "gone").
        """
        self.gone -= set(mark.get("put", ()))
        self.tried |= set(mark.get("put", ()))
        self.durable -= set(mark.get("freed", ()))
        self.durable |= set(mark.get("durable", ()))
        self.gone |= set(mark.get("gone", ()))


def promises_at(operations: Iterable[Operation], tick: int) -> Promises:
    """Return the promises that the recorded process had made before the moment `tick`, from the marks among
    `operations`.
    """
    promises = Promises()
    for one in operations:
        if one.kind is Kind.MARK and one.start < tick:
            promises.take(one.mark())
    return promises
