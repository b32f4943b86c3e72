"""Puts the scheduler's process together: the executor, the pool, daemon sessions and the batch engine.

The module owns the lifetime of all of them and the defaults that tie them together. It runs no step.

There is one daemon session for each tenant with requests. To the daemon the server is one user, so a tenant's name is
in the fingerprint as its account, and so in the root of every key. The nameless tenant of a server without keys shares
with every other engine of this user. A session can be connected to a stopped daemon, whose sockets still accept: one
thread pings at intervals, never between a request and the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import kvstore_client
from kvstore_engine.batching.compute import VerifiedCompute
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.constrain import Constrainer, GrammarError
from kvstore_engine.devices import DeviceName
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import FileDigest, FileWatch
from kvstore_engine.loaded_model import check_vocabulary, context_tokens, fingerprint_of
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.models.cache import cache_root
from kvstore_engine.profiler import TracingObserver
from kvstore_engine.restore.profile import profile_path
from kvstore_engine.restore.session import KvSession
from kvstore_engine.server.computing import STEP_TOKENS, open_computing
from kvstore_engine.server.options import EngineOptions, HandedFile
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.worker import EngineWorkerNotice, RemoteExecutor
from kvstore_proto.fingerprint import Fingerprint
from kvstore_restore.learned import LearnedCosts

_INTERVAL_S = 1.0
_MISSES = 2  # in a row: one may be a daemon that is busy
MAX_SESSIONS = 64
_log = logging.getLogger(__name__)


class TenantSessions:
    """The engine's sessions with the daemon in `folder`, one for each tenant, opened by `connect` on first use. At most
    64 are open; prompts of further tenants are computed without the daemon.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        connect: Callable[..., KvSession] = kvstore_client.connect,
    ) -> None:
        self._folder, self._fingerprint, self._connect = folder, fingerprint, connect
        self._sessions: dict[str, KvSession] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store watch", daemon=True)
        self._missed = 0
        self.answers: bool | None = None  # None: not pinged yet

    def watch(self) -> None:
        """Start a thread that checks every second whether the daemon answers."""
        self._thread.start()

    def look(self) -> None:
        """Ping the daemon once, and write to the log if it has stopped or begun to answer."""
        session = next(iter(list(self._sessions.values())), None)
        if session is None:
            return
        self._missed = 0 if session.ping() is not None else self._missed + 1
        if 0 < self._missed < _MISSES:
            return
        answers = not self._missed
        if answers != self.answers:
            if not answers:
                _log.warning("kvstored does not answer: prompts are computed, and nothing is stored, until it does")
            elif self.answers is not None:
                _log.warning("kvstored answers again: stored prompts are loaded")
        self.answers = answers

    def __call__(self, tenant: str) -> KvSession | None:
        """Return the session of `tenant`, which is degraded while no daemon answers. Return None if too many are
        open.
        """
        session = self._sessions.get(tenant)
        if session is None and len(self._sessions) < MAX_SESSIONS:
            name = f"kvengine:{tenant}" if tenant else "kvengine"
            session = self._connect(
                self._folder, fingerprint=fingerprint_for(self._fingerprint, tenant), client_name=name
            )
            self._sessions[tenant] = session
        elif session is None:
            _log.warning("tenant %s gets no daemon session: %d are open already", tenant, MAX_SESSIONS)
        return session

    def state(self) -> str:
        """Return "connected" if every session is connected and the daemon answers, "none" if no session was opened yet,
        otherwise "degraded".
        """
        states = {session.state for session in self._sessions.values()}
        if not states:
            return "none"
        return "connected" if states == {"connected"} and self.answers is not False else "degraded"

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self.look()


def fingerprint_for(fingerprint: Fingerprint, tenant: str) -> Fingerprint:
    """Return the model's `fingerprint` with the name `tenant` in it, so that the block keys of two tenants are never
    equal.
    """
    return replace(fingerprint, account=tenant)


@dataclass(frozen=True, slots=True)
class Serving:
    """The open objects of a running scheduler process: engine, tokenizer and so on. `worker` is None if this process
    computes by itself; `sessions` is None without a daemon. `digest` is the digest of the model's file, which `watch`
    watches.
    """

    engine: BatchEngine
    worker: RemoteExecutor | None
    constrainer: Constrainer
    tokenizer: Tokenizer
    sessions: TenantSessions | None
    watch: FileWatch
    digest: FileDigest


@contextlib.contextmanager
def open_serving(
    options: EngineOptions, model: HandedFile, on_notice: Callable[[EngineWorkerNotice], None]
) -> Iterator[Serving]:
    """Open the model, the engine and everything that they need for the time of a `with` block. `on_notice` is called
    when a worker process starts or dies. Raises UsageError or OperationError with a message of one line, and
    FileChanged if the model's file is not the one that `model` describes.
    """
    threads = default_threads() if options.threads is None else options.threads
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(model.taken_over())
        file = watch.file
        reading = stack.enter_context(ThreadPoolExecutor(1)).submit(watch.digest)  # beside the worker, which loads
        context = context_tokens(options.context, ModelConfig.from_gguf(file).context_length)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        config = ModelConfig.from_gguf(file, context)  # LongRoPE depends on how long sequences may become
        check_vocabulary(tokenizer, config.vocabulary)
        sizes = StepSizes(threads, STEP_TOKENS + options.max_sequences, options.max_sequences, context)
        computing = stack.enter_context(open_computing(watch, config, options, sizes, on_notice))
        digest, sessions, copies, costs = reading.result(), None, None, LearnedCosts()
        if options.kvstore is not None:
            device = DeviceName.parse(options.device)
            fingerprint = fingerprint_of(file, config, tokenizer, computing.compute.pool, digest.weights, device)
            copies = stack.enter_context(computing.open_copies())
            connect = partial(kvstore_client.connect, device=copies.device, exact=not options.accepts_lossy)
            sessions = TenantSessions(Path(options.kvstore), fingerprint, connect)
            sessions.watch()
            stack.callback(sessions.close)
            if not options.has_tenants:
                sessions("")
            profile = profile_path(cache_root(), digest.weights, threads, device.name)
            costs = LearnedCosts.load(profile)
            stack.callback(costs.save, profile)
        observer = Observer()
        if options.trace is not None:
            observer = tracing = TracingObserver(Path(options.trace))
            stack.callback(tracing.close)
        engine = BatchEngine(
            VerifiedCompute(computing.compute, watch.check),
            tokenizer,
            settings=_settings(options),
            sessions=sessions,
            copies=copies,
            costs=costs,
            observer=observer,
        )
        stack.callback(engine.close)
        constrainer = Constrainer(tokenizer, config.vocabulary)
        threading.Thread(target=_prepare, args=(constrainer,), daemon=True).start()
        yield Serving(engine, computing.worker, constrainer, tokenizer, sessions, watch, digest)


def _settings(options: EngineOptions) -> EngineSettings:
    settings = EngineSettings(
        policy=options.policy,  # type: ignore[arg-type]  # checked by the settings
        max_running=options.max_sequences,
        max_queued=options.max_queued,
    )
    return settings if options.swap_bytes is None else replace(settings, swap_bytes=options.swap_bytes)


def _prepare(constrainer: Constrainer) -> None:
    with contextlib.suppress(GrammarError):  # not installed: a request that needs it gets the error
        constrainer.prepare()
