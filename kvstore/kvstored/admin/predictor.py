"""The operator's view of prefetch by prediction, and its switch. The module keeps nothing."""

from __future__ import annotations

import math

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.predictor_names import NONE
from kvstored.store.blocks import Residency
from kvstored.store.prefetch.credit import PrefetchFigures
from kvstored.store.prefetch.prefetcher import Prefetcher


def predictor(prefetcher: Prefetcher, residency: Residency, request: pb.PredictorRequest) -> pb.PredictorReply:
    """Return the status of prefetch by prediction. If `request` has a switch, turn it on or off first. Raises
    KVStoreError if it cannot be turned on.
    """
    if request.switch == pb.PredictorRequest.ON:
        _require_predictor(prefetcher)
    if request.switch:
        prefetcher.is_enabled = request.switch == pb.PredictorRequest.ON
    found = prefetcher.statistics()
    names = [tenant.name for tenant in residency.tenants]
    return pb.PredictorReply(
        enabled=found.is_enabled, predictor=found.predictor, failure=found.failure, guesses=found.guesses,
        planned_blocks=found.planned_blocks, under_way_blocks=found.under_way_blocks,
        cancelled_blocks=found.cancelled_blocks, all=_figures("", found.all),
        tenants=[_figures(names[number], figures) for number, figures in sorted(found.tenants.items())],
    )  # fmt: skip


def _require_predictor(prefetcher: Prefetcher) -> None:
    status = prefetcher.statistics()
    if status.predictor == NONE:
        raise KVStoreError(
            ErrorKind.INVALID, "no predictor runs: set prefetch.enabled and prefetch.predictor, and restart the daemon"
        )
    if status.failure:
        raise KVStoreError(
            ErrorKind.INVALID, f"predictor {status.predictor} failed ({status.failure}): restart the daemon"
        )


def _figures(tenant: str, figures: PrefetchFigures) -> pb.PrefetchFigures:
    spared_s_per_gb = figures.spared_s_per_gb
    return pb.PrefetchFigures(
        tenant=tenant, standing=figures.standing.name.lower(), prefetched_blocks=figures.prefetched_blocks,
        prefetched_bytes=figures.prefetched_bytes, used_blocks=figures.used_blocks, late_blocks=figures.late_blocks,
        wasted_blocks=figures.wasted_blocks, wasted_bytes=figures.wasted_bytes, waiting_blocks=figures.waiting_blocks,
        demanded_blocks=figures.demanded_blocks, precision=figures.precision, recall=figures.recall,
        wasted_share=figures.wasted_share, spared_s=figures.spared_s,
        spared_s_per_gb=spared_s_per_gb if math.isfinite(spared_s_per_gb) else 0.0, lead_s=figures.lead_s,
    )  # fmt: skip
