"""Host memory that the driver may copy from and to: arenas from when they are mapped, staging memory from its first use
on, registered while they are in use.

The module owns the registrations and the thread that makes and ends them: registering takes about 0.1 s a GB, and no
copy waits for it. Memory that is not registered yet is copied by way of a pinned buffer (`transfers`). Invariants:
memory is unregistered before it can be unmapped, and not while a copy uses it; memory that this process may only read
is registered as read-only, if the device can do that, and otherwise not at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_client.memory import Bytes
from kvstore_cuda.device import never_unmap

REGISTER_BYTES = 1 << 30  # in one call: over 512 GiB fails, and each call holds the driver's lock
IDLE_S = 60.0  # pages of an arena that the daemon has given up stay in memory as long as they are registered
EARLY_S = 300.0  # for memory that was not used yet: an engine that starts loads its model and warms up meanwhile


@dataclass(slots=True, eq=False)
class Registration:
    """The registration of one part of mapped host memory with the CUDA driver. `memory` is the part, at `address`.
    `users` counts the copies that need it now; without any it ends `keep_s` seconds after `used_at`.
    """

    memory: Bytes
    address: int
    is_made: bool = False
    users: int = 0
    used_at: float = 0.0
    keep_s: float = IDLE_S


class RegisteredMemory:
    """The host memory that is registered with the CUDA driver, so that `device` copies from and to it directly. A
    thread registers arenas when they are mapped and other memory when it is wanted, and unregisters it when it is
    idle. `clock` returns seconds.
    """

    def __init__(self, device: DeviceMemory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        with device.current():
            self._can_read_only = device.registers_read_only
        self._changed = threading.Condition()
        self._parts: dict[int, Registration] = {}  # by address
        self._wanted: deque[Registration] = deque()
        self._ending: list[Registration] = []  # the thread's: registered still, and no copy's any more
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)
        self._thread.start()
        device.mappings.follow(self)

    def want(self, memory: Bytes, keep_s: float = IDLE_S) -> None:
        """Have a thread register `memory`, an array over a whole mapping, and keep it registered for at least `keep_s`
        seconds. The call does not wait. Memory that the device cannot register, because it is read-only, is left
        out.
        """
        if not (memory.flags.writeable or self._can_read_only):
            return
        with self._changed:
            for part, address in _parts(memory):
                known = self._parts.get(address)
                if known is not None:
                    known.keep_s = max(known.keep_s, keep_s)
                elif not self._is_closed:
                    self._parts[address] = Registration(part, address, used_at=self._clock(), keep_s=keep_s)
                    self._wanted.append(self._parts[address])
                    self._changed.notify_all()

    def mapped(self, memory: Bytes) -> None:
        self.want(memory, EARLY_S)

    def given_up(self, memory: Bytes) -> None:
        with self._changed:
            for _, address in _parts(memory):
                if address in self._parts:
                    self._parts[address].keep_s = 0.0

    def take(self, memory: Bytes, offset: int, nbytes: int) -> Registration | None:
        """Return the registration of the `nbytes` bytes from `offset` in the mapping `memory`. The bytes stay
        registered until `give_back` is called with it. Return None if the bytes are not registered yet; a thread then
        begins to register them.
        """
        start = offset // REGISTER_BYTES * REGISTER_BYTES
        address = memory.__array_interface__["data"][0] + start
        with self._changed:
            known = self._parts.get(address)
            if known is not None and known.is_made and offset + nbytes <= start + known.memory.nbytes:
                known.users += 1
                return known
        if known is None:
            self.want(memory)
        return None

    def give_back(self, taken: Registration) -> None:
        """Note that the copies have ended for which `take` returned the registration `taken`."""
        with self._changed:
            taken.users -= 1
            taken.used_at, taken.keep_s = self._clock(), min(taken.keep_s, IDLE_S)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all wanted memory is registered or has failed. Return False if `timeout_s` seconds did not
        suffice.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._wanted, timeout_s)

    def close(self) -> None:
        """Unregister all memory, and wait for that. No copy may be under way. A second call does nothing."""
        self.begin_close()
        self._thread.join()

    def begin_close(self) -> None:
        """Begin to unregister all memory, without waiting. It is meant for a finalizer, which may run inside any
        call.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            part, is_closed = self._look()
            self._end_unused()
            if part is not None:
                self._register(part)
            elif is_closed:
                self._end_unused()  # what failed a moment ago
                for each in self._ending:
                    never_unmap(each.memory)
                self._device.mappings.leave(self)
                return

    def _look(self) -> tuple[Registration | None, bool]:
        """Return the part to register, once there is one or a while has passed, and whether this is closed. Expired
        registrations end.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._wanted) or self._is_closed, IDLE_S / 2)
            is_closed = self._is_closed
            over = [each for each in self._parts.values() if self._is_over(each) and each not in self._wanted]
            self._ending += [each for each in over if each.is_made]
            for each in over:
                each.is_made = False
                del self._parts[each.address]
            return (self._wanted[0] if self._wanted and not is_closed else None), is_closed

    def _is_over(self, part: Registration) -> bool:
        return self._is_closed or (not part.users and self._clock() - part.used_at >= part.keep_s)

    def _end_unused(self) -> None:
        """Unregister memory that is used no more. A failure is retried: the mapping is kept until then."""
        for each in list(self._ending):
            with contextlib.suppress(DeviceError), self._device.current():
                self._device.unregister(each.address)
                self._ending.remove(each)

    def _register(self, part: Registration) -> None:
        """Register a part. After a failure its bytes use the buffer for `IDLE_S`, until it is tried again."""
        read_only = not part.memory.flags.writeable
        is_made = False
        with contextlib.suppress(DeviceError), self._device.current():
            self._device.register(part.address, part.memory.nbytes, read_only=read_only, for_kernels=True)
            is_made = True
        with self._changed:
            part.is_made, part.used_at = is_made, self._clock()
            if not is_made:
                part.keep_s = min(part.keep_s, IDLE_S)
            self._wanted.popleft()
            self._changed.notify_all()


def _parts(memory: Bytes) -> Iterator[tuple[Bytes, int]]:
    """Yield the parts that are registered in one call each, and their addresses."""
    for start in range(0, memory.nbytes, REGISTER_BYTES):
        part = memory[start : start + REGISTER_BYTES]
        yield part, part.__array_interface__["data"][0]
