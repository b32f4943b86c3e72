"""A slot is a payload that the function of a put fills through arrays: K and V of each layer, in stored or staging
memory.

The module decides when a slot ends. It never sends the slot: `put` sends it after the function has returned, or after
the function's returned waiter has.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore_client.arguments import count
from kvstore_client.arrays import Kind, LeaseArray
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot, Finish
from kvstore_client.prefix import group_of
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.kv_layout import KVLayout


class Slot:
    """The memory of one block's payload while a put fills it. `payload` is all of that memory, as a writable array
    uint8[payload_bytes].
    """

    def __init__(self, payload: Bytes, layout: KVLayout) -> None:
        self.payload = payload
        self._layout = layout
        self._is_over = False

    def array(self, layer: int | None = None, *, kind: Kind) -> LeaseArray:
        """Return a writable array for K (`kind` "k") or V ("v") of one `layer` of the block, or of all layers if
        `layer` is None. `Lease.array` will show the same numbers later. Before the put goes on, drop all arrays that a
        library made of this one, because a later write would change a stored block. Raises KVStoreError if the
        fingerprint describes no such array.
        """
        numbers = self._layout.numbers(len(self.payload), None if layer is None else count("layer", layer), kind)
        address = self.payload.__array_interface__["data"][0]
        return LeaseArray(numbers, address, self.payload, self, readonly=False)

    def hold(self) -> object:
        """Return the slot itself, for an array to refer to. Raises BufferError once the put has gone on, because a
        write would then change a stored block.
        """
        if self._is_over:
            raise BufferError("the slot is the store's again: its put went on")
        return self

    def end(self) -> None:
        self._is_over = True

    def __repr__(self) -> str:
        return f"Slot({len(self.payload)} bytes, {'over' if self._is_over else 'to be written'})"


def by_arrays(
    fingerprint: Fingerprint, write: Callable[[Slot], Finish | None], *, group: int | None = None
) -> FillSlot:
    """Return a payload for `Session.put`. When the put needs it, `write` is called with a `Slot` and fills it in shared
    memory through the slot's arrays. `write` may only begin copies, and return a function that waits for their end.
    `group` is the layer group, by default the first of `fingerprint`.
    """
    layout = KVLayout(fingerprint, group_of(fingerprint, group))

    def fill(destination: Bytes) -> Finish | None:
        slot = Slot(destination, layout)
        finish: Finish | None = None
        try:
            finish = write(slot)
        finally:
            if not callable(finish):
                slot.end()
        if not callable(finish):
            return finish
        waits = finish

        def settle() -> None:
            try:
                waits()
            finally:
                slot.end()

        return settle

    return fill
