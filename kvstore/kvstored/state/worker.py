"""The worker is the process that has the environment open: python -m kvstored.state.worker SOCKET_FD

It executes the daemon's messages (`messages`) one after another, and ends when the daemon ends. A signal that ends it,
for example because of a page that is damaged while it is open, ends nothing else: the daemon starts another worker. The
worker never decides what is kept.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore_tiers.heap import trim
from kvstored.state.databases import DATABASES
from kvstored.state.messages import (
    HEAD,
    NO_LMDB,
    Verb,
    fields_of,
    in_parts,
    packed_entries,
    packed_json,
    unpacked_entries,
)

try:
    import lmdb

    from kvstored.state.environment import (
        ASIDE,
        NEW,
        Environment,
        Writing,
        begin_rewrite,
        finish_rewrite,
        open_environment,
        open_shared,
        reopened,
    )
    from kvstored.state.pages import Unusable
except ImportError:
    sys.exit(NO_LMDB)

_PR_SET_PDEATHSIG = 1
LARGE_BYTES = 1 << 20  # of one transaction or one answer
NICE = 5  # events' too: where processors are short, state waits for puts


class StateWorker:
    """The handler of the daemon's messages in the process that has the state file open. `answer` sends bytes to the
    daemon.
    """

    def __init__(self, answer: Callable[[bytes], None]) -> None:
        self._answer = answer
        self._directory = Path()
        self._version = ""
        self._environment: Environment | None = None
        self._writing: Writing | None = None
        self._new: Environment | None = None  # of a rewrite that has begun
        self._failure: dict[str, Any] | None = None  # of the transaction that has begun
        self._changed_bytes = 0

    def do(self, verb: Verb, body: bytes) -> None:
        """Execute one message of the daemon. In a transaction the first failure is kept, and answered at COMMIT."""
        if verb in (Verb.PUT, Verb.KEEP, Verb.REMOVE, Verb.REWRITE):
            if self._failure is None:
                self._failure = self._attempt(lambda: self._change(verb, body))
            return
        act = {
            Verb.OPEN: self._open, Verb.COMMIT: self._commit, Verb.READ: self._read, Verb.LIST: self._list,
            Verb.ABORT: self._abort,
            Verb.COPY: self._copy,
        }[verb]  # fmt: skip
        failure = self._attempt(lambda: act(fields_of(body)))
        if failure is not None:
            self._answer(packed_json(Verb.ANSWER, **failure))

    def _attempt(self, act: Callable[[], None]) -> dict[str, Any] | None:
        try:
            act()
        except Unusable as error:
            return {"unusable": str(error)}
        except (OSError, lmdb.Error) as error:
            code = getattr(error, "errno", None) or 5
            return {"error": getattr(error, "strerror", None) or str(error), "errno": code}
        return None

    def _open(self, fields: dict[str, Any]) -> None:
        self._directory, self._version = Path(fields["directory"]), fields["version"]
        if fields["shared"]:
            self._environment = open_shared(self._directory)
            self._answer(packed_json(Verb.ANSWER, path=str(self._environment.path), is_new=False, was_aside=""))
            return
        found = open_environment(self._directory, self._version, fields["distrusted"], _keys_in(fields))
        self._environment = found.environment
        self._answer(
            packed_json(
                Verb.ANSWER,
                path=str(found.environment.path),
                is_new=found.is_new,
                was_aside=found.was_aside,
                has_aside=os.path.lexists(self._directory / ASIDE),
                readonly=found.environment.is_readonly,
                key=found.environment.key,
            )
        )

    @property
    def _opened(self) -> Environment:
        if self._environment is None:
            raise OSError(5, "it is not open")
        return self._environment

    def _change(self, verb: Verb, body: bytes) -> None:
        if self._writing is None:
            self._changed_bytes = 0
            if self._opened.is_readonly:  # the medium can be written again, perhaps
                self._environment = reopened(self._opened)
            if verb == Verb.REWRITE:
                self._opened.begin().abort()  # says why, where nothing can be written
                self._new = begin_rewrite(self._opened, self._version, _keys_in(fields_of(body)))
                self._writing = self._new.begin()
                self._copy_kept(self._writing)
                return
            self._writing = self._opened.begin()
        name, entries = unpacked_entries(body)
        if verb == Verb.KEEP:
            self._writing.keep_only(name, {key for key, _ in entries})
        elif verb == Verb.REMOVE:
            self._writing.put(name, [(key, None) for key, _ in entries])
        else:
            self._changed_bytes += self._writing.put(name, entries)

    def _copy_kept(self, writing: Writing) -> None:
        """Copy the databases that only the environment has (`is_kept`) into `writing`."""
        for database in DATABASES:
            if database.is_kept:
                whole = ((key, value) for key, value in self._opened.read(database.name) if value is not None)
                for part in in_parts(whole):
                    writing.put(database.name, part)

    def _commit(self, fields: dict[str, Any]) -> None:
        writing, self._writing = self._writing, None
        new, self._new = self._new, None
        failure, self._failure = self._failure, None
        before = _written_bytes()
        if failure is None and writing is not None:
            failure = self._attempt(lambda: writing.commit(durable=fields["durable"]))
        elif writing is not None:
            writing.abort()
        if failure is None and new is not None:
            failure = self._attempt(lambda: self._take_place(new))
        if failure is not None:
            if new is not None:
                self._give_up(new)
            self._answer(packed_json(Verb.ANSWER, **failure))
            return
        written_bytes = max(_written_bytes() - before, self._changed_bytes)
        self._answer(packed_json(Verb.ANSWER, written_bytes=written_bytes, path=str(self._opened.path)))
        self._relieve(self._changed_bytes)

    def _relieve(self, nbytes: int) -> None:
        """Give memory back after `nbytes` were changed or read, if they are many: until the file is closed, LMDB keeps
        the pages of a transaction, and the map keeps the pages that were read."""
        if nbytes <= LARGE_BYTES or self._opened.is_readonly:
            return
        try:
            self._environment = reopened(self._opened)
        except (OSError, Unusable, lmdb.Error) as error:  # the daemon starts another process
            sys.exit(f"{self._directory}: {error}")
        trim()

    def _take_place(self, new: Environment) -> None:
        self._environment = finish_rewrite(self._opened, new)

    def _give_up(self, new: Environment) -> None:
        new.close()
        for leftover in self._directory.glob(f"*{NEW}*"):
            if leftover.name.startswith(new.path.name):
                with suppress(OSError):
                    leftover.unlink()

    def _abort(self, fields: dict[str, Any]) -> None:
        if self._writing is not None:
            self._writing.abort()
        if self._new is not None:
            self._give_up(self._new)
        self._writing = self._new = self._failure = None
        self._answer(packed_json(Verb.ANSWER))

    def _read(self, fields: dict[str, Any]) -> None:
        wrong, left = 0, int(fields["limit"]) or -1

        def whole() -> Any:
            nonlocal wrong, left
            for key, value in self._opened.read(fields["database"], bytes.fromhex(fields["first"])):
                if value is None:
                    wrong += 1
                else:
                    yield key, value
                    left -= 1
                    if not left:
                        return

        nbytes = 0
        for part in in_parts(whole()):
            message = packed_entries(Verb.ENTRIES, fields["database"], part)
            nbytes += len(message)
            self._answer(message)
        self._answer(packed_json(Verb.ANSWER, wrong=wrong))
        self._relieve(nbytes)

    def _copy(self, fields: dict[str, Any]) -> None:
        path = Path(fields["directory"]) / self._opened.path.name
        temporary = path.with_name(path.name + NEW)  # what is there may be a copy already, torn
        with suppress(FileNotFoundError):
            temporary.unlink()
        self._opened.copy(temporary)
        temporary.replace(path)
        self._answer(packed_json(Verb.ANSWER, path=str(path)))

    def _list(self, fields: dict[str, Any]) -> None:
        environment = self._opened
        self._answer(
            packed_json(
                Verb.ANSWER,
                path=str(environment.path),
                bytes=environment.path.stat().st_size,
                databases=environment.sizes(),
            )
        )


def _keys_in(fields: dict[str, Any]) -> dict[str, bytes]:
    return {number: bytes.fromhex(secret) for number, secret in fields["keys"].items()}


def _written_bytes() -> int:
    """Return the bytes that this process has caused to be written to a device, the page cache included; 0 when the
    kernel does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0


def main(argv: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would write beside the next daemon's worker
    for number in (signal.SIGINT, signal.SIGTERM):  # the daemon's: its end is this one's
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
    daemon = socket.socket(fileno=int(argv[1]))
    worker = StateWorker(daemon.sendall)
    with daemon.makefile("rb", buffering=1 << 16) as messages, suppress(BrokenPipeError, ConnectionError):
        while len(head := messages.read(HEAD.size)) == HEAD.size:
            verb, nbytes = HEAD.unpack(head)
            body = messages.read(nbytes)
            if len(body) < nbytes:
                break
            worker.do(Verb(verb), body)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
