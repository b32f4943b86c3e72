"""The class that vLLM's tiered offloading loads: a secondary tier on kvstored.

    "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier"}]

vLLM keeps K/V in pinned CPU memory (its primary tier) and moves them to and from the device by itself; this tier copies
rows of that memory to and from the daemon's, beside the scheduler, which only hands over jobs here and collects their
results. The module owns vLLM's types, the session, and the names of each request's chunks.
Invariants: wrong settings and engines that cannot be served are refused when the engine starts; after that no method
raises or waits (except `drain_jobs` and `shutdown`, which wait for transfers), and without a daemon everything is a
miss. Once `shutdown` has returned vLLM's memory is not referenced any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore_client.session import Session
from kvstore_connectors.engine_session import engine_session
from kvstore_connectors.vllm.kv_hints import HintedChain, KvHints
from kvstore_connectors.vllm.settings import VllmTierSettings, parse_tier_settings
from kvstore_connectors.vllm_tier import jobs
from kvstore_connectors.vllm_tier.chunks import (
    ChunkRun,
    by_group,
    chain_of,
    is_named_well,
    names,
    runs_to_load,
    runs_to_store,
)
from kvstore_connectors.vllm_tier.engine import EngineName, stated, tier_fingerprint, unpacked
from kvstore_connectors.vllm_tier.jobs import EndedJob, Jobs
from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = init_logger("vllm.kvstored")  # below "vllm", so that vLLM's log settings hold for it

_PART_BYTES = 64 << 20
_PART_CHUNKS = 512
_NOT_SERVED = "not_served"
LOADS = "vllm:kv_offload_kvstored_load_chunks"
STORES = "vllm:kv_offload_kvstored_store_chunks"
CONNECTED = "vllm:kv_offload_kvstored_connected"


@dataclass(slots=True)
class _Request:
    """A request of vLLM. `adapter`: the digest of its adapter; None if its inputs cannot be named, so that none of its
    chunks is loaded or stored. `moved`: chunks that this tier has loaded or stored for it."""

    adapter: str | None
    moved: set[bytes]


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed where this is checked
    """A secondary tier of vLLM's tiered offloading that keeps chunks in the daemon. `settings` are the fields of
    `VllmTierSettings`. `engine` is a packed `EngineName` from `KVStoreOffloadingConnector`, or "" with
    `weights_digest`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = "LOCAL",
        engine: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._settings = parse_tier_settings(settings)
        self._engine = _engine_of(engine, self._settings)
        self._memory: Any = np.asarray(primary_kv_view).view(np.uint8)  # [rows, row_bytes]
        events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if events and self._settings.enable_kv_events else None
        self._described: dict[str, str | None] = {}
        self._kv_hints = KvHints(logger.warning)
        self._counts = ChunkCounts()
        self._is_stopped = False
        self._session = self._connect(tier_fingerprint(self._engine, offloading_spec.config, self._row_bytes))
        self._jobs = self._new_jobs()
        self._lookups = _Lookups(self, tier_type)

    # What the connector says

    def describe(self, req_id: str, adapter: str | None) -> None:
        """Set the digest of the adapter of the request `req_id`, before `on_new_request`: "" for no adapter. With None
        the request's chunks depend on something that cannot be named, so none is loaded or stored.
        """
        self._described[req_id] = adapter

    def stop(self) -> None:
        """Load and store nothing any more, because the weights may have changed."""
        if not self._is_stopped:
            self._is_stopped = True
            logger.warning("kvstored is not used any more by this engine, since its caches were reset")

    @property
    def is_connected(self) -> bool:
        """True while the session is connected to a daemon."""
        return self._session is not None and self._session.state == "connected"

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        unknown = None if self._engine.describes_requests else ""
        req_context.set_state(_Request(self._described.pop(req_context.req_id, unknown), set()))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Report the end of a request to the daemon, with its hints and the chunks that vLLM itself still had."""
        self._lookups.cleanup(req_context.req_id)
        request = self._request(req_context)
        if request.adapter is None or not self._is_used():
            return
        positions, expected = _positions(req_context), self._kv_hints.read(req_context.kv_hints)
        if positions and self._session is not None:
            self._jobs.notify(partial(self._inform, self._session, positions, request, expected))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._request(req_context)
        if request.adapter is not None and self._is_used() and self._session is not None:
            self._jobs.notify(partial(self._touch, self._session, list(keys), request.adapter))

    # Presence

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._is_used() or self._request(req_context).adapter is None or not is_named_well(key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def present(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return for each chunk in `keys` whether it is stored. It waits for the daemon, so only the thread of look-ups
        calls it.
        """
        found = [False] * len(keys)
        adapter = self._request(req_context).adapter
        if self._session is None or adapter is None:
            return found
        for group, places in by_group(keys).items():
            wanted = names(self._session, [keys[at] for at in places], group, adapter)
            if wanted is not None:
                deadline_s = self._settings.lookup_deadline_ms / 1000
                answers = jobs.present(self._session, wanted, group, deadline_s)
                for at, answer in zip(places, answers, strict=True):
                    found[at] = answer
        return found

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    # Jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, rows, request = self._taken_apart(job_metadata)
        if request.adapter is None or not self._is_used():
            self._jobs.refuse(job_metadata.job_id, keys, is_load=True, outcome=_NOT_SERVED)
            return
        request.moved.update(keys)
        self._jobs.load(job_metadata.job_id, runs_to_load(keys, rows, request.adapter))

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, rows, request = self._taken_apart(job_metadata)
        is_served = self._is_used() and not self._settings.read_only and all(map(is_named_well, keys))
        if request.adapter is None or not is_served:
            self._jobs.refuse(job_metadata.job_id, keys, is_load=False, outcome=_NOT_SERVED)
            return
        request.moved.update(keys)
        positions, kinds = _positions(job_metadata.req_context), self._engine.kinds
        cut = partial(runs_to_store, keys, rows, positions, kinds, request.adapter)
        self._jobs.store(job_metadata.job_id, keys, cut)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for ended in self._jobs.take_ended():
            self._counts.add(ended)
            results.append(self._load_result(ended) if ended.is_load else self._store_result(ended))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    def drain_jobs(self) -> None:
        """Wait until no job is open. vLLM calls it when its caches are reset, so the tier then stops, unless
        `keep_after_reset` is set.
        """
        self._jobs.drain()
        if not self._settings.keep_after_reset:
            self.stop()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._jobs.close()
        self._memory = None
        if self._session is not None:
            self._session.close()
            self._session = None

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counts.take(is_connected=self.is_connected)

    # How it is done

    @property
    def _row_bytes(self) -> int:
        return int(self._memory.shape[1])

    @property
    def _first_group(self) -> int:
        return int(self._offloading_spec.config.groups[0].group_id)

    def _is_used(self) -> bool:
        return not self._is_stopped and self.is_connected

    def _request(self, req_context: ReqContext) -> _Request:
        return req_context.get_state(_Request) or _Request(None if self._engine.describes_requests else "", set())

    def _taken_apart(self, job: TransferJob) -> tuple[list[bytes], list[int], _Request]:
        return list(job.keys), [int(row) for row in job.chunk_ids], self._request(job.req_context)

    def _load_result(self, ended: EndedJob) -> JobResult:
        """Return vLLM's result of a load. Chunks that did not come count as missing from now on; otherwise vLLM would
        ask for them again and again."""
        loaded = tuple(key for key, outcome in ended.outcomes.items() if outcome == jobs.LOADED)
        is_whole = len(loaded) == len(ended.outcomes)
        if not is_whole:
            self._lookups.mark_miss([key for key, outcome in ended.outcomes.items() if outcome != jobs.LOADED])
        return JobResult(
            job_id=ended.job_id,
            success=is_whole,
            successful_keys=None if is_whole else loaded or None,
            transfer_time=ended.seconds,
            transfer_bytes=len(loaded) * self._row_bytes,
        )

    def _store_result(self, ended: EndedJob) -> JobResult:
        kept = [key for key, outcome in ended.outcomes.items() if outcome in jobs.KEPT]
        if kept and self._events is not None:
            self._events.append(OffloadingEvent(keys=kept, medium=self.medium, removed=False, locality=self.locality))
        return JobResult(
            job_id=ended.job_id,
            success=len(kept) == len(ended.outcomes),
            transfer_time=ended.seconds,
            transfer_bytes=len(kept) * self._row_bytes,
        )

    def _new_jobs(self) -> Jobs:
        waiting_bytes = self._settings.store_queue_mib << 20
        return Jobs(
            self._load,
            self._store,
            part_chunks=max(1, min(_PART_BYTES // self._row_bytes, _PART_CHUNKS)),
            load_threads=self._settings.load_threads,
            most_waiting_chunks=waiting_bytes // self._row_bytes,
            say=logger.warning,
        )

    def _load(self, run: ChunkRun) -> list[str]:
        assert self._session is not None
        return jobs.load(self._session, run, self._memory, self._settings.load_deadline_ms / 1000)

    def _store(self, run: ChunkRun) -> list[str]:
        assert self._session is not None
        return jobs.store(self._session, run, self._memory, self._settings.store_deadline_ms / 1000)

    def _connect(self, fingerprint: Fingerprint) -> Session | None:
        settings = self._settings
        staging_bytes = 0 if settings.read_only else max(settings.staging_mib << 20, 2 * slot_bytes(self._row_bytes))
        return engine_session(
            logger, settings.socket,
            fingerprint=fingerprint,
            client_name="vllm-tier",
            deadline_s=settings.lookup_deadline_ms / 1000,
            connect_timeout_s=settings.connect_timeout_ms / 1000,
            exact=not settings.accepts_lossy,
            pool=settings.pool,
            staging_bytes=staging_bytes,
        )  # fmt: skip

    def _inform(self, session: Session, positions: dict[bytes, int], request: _Request, expected: HintedChain) -> None:
        """Send the report of a request's end. Runs in the thread that stores."""
        adapter, chain = request.adapter or "", chain_of(positions, self._first_group)
        read_elsewhere = [key for key in chain if key not in request.moved]
        self._touch(session, read_elsewhere, adapter)
        keys = names(session, chain, self._first_group, adapter)
        if keys is None or expected == HintedChain():
            return
        session.hint(keys=keys, group=self._first_group, next_step=expected.next_step, due_in_s=expected.due_in_s)
        if expected.wants_prefetch:
            session.prefetch(keys=keys, group=self._first_group, in_s=expected.prefetch_in_s)

    def _touch(self, session: Session, chunks: Sequence[bytes], adapter: str) -> None:
        for group, places in by_group(chunks).items():
            keys = names(session, [chunks[at] for at in places], group, adapter)
            if keys is not None:
                session.touch(keys=keys, group=group)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # as above
    """vLLM's own records of look-ups; the questions of a step go to the daemon in one batch, from its thread."""

    def __init__(self, tier: KVStoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.present(keys, req_context)


def _engine_of(packed: str, settings: VllmTierSettings) -> EngineName:
    if packed:
        return unpacked(packed)
    if settings.weights_digest:
        return stated(f"{settings.weights_digest} vllm {vllm.__version__}")
    raise ValueError(
        "KVStoreTier does not know the model's weights: name kvstore_connectors.vllm_tier's "
        'KVStoreOffloadingConnector as the kv_connector, or set "weights_digest" to a name that changes with '
        "weights, model settings, adapters and attention backend"
    )


def _positions(req_context: ReqContext) -> dict[bytes, int]:
    """Return the end of each of a request's chunks, in tokens. It is a copy: the scheduler goes on adding to the
    original."""
    return dict(getattr(req_context, "_offload_key_positions", {}))


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        LOADS: OffloadingCounterMetadata("Chunks that were to be loaded from kvstored, by outcome.", ("outcome",)),
        STORES: OffloadingCounterMetadata("Chunks that were to be stored in kvstored, by outcome.", ("outcome",)),
        CONNECTED: OffloadingGaugeMetadata("Whether kvstored answers (1) or not (0)."),
    }


class ChunkCounts:
    """The counts of loaded and stored chunks by outcome, since the last report."""

    def __init__(self) -> None:
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._connected: float | None = None

    def add(self, ended: EndedJob) -> None:
        metric = LOADS if ended.is_load else STORES
        for outcome, chunks in ended.counts().items():
            self._chunks[metric, outcome] += chunks

    def take(self, *, is_connected: bool) -> OffloadingConnectorStats | None:
        """Return the statistics since the last call, for vLLM, or None if nothing has changed."""
        if not self._chunks and self._connected == float(is_connected):
            return None
        stats = OffloadingConnectorStats()
        for (metric, outcome), chunks in self._chunks.items():
            stats.increase_counter(metric, chunks, (outcome,))
        self._connected = float(is_connected)
        stats.set_gauge(CONNECTED, self._connected)
        self._chunks.clear()
        return stats
