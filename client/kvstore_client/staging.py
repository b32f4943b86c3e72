"""The staging memory of a daemon session, lent by the daemon: the client places blocks there by itself.

The module owns which bytes are in use, by which request, and the number of the loan. It never writes there. Invariants:
bytes that the daemon may be reading are not handed out. The daemon may read them until it has answered, however late:
bytes of a request without an answer become free once, with a late answer or when the loan is renewed. Safe for several
threads.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore_client.call import Late
from kvstore_client.memory import Bytes
from kvstore_proto.v1 import kvstore_pb2 as wire

Ask = Callable[[wire.Request, float, Late], wire.Response | str]
"""`DaemonSession.call`: (request, deadline_s, late) -> the daemon's answer, or the reason why there is none."""


@dataclass(slots=True, eq=False)
class Extent:
    """A run of slots in the staging memory: `nbytes` bytes from `offset` on. `users` is the number of its blocks that
    are in use. The extent is free when `users` is 0.
    """

    offset: int
    nbytes: int
    users: int


@dataclass(slots=True, eq=False)
class Use:
    """The use of staging memory by one request that stores blocks. `extents` has the extent (run of bytes) of each
    block. `is_over` is True once the request no longer needs the bytes.
    """

    extents: list[Extent] = field(default_factory=list)
    is_over: bool = False


class ClientStaging:
    """The staging memory of one client, with a record of which bytes are in use. The client places blocks there, and
    the daemon copies them. `memory` is mapped to write. `loan` is the number of the daemon's permission to use it, 0
    before `obtain`.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.loan = 0
        self._obtaining = threading.Lock()
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, len(memory))]  # (offset, length), sorted, coalesced
        self._unanswered: set[Use] = set()

    def obtain(self, ask: Ask, timeout_s: float) -> str:
        """Ask the daemon for the permission to use the staging memory, unless it was given before. Return "" if it is
        given, or the reason if there is no answer within `timeout_s` seconds. Raises the errors of `ask`, which
        sends the request.
        """
        if self.loan:
            return ""
        with self._obtaining:
            if self.loan:
                return ""
            answer = ask(wire.Request(lend=wire.Lend()), timeout_s, self._lent)
            if isinstance(answer, str):
                return answer
            self._lent(answer)
            return ""

    def renew(self, ask: Ask, timeout_s: float) -> None:
        """Ask the daemon for a new permission to use the staging memory. From then on the daemon ignores earlier
        requests without an answer, so their bytes are free. `ask` sends the request, and waits at most `timeout_s`
        seconds.
        """
        with self._changed:
            unanswered = list(self._unanswered)
        if not unanswered:
            return

        def renewed(response: wire.Response) -> None:
            self._lent(response)
            for use in unanswered:
                self.end(use)

        answer = ask(wire.Request(lend=wire.Lend()), timeout_s, renewed)
        if not isinstance(answer, str):
            renewed(answer)

    def take(self, slot_bytes: int, most: int, wait_s: float = 0.0) -> Extent | None:
        """Return an extent of at most `most` free slots of `slot_bytes` bytes, all in use by the caller from now on.
        Return None if no slot became free within `wait_s` seconds. The lowest free offset is used first, because memory
        used last is still in the processor's caches.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                for index, (offset, length) in enumerate(self._free):
                    slots = min(most, length // slot_bytes)
                    if slots:
                        nbytes = slots * slot_bytes
                        if nbytes == length:
                            del self._free[index]
                        else:
                            self._free[index] = (offset + nbytes, length - nbytes)
                        return Extent(offset, nbytes, slots)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None

    def hold(self, extent: Extent) -> None:
        """Count one more block as a user of `extent`, which must be in use. Raises RuntimeError if it is free
        already.
        """
        with self._changed:
            if not extent.users:
                raise RuntimeError(f"bytes {extent.offset}.. of the loan are free, and cannot be held")
            extent.users += 1

    def end(self, use: Use) -> None:
        """End the use of bytes by a request that was answered or never sent. A second call does nothing."""
        with self._changed:
            if use.is_over:
                return
            use.is_over = True
            self._unanswered.discard(use)
            freed = False
            for extent in use.extents:
                extent.users -= 1
                if not extent.users:
                    self._put_back(extent)
                    freed = True
            if freed:
                self._changed.notify_all()

    def leave_unanswered(self, use: Use) -> Callable[[wire.Response], None]:
        """Note that no thread waits for the answer to the request of `use` any more; its bytes stay in use. Return the
        function to call with the answer if it arrives late.
        """
        with self._changed:
            if not use.is_over:
                self._unanswered.add(use)
        return lambda _: self.end(use)

    def used_bytes(self) -> int:
        with self._changed:
            return len(self.memory) - sum(length for _, length in self._free)

    def _lent(self, response: wire.Response) -> None:
        with self._changed:  # the answer to an earlier Lend may come after that to a later one
            self.loan = max(self.loan, response.lend.loan)

    def _put_back(self, extent: Extent) -> None:
        free = self._free
        insort(free, (extent.offset, extent.nbytes))
        index = free.index((extent.offset, extent.nbytes))
        for left in (index, index - 1):  # with the one after, then with the one before
            if 0 <= left < len(free) - 1:
                (a, a_len), (b, b_len) = free[left], free[left + 1]
                if a + a_len > b:
                    raise RuntimeError(f"bytes {b}.. of the loan given back twice")
                if a + a_len == b:
                    free[left : left + 2] = [(a, a_len + b_len)]
