"""Plans, which are compared, and the settings of a simulated node.

A plan is a way of serving requests over a tiered store: as a plain engine, or with parts of orchestration.

`engine-alone` has no store. `baseline` is an engine with a host cache: LRU, blocks loaded when a request starts, all of
them before it computes, blocks written below DRAM when DRAM is full; `baseline-eager` writes them at once, as
`orchestrated`, the daemon's plan, does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore_predictor.base import Predictor
from kvstore_simulator.hints import NO_HINTS, HintOptions
from kvstore_simulator.hit_value import ModelSize
from kvstore_simulator.machine import GPU, Machine
from kvstore_simulator.policies import address_of
from kvstore_simulator.simulated_remote import SharedObjects
from kvstore_simulator.trace import Trace
from kvstored.config import Config, load_config
from kvstored.config.tiers import GpuSection, MemorySection, TierSection
from kvstored.config.tiers import MachineSizes as Host
from kvstored.policy_names import ALWAYS
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS

MakePredictor = Callable[[Trace, float], Predictor]


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """A way in which a node serves requests, so that studies can compare ways. `prefetches`: while a request queues,
    its blocks move from slower tiers to DRAM, and the next request's blocks to the fastest tier. `overlaps`: a layer is
    computed while the next layer's blocks arrive. `weighs`: the node computes blocks from the first on while it loads
    from the last. `writes_behind`: new blocks are written to tiers below DRAM at once. `uses_gpu`: the store has its
    tier of device memory; otherwise the engine's own blocks get that memory.
    """

    name: str
    has_store: bool = True
    prefetches: bool = False
    overlaps: bool = False
    weighs: bool = False
    writes_behind: bool = False
    uses_gpu: bool = False


ENGINE_ALONE = ServingPlan("engine-alone", has_store=False)
BASELINE = ServingPlan("baseline")
BASELINE_EAGER = replace(BASELINE, name="baseline-eager", writes_behind=True)
BASELINES = (BASELINE, BASELINE_EAGER)
ORCHESTRATED = ServingPlan(
    "orchestrated", prefetches=True, overlaps=True, weighs=True, writes_behind=True, uses_gpu=True
)
ON_ARRIVAL = "prefetch"
ABLATIONS = {
    ON_ARRIVAL: replace(ORCHESTRATED, name="without prefetch", prefetches=False),
    "overlap": replace(ORCHESTRATED, name="without overlap", overlaps=False),
    "weigh": replace(ORCHESTRATED, name="without weigh", weighs=False),
    "write-behind": replace(ORCHESTRATED, name="without write-behind", writes_behind=False),
    GPU: replace(ORCHESTRATED, name="without gpu", uses_gpu=False),
}


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings of a simulated node. `tiers` has the media of the store with their sizes in bytes, fastest first.
    Requests arrive `speed` times as fast as recorded. `predictor(trace, speed)` returns the predictor that triggers
    prefetch. `gpu` has the settings of the GPU tier, as in the daemon's configuration.
    """

    machine: Machine
    model: ModelSize
    tiers: tuple[tuple[str, int], ...]
    pool_bytes: int
    policy: str
    admission: str = ALWAYS
    ttl_s: float | None = None
    ghost_keys: int = DEFAULT_GHOST_KEYS
    speed: float = 1.0
    keep_worth: float = 0.0
    policy_below: str | None = None  # of the second tier; None: the daemon's default
    hints: HintOptions = NO_HINTS
    predictor: MakePredictor | None = None  # None: nothing is predicted
    remote: SharedObjects | None = None  # what this node shares with others
    gpu: Mapping[str, str] = field(default_factory=dict)

    @property
    def without_gpu(self) -> NodeSettings:
        """A copy of these settings without the GPU tier, whose memory the engine's own blocks get."""
        tiers = dict(self.tiers)
        return replace(self, pool_bytes=self.pool_bytes + tiers.pop(GPU, 0), tiers=tuple(tiers.items()))


def config_of(settings: NodeSettings, block_bytes: int) -> Config:
    """Return the daemon's configuration for a simulated node: its defaults, with the tiers and sizes of `settings`."""
    config = load_config(None, ["host.capacity=512MiB", "host.min_free=0", "nvme.capacity=1GiB"])
    ttl_s = settings.ttl_s or 0
    first_bytes, *more = (nbytes for name, nbytes in settings.tiers if name != GPU)
    below_bytes = more.pop() if more else 0
    memory = tuple(
        MemorySection(
            name=f"memory-{number}", capacity_bytes=nbytes, arena_bytes=0, copy_threads=1, policy=config.nvme.policy,
            ttl_s=ttl_s, numa_node=-1,
        )
        for number, nbytes in enumerate(more, 1)
    )  # fmt: skip
    host = replace(
        config.host, capacity_bytes=first_bytes, policy=address_of(settings.policy), ttl_s=ttl_s,
        keep_worth=settings.keep_worth, verify_reads="off",
    )  # fmt: skip
    nvme = replace(
        config.nvme, enabled=below_bytes > 0, capacity_bytes=below_bytes, ttl_s=ttl_s,
        policy=address_of(settings.policy_below or config.nvme.policy), admission=settings.admission,
        endurance_bytes_per_day=0,
    )  # fmt: skip
    listed: list[TierSection] = [host, *memory, nvme]
    for position, (name, nbytes) in enumerate(settings.tiers):
        if name == GPU:  # before the host's tier or right after it
            listed.insert(position, _gpu_section(settings, nbytes))
    return replace(
        config,
        listed=tuple(listed),
        prefetch=replace(config.prefetch, enabled=settings.predictor is not None),
        limits=replace(
            config.limits, max_block_bytes=max(config.limits.max_block_bytes, block_bytes),
            ghosts_per_tenant=settings.ghost_keys,
        ),
    )  # fmt: skip


def _gpu_section(settings: NodeSettings, capacity_bytes: int) -> GpuSection:
    table = {**GpuSection.DEFAULTS, **settings.gpu, "capacity": str(capacity_bytes), "ttl_s": settings.ttl_s or 0}
    section = GpuSection.read(GPU, table, Host(capacity_bytes, Path()))
    return replace(section, policy=address_of(section.policy))
