"""Which lanes there are between the tiers of a store: one a direction, those of each tier that is not mapped."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from kvstored.config import Config
from kvstored.config.tiers.gpu import LINK_SHARE, GpuSection
from kvstored.store.blocks import ResidencyView
from kvstored.store.transfer.items import LaneSettings, Limits, Priority
from kvstored.store.transfer.lane import Lane
from kvstored.store.transfer.link import Transfer, lane_name

KEYED_IN_FLIGHT = 32  # reads at once, which a driver takes together: each waits for a network
# Before the first read no engine should wait for a hope; after it, what was seen says more.
KEYED_PRIOR_BYTES_PER_S, KEYED_PRIOR_US, KEYED_PRIOR_BYTES = 200e6, 2000.0, 1 << 20


def make_lanes(
    config: Config, residency: ResidencyView, keyed: Container[int], straight: Sequence[int] = ()
) -> list[Lane[Transfer]]:
    """Lanes of one tier share its medium, so that prefetch waits for demand on any of them. `keyed`: the positions of
    tiers that are addressed by key; `straight`: of those to which the durable tier has a lane of its own."""
    movement, limits = config.movement, config.limits
    settings = LaneSettings(
        max_in_flight=movement.in_flight,
        limits={
            Priority.DEMAND: Limits(movement.queue_blocks, movement.in_flight),
            Priority.PREFETCH: Limits(movement.queue_blocks, 1),
            Priority.DEMOTION: Limits(
                movement.queue_blocks,
                max(1, movement.in_flight // 2),
                movement.demotion_rate_bytes or None,
            ),
            Priority.MAINTENANCE: Limits(movement.queue_blocks, 1),
        },
        quiet_s=movement.prefetch_quiet_ms / 1000,
        prefetch_item_bytes=limits.max_block_bytes + 8192,
    )
    of_keyed = replace(
        settings, max_in_flight=max(KEYED_IN_FLIGHT, movement.in_flight),
        limits=settings.limits | {
            Priority.DEMAND: Limits(movement.queue_blocks, max(KEYED_IN_FLIGHT, movement.in_flight))
        },
        prior_bytes_per_s=KEYED_PRIOR_BYTES_PER_S, prior_latency_us=KEYED_PRIOR_US,
        prior_bytes=KEYED_PRIOR_BYTES,
    )  # fmt: skip
    lanes: list[Lane[Transfer]] = []
    mapped = residency.mapped
    for other in range(len(residency.tiers)):
        if other == mapped:
            continue
        source = mapped if other < mapped or other == residency.durable else other - 1
        of_other = of_keyed if other in keyed else settings
        section = config.tier(residency.tiers[other])
        if isinstance(section, GpuSection):
            of_other = _beside_engines(settings, section)
        names = [lane_name(residency.tiers, other, mapped), lane_name(residency.tiers, source, other)]
        if other in keyed and source != mapped:
            names.append(lane_name(residency.tiers, mapped, other))
        if other == residency.durable:
            names += [lane_name(residency.tiers, other, to) for to in straight]
        pair: list[Lane[Transfer]] = [Lane(name, of_other) for name in names]
        for lane in pair:
            lane.share_medium(pair)
        lanes += pair
    return lanes


def _beside_engines(settings: LaneSettings, section: GpuSection) -> LaneSettings:
    """Engines copy over the link to the device as well, and no lane sees that."""
    if section.rate_bytes is None:
        return replace(settings, spare_share=LINK_SHARE)
    burst_bytes = min(settings.spare_burst_bytes, section.rate_bytes)  # of a second at most
    return replace(settings, spare_bytes_per_s=float(section.rate_bytes), spare_burst_bytes=burst_bytes)
