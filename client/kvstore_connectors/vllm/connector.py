"""The class that vLLM loads: it passes its hooks to the scheduler side or the worker side.

The module imports vLLM, and torch with it. It owns the sessions and vLLM's types, and does nothing without a daemon.
One object lives in the scheduler's process, one in each worker's. Invariants: wrong settings and models that cannot be
served are refused when the engine starts; after that no hook raises and no request fails because of the store.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore_client.device import LinkBudget
from kvstore_client.link_rate import parse_rate
from kvstore_client.paths import costs_file
from kvstore_client.session import Session
from kvstore_connectors.engine_session import engine_session
from kvstore_connectors.vllm.answers import AnswerReporter
from kvstore_connectors.vllm.groups import state_groups
from kvstore_connectors.vllm.model import describe_extras, find_weights, hashes_items, model_fingerprint, refusal
from kvstore_connectors.vllm.orders import LoadOrder, StepOrders, StepReport
from kvstore_connectors.vllm.scheduler import LoadRules, SchedulerSide
from kvstore_connectors.vllm.settings import parse_settings
from kvstore_connectors.vllm.specs import packing
from kvstore_connectors.vllm.tensors import kv_tensors
from kvstore_connectors.vllm.worker import VllmWorkerSide, open_worker
from kvstore_proto.fingerprint import Fingerprint
from kvstore_restore.choice import LoadChoice

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvstored")  # below "vllm", so that vLLM's log settings hold for it

_CLOSE_PATIENCE_S = 5.0
_SOURCES = {"host": CacheHitSource.HOST, "memory": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed where this is checked
    """The orders of the scheduler side for one step, in the form that vLLM carries to its workers."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class StepMeasured(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """The report of the worker side on a step, in the form that vLLM carries back to the scheduler."""

    report: StepReport

    def aggregate(self, other: StepMeasured) -> StepMeasured:
        return StepMeasured(self.report.joined(other.report))


class KVStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """The connector that vLLM loads to restore its KV blocks from the daemon and store them there. docs/vllm.md says
    how to turn it on.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = parse_settings(transfer.kv_connector_extra_config)
        refused = refusal(vllm_config, kv_cache_config)
        if not refused and vllm_config.device_config.device_type == "cuda":
            refused = _missing_library()
        if refused:
            raise ValueError(f"kvstored cannot serve this engine: {refused}")
        self._groups = state_groups(kv_cache_config)
        self._loads = bool(transfer.is_kv_consumer)
        self._saves = bool(transfer.is_kv_producer) and not self._settings.read_only
        self._weights = find_weights(vllm_config, self._settings.weights_digest)
        self._sessions: list[Session] = []
        self._scheduler: SchedulerSide | None = None
        self._worker: VllmWorkerSide | None = None
        self._answers: AnswerReporter | None = None
        self._unserved: list[LoadOrder] = []  # loads that came while there is no worker half
        self._choice: LoadChoice | None = None
        self._layers: dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._make_failures_recompute()
            self._scheduler = self._make_scheduler_side()

    @property
    def requires_kv_delivery(self) -> bool:
        """False, so that vLLM knows that no request depends on a save: a dropped save is only a later miss."""
        return False

    # The scheduler's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.admitted(request, num_external_tokens, blocks.get_block_ids() if num_external_tokens else ())

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        managers = kv_cache_manager.coordinator.single_type_managers
        self._scheduler.use_rule(lambda group, tokens: int(managers[group].get_num_skipped_tokens(tokens)))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        measured = connector_output.kv_connector_worker_meta
        if isinstance(measured, StepMeasured):
            self._scheduler.learn(measured.report)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.orders(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note that `request` has ended. Return False: vLLM may free its blocks at once, because the next step's orders
        name the request.
        """
        assert self._scheduler is not None
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that `request` has ended, as `request_finished` does. vLLM calls this method where its hybrid manager is
        on.
        """
        return self.request_finished(request, block_ids[0])

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        assert self._scheduler is not None
        size = self._groups.block_tokens
        tiers = self._scheduler.tiers(request.request_id, num_external_tokens // size)
        sources = Counter(_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED) for tier in tiers)
        return {source: blocks * size for source, blocks in sources.items()}

    def reset_cache(self) -> bool:
        """Stop using the store for good, and return True. vLLM calls this when weights were changed in place, so that
        the stored blocks belong to the old weights. The fingerprint names weights by their files, so it cannot name the
        new ones.
        """
        assert self._scheduler is not None
        self._scheduler.stop()
        logger.warning("kvstored is not used any more by this engine, since its connector cache was reset")
        return True

    # A worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        settings = self._settings
        if self._groups.is_plain:
            self._layers = {name: index for index, name in enumerate(self._groups.groups[0].layers[0])}
        try:
            budget = LinkBudget(parse_rate(settings.store_rate), parse_rate(settings.load_rate))
            tensors = kv_tensors(
                kv_caches, self._vllm_config, self._kv_cache_config, groups=self._groups, budget=budget
            )
        except ValueError as error:
            raise ValueError(f"kvstored cannot serve this engine: {error}") from None
        fingerprint = self._fingerprint(get_tensor_model_parallel_rank())
        staging_bytes = settings.staging_mib << 20 if self._saves else 0
        deadline_s = settings.load_deadline_ms / 1000
        session = self._connect(fingerprint, "vllm-worker", deadline_s, staging_bytes, tensors.device)
        if session is None:
            return
        self._worker = open_worker(
            session,
            tensors.pages,
            save_deadline_s=settings.save_deadline_ms / 1000 if self._saves else None,
            reuse_wait_s=settings.reuse_wait_ms / 1000,
            say=logger.warning,
            refuse=partial(logger.error, "kvstored cannot serve this engine, which goes on without it: %s"),
        )
        if self._worker is None:
            self._sessions.remove(session)
            session.close()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Prepare a step before it writes to any block of the pool: wait for the copies that still read blocks which
        vLLM has freed.
        """
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.before_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step. vLLM also calls this after the forward, in steps without loads, and then it
        does nothing.
        """
        orders = self._orders()
        if self._worker is None:
            self._unserved += [*orders.loads, *orders.beside]
            return
        if orders.loads:
            self._worker.load(orders.loads)
            if not _calls_each_layer(forward_context):
                self._worker.wait_layer(len(self._layers) - 1)
        if orders.beside:
            self._worker.load_beside(orders.beside)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            # A name that is not known waits for all layers.
            self._worker.wait_layer(self._layers.get(layer_name, len(self._layers) - 1))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because blocks are stored whole after the step, with all layers together."""

    def wait_for_save(self) -> None:
        """Hand the blocks that this step filled to the saver's thread, without waiting. `handle_preemptions` keeps them
        from being reused too early.
        """
        if self._worker is not None:
            self._worker.save(self._orders().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is not None:
            return None, self._worker.take_ended() or None
        beside = {order.request_id for order in self._orders().beside}
        return None, beside or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return vLLM's results of transfers, with the ids of requests whose loads failed. `finished_req_ids` are the
        requests that have ended. If vLLM has several groups of layers, it cannot recompute single blocks, so the whole
        request counts as failed.
        """
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed_requests()
        elif not self._groups.is_plain:
            results.failed_recving = set(results.finished_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None:
            unserved, self._unserved = self._unserved, []
            return {block for order in unserved for block in order.block_ids if isinstance(block, int)}
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> StepMeasured | None:
        report = self._worker.take_report() if self._worker is not None else None
        return None if report is None else StepMeasured(report)

    def shutdown(self) -> None:
        if self._worker is not None:
            logger.info("kvstored: %s", self._worker.close(_CLOSE_PATIENCE_S))
        if self._answers is not None:
            self._answers.close()
            hints = self._answers.kv_hints
            if hints.ignored or hints.malformed:
                logger.info("kv_hints: %d actions not known here, %d malformed", hints.ignored, hints.malformed)
        if self._choice is not None:
            self._choice.save()
        for session in self._sessions:
            session.close()
        self._sessions = []

    def _orders(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    def _make_failures_recompute(self) -> None:
        """Set vLLM's policy for failed loads to recompute; its scheduler reads the policy after it has made its
        connector.
        """
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r, by vLLM's default or by your setting; it is set to 'recompute': "
                "a block that cannot be restored is computed, and its request does not fail",
                transfer.kv_load_failure_policy,
            )
            transfer.kv_load_failure_policy = "recompute"

    def _make_scheduler_side(self) -> SchedulerSide:
        config, settings = self._vllm_config, self._settings
        ranks = range(config.parallel_config.tensor_parallel_size)
        deadline_s = settings.lookup_deadline_ms / 1000
        sessions = [self._connect(self._fingerprint(rank), "vllm-scheduler", deadline_s) for rank in ranks]
        served = [session for session in sessions if session is not None] if None not in sessions else []
        if served and self._saves:
            self._answers = AnswerReporter(served, say=logger.warning)
        return SchedulerSide(
            served,
            partial(describe_extras, hashed_items=hashes_items(config)),
            groups=self._groups,
            loads=self._loads,
            saves=self._saves,
            lookup_deadline_s=deadline_s,
            rules=self._load_rules(),
            on_answer=self._answers.ended if self._answers is not None else None,
        )

    def _load_rules(self) -> LoadRules:
        settings = self._settings
        if not settings.always_load:
            path = costs_file(self._fingerprint(0).digest())
            step_tokens = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
            self._choice = LoadChoice.load(path, step_tokens=step_tokens)
        return LoadRules(
            self._choice,
            block_bytes=self._groups.bytes_a_block,
            deadline_s=settings.load_deadline_ms / 1000,
            beside_s=settings.beside_ms / 1000,
            beside_deadline_s=settings.beside_deadline_ms / 1000,
        )

    def _fingerprint(self, rank: int) -> Fingerprint:
        return model_fingerprint(
            self._vllm_config,
            self._kv_cache_config,
            weights=self._weights,
            packing=packing(self._vllm_config, self._kv_cache_config),
            version=vllm.__version__,
            rank=rank,
        )

    def _connect(
        self,
        fingerprint: Fingerprint,
        client_name: str,
        deadline_s: float,
        staging_bytes: int = 0,
        device: int | None = None,
    ) -> Session | None:
        settings = self._settings
        session = engine_session(
            logger,
            settings.socket,
            fingerprint=fingerprint,
            client_name=client_name,
            deadline_s=deadline_s,
            connect_timeout_s=settings.connect_timeout_ms / 1000,
            exact=not settings.accepts_lossy,
            pool=settings.pool,
            staging_bytes=staging_bytes,
            device=device,
        )
        if session is not None:
            self._sessions.append(session)
        return session


if current_platform.is_cpu():  # for others vLLM turns its hybrid manager off: their pools are copied as one group
    SupportsHMA.register(KVStoreConnector)


def _calls_each_layer(forward_context: Any) -> bool:
    """Return whether the forward calls `wait_for_layer_load`: replaying a full CUDA graph runs no Python. vLLM's newer
    model runner then shows a context without attention metadata.
    """
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    return getattr(forward_context, "attn_metadata", None) is not None and getattr(mode, "name", "") != "FULL"


def _missing_library() -> str:
    """Return the reason why this process cannot use CUDA devices; "" if it can."""
    from kvstore_cuda.driver import cuda_driver

    try:
        cuda_driver()
    except OSError as error:
        return str(error)
    return ""
