"""Ways of serving requests over a tiered store, to be compared: what a plain engine does, and what orchestration adds.

`engine-alone` has no store. `baseline` is an engine with a host cache: LRU, blocks loaded when a request starts, all of
them before it computes, blocks written below DRAM when DRAM is full; `baseline-eager` writes them at once, as
`orchestrated` does, which is what the daemon is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore_simulator.machine import GPU


@dataclass(frozen=True, slots=True)
class Plan:
    """`prefetches`: blocks below DRAM move up while the request queues, and those of the next one all the way.
    `overlaps`: a layer computes while the next one's blocks arrive. `weighs`: computing from the head races loading
    from the tail. `writes_behind`: new blocks go below DRAM at once, so that room is there when it is needed.
    `uses_gpu`: the store has its tier of device memory, if there is one; else the engine has that room."""

    name: str
    has_store: bool = True
    prefetches: bool = False
    overlaps: bool = False
    weighs: bool = False
    writes_behind: bool = False
    uses_gpu: bool = False


ENGINE_ALONE = Plan("engine-alone", has_store=False)
BASELINE = Plan("baseline")
BASELINE_EAGER = replace(BASELINE, name="baseline-eager", writes_behind=True)
BASELINES = (BASELINE, BASELINE_EAGER)
ORCHESTRATED = Plan("orchestrated", prefetches=True, overlaps=True, weighs=True, writes_behind=True, uses_gpu=True)
ON_ARRIVAL = "prefetch"
ABLATIONS = {
    ON_ARRIVAL: replace(ORCHESTRATED, name="without prefetch", prefetches=False),
    "overlap": replace(ORCHESTRATED, name="without overlap", overlaps=False),
    "weigh": replace(ORCHESTRATED, name="without weigh", weighs=False),
    "write-behind": replace(ORCHESTRATED, name="without write-behind", writes_behind=False),
    GPU: replace(ORCHESTRATED, name="without gpu", uses_gpu=False),
}
