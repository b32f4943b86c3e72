"""Values in redis or Valkey: one server, not a cluster.

    redis://HOST[:PORT][/DB]        TCP
    rediss://HOST[:PORT][/DB]       TLS
    unix:///PATH                    Unix socket

`?` adds `db=N`, `prefix=TEXT` (of the keys; "kvstored:" by default) and `ca=PATH` (of the authorities that sign the
server's certificate; the system's by default). Credentials: `username`, `password`, `ca`, `certificate` and
`private_key` (paths, for TLS).
A value is a string key without an expiry. The server's memory limit and its policy are the operator's: they are read
and never set. Commands used: GET, SET NX, STRLEN, UNLINK, PING, INFO memory and server,
CLIENT ID, SETNAME, LIST and KILL.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.exceptions import RedisError, ResponseError

from kvstore_tiers.remote.driver import Driver, Placed, WriteResult
from kvstore_tiers.remote.drivers.redis_line import RedisLine, Reply, fields_of

LARGEST_VALUE_BYTES = 512 << 20
DEFAULT_PORT, DEFAULT_PREFIX = 6379, "kvstored:"
CREDENTIALS: Final = frozenset({"username", "password", "ca", "certificate", "private_key"})
QUERY: Final = frozenset({"db", "prefix", "ca"})
CHUNK_BYTES = 4 << 20  # of values asked for at once: the server gathers them in its memory
CHUNK_NAMES = 1000
REFUSED = ("NOAUTH", "WRONGPASS", "NOPERM")
WRONG_TYPE = "WRONGTYPE"  # another application's key: no value of ours

_Item = TypeVar("_Item")


def open_driver(url: str, *, timeout_s: float, threads: int, credentials: Mapping[str, str]) -> Driver:
    """Return a driver of the Redis server at `url`, which connects at its first call. Each call may take `timeout_s`
    seconds; the number of `threads` does not matter. Raises ValueError for a wrong URL or unknown `credentials`.
    """
    if unknown := set(credentials) - CREDENTIALS:
        raise ValueError(f"redis takes no credential {min(unknown)!r}: the names are {', '.join(sorted(CREDENTIALS))}")
    kind, settings, prefix = _connection_of(url, credentials)
    settings |= {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return RedisDriver(
        lambda name: RedisLine(kind, settings, name), f"redis at {url.partition('?')[0]}", prefix, timeout_s
    )


class RedisDriver(Driver):
    """A driver of one Redis server, called `place` in messages, with a connection for each calling thread.
    `new_line(name)` makes a connection that has this name on the server. `prefix` is put before the name of every
    value.
    """

    largest_value_bytes = LARGEST_VALUE_BYTES

    def __init__(self, new_line: Callable[[str], RedisLine], place: str, prefix: str, timeout_s: float) -> None:
        self._new_line = new_line
        self._place = place
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[RedisLine] = []
        self._lost: set[int] = set()  # connections that a call was given up on: the server may still carry it out
        self._server_run = ""  # of the server that numbered them
        self._former = self._name = ""  # what the names of connections of dead processes begin with; of ours
        self._evicts: bool | None = None  # not known since the last connection was made
        self._is_closed = False

    @property
    def evicts(self) -> bool:  # type: ignore[override]
        """True if the server is configured to evict keys that have no expiry. The first use asks the server, and may
        raise the errors of a call.
        """
        with self._line() as line:
            if self._evicts is None:
                line.send("INFO", "memory")
                memory = fields_of(line.answer())
                policy, limit = memory.get("maxmemory_policy", ""), memory.get("maxmemory", "0")
                self._evicts = policy.startswith("allkeys-") and limit != "0"
            return self._evicts

    def follow(self, owner: str, generation: int) -> None:
        self._name = f"kvstored-{owner}-{generation}"
        self._former = f"kvstored-{owner}-" if generation else ""

    def sizes(self, names: Sequence[str]) -> list[int]:
        sizes = [0] * len(names)
        for number, reply in self._exchange([("STRLEN", self._prefix + name) for name in names]):
            if isinstance(reply, int):
                sizes[number] = reply
        return sizes

    def read(self, wanted: Sequence[Placed]) -> list[int]:
        sizes: list[int] = []
        chunks = list(_chunks(wanted, lambda placed: len(placed.memory)))
        with self._line() as line:
            for number, chunk in enumerate([[], *chunks]):  # the server gathers one chunk while another is received
                for placed in chunks[number] if number < len(chunks) else []:
                    line.send("GET", self._prefix + placed.name)
                for placed in chunk:
                    size = line.replies.read_into(placed.memory)
                    if isinstance(size, ResponseError):
                        if not str(size).startswith(WRONG_TYPE):
                            raise size
                        size = 0
                    sizes.append(size)
        return sizes

    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        commands = [("SET", self._prefix + placed.name, placed.memory, "NX") for placed in values]
        written = [WriteResult.EXISTS] * len(values)
        for number, reply in self._exchange(commands):
            if isinstance(reply, ResponseError):
                written[number] = WriteResult.NO_ROOM
            elif reply is not None:
                written[number] = WriteResult.STORED
        return written

    def remove(self, names: Sequence[str]) -> None:
        self._find_former()
        with self._line() as line:
            with self._lock:
                lost = list(self._lost) if line.server_run == self._server_run else []
            fences: list[tuple[str | memoryview, ...]] = [("CLIENT", "KILL", "ID", str(number)) for number in lost]
            _replies(line, [*fences, *(("UNLINK", self._prefix + name) for name in names)])
            with self._lock:
                self._lost.difference_update(lost)

    def _find_former(self) -> None:
        """Count the connections of dead processes as lost, once: the server may still hold their writes."""
        if not self._former:
            return
        with self._line() as line:
            line.send("CLIENT", "LIST")
            listed = line.answer()
        text = listed.decode(errors="replace") if isinstance(listed, bytes) else ""
        clients = [dict(word.partition("=")[::2] for word in client.split()) for client in text.splitlines()]
        with self._lock:
            self._lost |= {
                int(client["id"]) for client in clients
                if client.get("name", "").startswith(self._former) and client["name"] != self._name
            }  # fmt: skip
            self._former = ""

    def probe(self) -> None:
        self._exchange([("PING",)])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _exchange(self, commands: Sequence[tuple[str | memoryview, ...]]) -> list[tuple[int, Reply]]:
        if not commands:
            return []
        with self._line() as line:
            return _replies(line, commands)

    @contextmanager
    def _line(self) -> Iterator[RedisLine]:
        """Yield a connection for one call. Every error that leaves is an OSError that names this store."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError(f"{self._place}: the driver is closed")
            line = self._idle.pop() if self._idle else self._new_line(self._name)
        is_whole = False  # every reply to what was sent has been read
        try:
            if line.use(time.monotonic() + self._timeout_s):
                self._connected(line)
            yield line
            is_whole = True
        except (TimeoutError, redis.exceptions.TimeoutError) as error:
            raise TimeoutError(f"{self._place} did not answer within {self._timeout_s:g} s") from error
        except ResponseError as error:
            raise self._refusal(str(error)) from None
        except (OSError, RedisError) as error:
            raise ConnectionError(f"{self._place}: {error}") from error
        finally:
            with self._lock:
                is_kept = is_whole and not self._is_closed
                if is_kept:
                    self._idle.append(line)
                elif line.client_id and not is_whole and line.server_run == self._server_run:
                    self._lost.add(line.client_id)
            if not is_kept:
                line.close()

    def _connected(self, line: RedisLine) -> None:
        """Handle a new connection. A restarted server numbers its clients anew: lost connections ended with the former
        server, and their numbers belong to other clients now.
        """
        with self._lock:
            self._evicts = None
            if line.server_run != self._server_run:
                self._server_run = line.server_run
                self._lost.clear()

    def _refusal(self, text: str) -> OSError:
        if text.startswith(REFUSED):
            return PermissionError(errno.EACCES, f"{self._place} refuses the credentials: {text}")
        if text.startswith("LOADING"):
            return ConnectionError(f"{self._place} is starting: {text}")
        return OSError(errno.EIO, f"{self._place} answered: {text}")


def _replies(line: RedisLine, commands: Sequence[tuple[str | memoryview, ...]]) -> list[tuple[int, Reply]]:
    """Return each command's number and reply. OOM and WRONGTYPE are replies; another error of the server is raised."""
    replies: list[tuple[int, Reply]] = []
    for start in range(0, len(commands), CHUNK_NAMES):
        chunk = commands[start : start + CHUNK_NAMES]
        for command in chunk:
            line.send(*command)
        replies += [(start + number, line.replies.read_response()) for number in range(len(chunk))]
    for _, reply in replies:
        if isinstance(reply, ResponseError) and not str(reply).startswith(("OOM", WRONG_TYPE)):
            raise reply
    return replies


def _chunks(items: Sequence[_Item], nbytes: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield the items in order, in chunks of about CHUNK_BYTES and at most CHUNK_NAMES."""
    chunk: list[_Item] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += nbytes(item)
        if total >= CHUNK_BYTES or len(chunk) == CHUNK_NAMES:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _connection_of(url: str, credentials: Mapping[str, str]) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """Return redis-py's kind of connection, its settings, and the prefix of the keys."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := set(query) - QUERY:
        raise ValueError(f"{parts.scheme}:// takes no {min(unknown)!r}: the names are {', '.join(sorted(QUERY))}")
    if parts.password or parts.username:
        raise ValueError("a URL is shown in logs: give username and password as credentials, not in the URL")
    login = {name: credentials[name] for name in ("username", "password") if name in credentials}
    prefix = query.get("prefix", DEFAULT_PREFIX)
    if parts.scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError(f"{url!r} has no path: write unix:///run/redis/redis.sock")
        settings = {"path": unquote(parts.path), "db": _database(query.get("db", "0"))}
        return redis.UnixDomainSocketConnection, settings | login, prefix
    database = query.get("db") or parts.path.strip("/") or "0"
    settings = {"host": _host(parts), "port": parts.port or DEFAULT_PORT, "db": _database(database)}
    if parts.scheme == "redis":
        return redis.Connection, settings | login, prefix
    tls = {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": query.get("ca") or credentials.get("ca"),
        "ssl_certfile": credentials.get("certificate"),
        "ssl_keyfile": credentials.get("private_key"),
    }
    return redis.SSLConnection, settings | login | tls, prefix


def _host(parts: SplitResult) -> str:
    if not parts.hostname:
        raise ValueError(f"{parts.geturl()!r} has no host: write {parts.scheme}://HOST:PORT/DB")
    return parts.hostname


def _database(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no database of redis: give its number, such as 0")
    return int(text)
