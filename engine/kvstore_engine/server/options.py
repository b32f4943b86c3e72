"""The options of a server and its model's open file, as plain values that travel to the scheduler's process.

The module owns the defaults, and the JSON that goes with the file's descriptor. It does not check whether a port is
free or a file exists.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, Self

from kvstore_engine.devices import CPU
from kvstore_engine.gguf import FileDigest, FileIdentity, FileWatch, GGUFError, GGUFFile, OpenFile, changed

DEFAULT_PORT = 8080
DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of the scheduler process; None leaves a choice to it. pool_bytes: the memory of the K/V pool; None:
    enough for `max_sequences` sequences of the whole context, but at most half of the free memory. swap_bytes: the host
    memory for preempted sequences; None: the engine's default. trace: a file for a Chrome trace of all steps.
    hung_after_s: the seconds that any step may take before its process is ended; long steps get more (worker.patience).
    device: a name for `DeviceName.parse`; on all devices but `cpu` the scheduler process computes itself, without a
    worker. store_rate: the limit on copies out of a GPU's pool while it decodes, a text for `parse_rate`. has_tenants:
    requests name tenants; without it there is one tenant, whose session with the daemon is opened at once.
    select_pages: a text for `PageSelection.parse`.
    """

    model: str
    context: int | None = None
    threads: int | None = None
    max_sequences: int = 16
    policy: str = "fcfs"
    kv_dtype: str = "f16"
    pool_bytes: int | None = None
    swap_bytes: int | None = None
    max_queued: int = 256
    kvstore: str | None = None
    trace: str | None = None
    hung_after_s: float = 20.0
    has_tenants: bool = False
    device: str = CPU
    store_rate: str = "auto"
    accepts_lossy: bool = False
    select_pages: str | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of the HTTP process. `api_keys` is the path of a file with keys; without it there is one tenant, and
    only this machine is served. `pooling` is how embeddings are made of states, None for what the model's file says.
    `drain_s` is the time in seconds that running requests get when the server ends.
    """

    engine: EngineOptions
    model_name: str
    aliases: tuple[str, ...] = ()
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: str | None = None
    drain_s: float = 30.0
    access_log: bool = True
    max_body_bytes: int = 16 << 20
    max_connections: int = 1024
    pooling: Literal["mean", "cls", "last"] | None = None


@dataclass(frozen=True, slots=True)
class HandedFile:
    """The model's open file, as the HTTP process passes it to a scheduler process; `path` is its name in messages. With
    `digest`, the content must have this digest. Without it, the file's `identity` must show that it was not changed
    since the HTTP process opened it.
    """

    path: str
    descriptor: int
    identity: FileIdentity
    digest: FileDigest | None = None

    @classmethod
    def of(cls, file: OpenFile, digest: FileDigest | None) -> Self:
        return cls(str(file.path), file.descriptor, file.identity, digest)

    def encode(self) -> str:
        return json.dumps([self.path, self.descriptor, self.identity, self.digest])

    @classmethod
    def decode(cls, text: str) -> Self:
        path, descriptor, identity, digest = json.loads(text)
        return cls(path, descriptor, FileIdentity(*identity), FileDigest(*digest) if digest else None)

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[FileWatch]:
        """Open the handed file, parsed and watched for changes, for the time of a `with` block. Raises FileChanged if
        its content has changed.
        """
        with OpenFile.inherited(self.path, self.descriptor, self.identity) as source:
            try:
                file = GGUFFile.open(source)
            except GGUFError:  # the HTTP process could parse it
                raise changed(source.path) from None
            with file:
                watch = FileWatch(file, self.digest)
                watch.check()
                yield watch
