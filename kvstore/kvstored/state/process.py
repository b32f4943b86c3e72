"""The daemon's side of the process that has the environment open: it starts the process, sends it requests, and starts
another one when the process has died.

A call that gets no answer, because the process died, raises OSError, as a full disk does: the caller still has its
values and tries again. After `DEATHS` deaths within `DEATHS_IN_S` seconds the file is set aside without a look at it,
so a damaged page ends the process twice at most. All calls are made on the control loop and are answered one at a time;
no request of a client waits for one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from kvstore_tiers import failpoints
from kvstore_tiers.child_processes import variables_of_children
from kvstored.clock import NS_PER_S, Clock
from kvstored.state.messages import (
    HEAD,
    NO_LMDB,
    Entry,
    Verb,
    fields_of,
    in_parts,
    packed_entries,
    packed_json,
    unpacked_entries,
)

log = logging.getLogger(__name__)
failpoints.declare("state.open", "nothing of the small state is read yet")
failpoints.declare("state.commit", "a transaction of the small state is complete and not committed")
DEATHS, DEATHS_IN_S = 2, 600.0
ENDING_S = 10.0
_UNANSWERED = (Verb.PUT, Verb.KEEP, Verb.REMOVE, Verb.REWRITE)
ANSWER_S = 120.0  # a process that is silent for longer hangs on a disk; it is given up


class StateKeys(Protocol):
    """The keys that encrypt files of small state, by their numbers of 8 bytes, the newest last."""

    def state_keys(self) -> dict[bytes, bytes]: ...

    def new_state_key(self) -> bytes:
        """Make one more key and return its number. Raises OSError."""

    def keep_state_key(self, number: bytes) -> None:
        """Destroy all keys but the one with this `number`. Raises OSError."""


class Interrupted(Exception):
    """An error: a transaction was ended to let an urgent one run, and nothing of it was committed."""


class StateProcess:
    """The daemon's connection to the process that has the state file open. `directory` is the state directory. The
    functions in `listeners` are called with `was_aside` when the file is new and empty, so that all state is saved
    again. `has_aside`: a file that was set aside is still there. `wrong_values` counts values with a wrong checksum,
    which are not used. `keys` has the keys that encrypt the file, `key` the number of the one that does.
    """

    def __init__(self, directory: Path, version: str, clock: Clock, *, shared: bool = False) -> None:
        """Prepare the process; `start` or the first call starts it. `shared`: only read, while a daemon may write."""
        self._is_shared = shared
        self._directory, self._version, self._clock = directory, version, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()
        self._yielding: asyncio.Timeout | None = None  # of the transaction that gives way to an urgent one
        self._urgent = 0  # transactions that wait for their turn
        self._deaths_ns: list[int] = []
        self._distrusted = ""
        self._is_owed = False  # an answer
        self.listeners: list[Callable[[str], None]] = []  # for a new environment
        self.path = directory / "state.mdb"  # until it is known
        self.is_new = False
        self.was_aside = ""
        self.keys: StateKeys | None = None
        self.key = ""  # that the file is encrypted with
        self.has_aside = False
        self.wrong_values = 0

    @property
    def pid(self) -> int:
        """The process id of the process that has the state file open, or -1 when there is no such process."""
        return self._process.pid if self._process is not None else -1

    def start(self) -> None:
        """Start the process that has the state file open, without waiting for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstored.state.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=variables_of_children(), stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's signals are the daemon's
            )  # fmt: skip
        ours.setblocking(False)
        self._socket = ours

    async def open(self) -> None:
        """Have the process open the state file if it is not open. Raises OSError."""
        async with self._turn:
            await self._open()

    async def read(self, database: str, *, first: bytes = b"", limit: int = 0) -> list[Entry]:
        """Return the entries of `database` whose checksum is right, from the key `first` on; at most `limit`, 0 for
        all. Raises OSError.
        """
        async with self._asked():
            self._send(packed_json(Verb.READ, database=database, first=first.hex(), limit=limit))
            entries: list[Entry] = []
            while not isinstance(answer := await self._answer(), dict):
                entries += answer
            self.wrong_values += self._judged(answer).get("wrong", 0)
            return entries

    async def copy(self, directory: Path) -> Path:
        """Write a copy of the state file into `directory`, as a backup, and return its path. Raises OSError."""
        async with self._asked():
            self._send(packed_json(Verb.COPY, directory=str(directory)))
            return Path(self._judged(await self._answer())["path"])

    async def contents(self) -> dict[str, Any]:
        """Return a dictionary with the path and bytes of the state file, and the number of entries and bytes of each
        database. Raises OSError.
        """
        async with self._asked():
            self._send(packed_json(Verb.LIST))
            return self._judged(await self._answer())

    @asynccontextmanager
    async def transaction(
        self, *, durable: bool = False, rewrite: bool = False, yields: bool = False, is_urgent: bool = False
    ) -> AsyncIterator[Transaction]:
        """Yield a transaction for the caller's changes, which are all committed at the end of the `with` block, or
        none.

        With `durable`, a loss of power does not undo them. With `rewrite`, they are written into a new file that
        replaces the present one, so that no other entry can be read afterwards. With `yields`, the `with` block is
        cancelled and Interrupted raised when an urgent transaction comes. With `is_urgent`, wait for no more than a
        commit that has begun, unless the transaction before does not yield. Raises OSError."""
        if is_urgent and self._yielding is not None:
            self._yielding.reschedule(asyncio.get_running_loop().time())
            self._yielding = None
        async with self._asked(is_urgent=is_urgent):
            if yields and self._urgent:
                raise Interrupted
            change, new_key = Transaction(self._send_all), None
            if rewrite:
                new_key = await asyncio.to_thread(self.keys.new_state_key) if self.keys is not None else None
                self._send(packed_json(Verb.REWRITE, keys=self._hex_keys(new_key)))
            try:
                async with asyncio.timeout(None) as limit:
                    self._yielding = limit if yields else None
                    yield change
                    failpoints.hit("state.commit")
            except BaseException as error:
                self._yielding = None  # its limit has ended
                if self._writer is not None:  # else it has died
                    self._send(packed_json(Verb.ABORT))
                    await self._answer()
                if isinstance(error, TimeoutError) and limit.expired():
                    raise Interrupted from None
                raise
            finally:
                self._yielding = None
            self._send(packed_json(Verb.COMMIT, durable=durable))
            answer = self._judged(await self._answer())
            change.written_bytes, self.path = answer["written_bytes"], Path(answer["path"])
            if new_key is not None and self.keys is not None:
                self.key = new_key.hex()
                await asyncio.to_thread(self.keys.keep_state_key, new_key)

    @property
    def owes_rewrite(self) -> bool:
        """True when the file is not encrypted and should be, or the other way round."""
        return bool(self.key) != (self.keys is not None)

    async def close(self) -> None:
        """End the process. It commits what it was given before. A second call does nothing."""
        async with self._turn:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            elif self._process is not None and self._reader is None:
                self._socket.close()
            process, self._process = self._process, None
            if process is None:
                return
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, ENDING_S)
                return
            process.kill()  # on a disk that hangs not even that ends it

    # Inside

    @asynccontextmanager
    async def _asked(self, *, is_urgent: bool = False) -> AsyncIterator[None]:
        self._urgent += is_urgent
        try:
            await self._turn.acquire()
        finally:
            self._urgent -= is_urgent
        try:
            await self._open()
            try:
                yield
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                raise self._died(error) from None
            except asyncio.CancelledError:
                if self._is_owed:
                    self._end()  # in the middle of an answer: the next call begins with another process
                raise
        finally:
            self._turn.release()

    async def _open(self) -> None:
        if self._writer is not None:
            return
        failpoints.hit("state.open")
        if self._process is None:
            self.start()
        if self.keys is not None and not self.keys.state_keys():
            await asyncio.to_thread(self.keys.new_state_key)
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
            self._send(
                packed_json(
                    Verb.OPEN,
                    directory=str(self._directory),
                    version=self._version,
                    distrusted=self._distrusted,
                    shared=self._is_shared,
                    keys=self._hex_keys(),
                )
            )
            answer = await self._answer()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise self._died(error) from None
        except asyncio.CancelledError:
            self._end()
            raise
        assert isinstance(answer, dict)
        if "path" not in answer:
            self._end()
            raise OSError(answer.get("errno", errno.EIO), answer.get("error", answer.get("unusable")), str(self.path))
        self._distrusted = ""
        self.path = Path(answer["path"])
        self.is_new, self.was_aside = answer["is_new"], answer["was_aside"]
        self.has_aside = answer.get("has_aside", False)
        self.key = answer.get("key", "")
        if self.was_aside:
            log.warning(
                "%s is set aside as state.aside until blocks are deleted, and begins anew (%s): how blocks were used, "
                "what was learned and names are not known", self.path.parent, self.was_aside,
            )  # fmt: skip
        if self.is_new:
            for listener in self.listeners:
                listener(self.was_aside)

    def _hex_keys(self, only: bytes | None = None) -> dict[str, str]:
        held = self.keys.state_keys() if self.keys is not None else {}
        return {number.hex(): secret.hex() for number, secret in held.items() if only in (None, number)}

    def _send(self, message: bytes) -> None:
        assert self._writer is not None
        self._is_owed = message[0] not in _UNANSWERED
        self._writer.write(message)

    async def _send_all(self, message: bytes) -> None:
        self._send(message)
        assert self._writer is not None
        await self._writer.drain()

    async def _answer(self) -> dict[str, Any] | list[Entry]:
        assert self._reader is not None
        async with asyncio.timeout(ANSWER_S):
            verb, nbytes = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            body = await self._reader.readexactly(nbytes)
        if verb == Verb.ENTRIES:
            return unpacked_entries(body)[1]
        self._is_owed = False
        return fields_of(body)

    def _judged(self, answer: dict[str, Any] | list[Entry]) -> dict[str, Any]:
        """Return the answer. Raises OSError when the answer reports an error."""
        assert isinstance(answer, dict)
        if "unusable" in answer:
            self._distrusted = answer["unusable"]
            self._end()
            raise OSError(errno.EIO, answer["unusable"], str(self.path))
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"], str(self.path))
        return answer

    def _died(self, error: Exception) -> OSError:
        """Note that the process has died or hangs; the next call starts another one. Return the error to raise."""
        status = self._end()
        if status == NO_LMDB:
            why = 'lmdb cannot be imported (python -c "import lmdb" says why); install it again'
            return OSError(errno.ENOPKG, why, str(self.path))
        now_ns = self._clock.monotonic_ns()
        self._deaths_ns = [at for at in self._deaths_ns if now_ns - at < DEATHS_IN_S * NS_PER_S] + [now_ns]
        if len(self._deaths_ns) >= DEATHS:
            self._deaths_ns.clear()
            self._distrusted = f"its process has died {DEATHS} times within {DEATHS_IN_S:.0f} s"
        why = f"its process ended with status {status}" if not isinstance(error, TimeoutError) else "it hangs"
        log.warning("%s: %s; another is started", self.path, why)
        return OSError(errno.EIO, why, str(self.path))

    def _end(self) -> int | None:
        """Kill the process and return its exit status; None when there is none or the process hangs."""
        if self._writer is not None:
            self._writer.close()
        elif self._process is not None and self._reader is None:
            self._socket.close()
        self._reader = self._writer = None
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()  # one that has died already keeps its own status
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.05)
        threading.Thread(target=process.wait, daemon=True).start()  # it hangs in the kernel
        return None


class Transaction:
    """The changes of one transaction of the state file. `written_bytes` is the number of bytes written to the medium,
    set when the transaction has ended.
    """

    def __init__(self, send: Callable[[bytes], Any]) -> None:
        self._send = send
        self.written_bytes = 0

    async def put(self, database: str, entries: Iterable[Entry]) -> None:
        """Store `entries`, pairs of key and value, in `database`. An entry that is stored already with this value costs
        no write."""
        for part in in_parts(entries):
            await self._send(packed_entries(Verb.PUT, database, part))

    async def keep_only(self, database: str, keys: Iterable[bytes]) -> None:
        """Remove all entries of `database` whose keys are not in `keys`."""
        await self._send(packed_entries(Verb.KEEP, database, [(key, b"") for key in keys]))

    async def remove(self, database: str, keys: Iterable[bytes]) -> None:
        """Remove the entries of `database` with the keys `keys`."""
        for part in in_parts((key, b"") for key in keys):
            await self._send(packed_entries(Verb.REMOVE, database, part))
