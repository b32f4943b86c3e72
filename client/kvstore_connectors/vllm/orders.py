"""Orders of the scheduler side to the worker side, and its reports, once a step: plain records that can be pickled.

A block number counts the blocks of a prefix from 0; a block id is a place in vLLM's paged pool. Where vLLM has several
groups of layers, a block of the store may take several pool blocks: its place is then their ids, 0 for one that is not
there.
"""

from __future__ import annotations

from dataclasses import dataclass

Place = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPrefix:
    """The leading whole blocks of a request: their tokens, packed as little-endian int32, and the digests of its other
    inputs. `digests[i]` covers everything except tokens that the blocks 0 to i depend on. `digests` is empty for a
    plain text request. `trace` is the W3C traceparent of the request, "" for none.
    """

    tokens: bytes
    digests: tuple[bytes, ...] = ()
    trace: str = ""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to restore blocks of a request's prefix: block `first_block` + i goes to the pool block (or blocks)
    `block_ids[i]`. Blocks that are not loaded after `deadline_s` seconds count as failed.
    """

    request_id: str
    prefix: RequestPrefix
    first_block: int
    block_ids: tuple[Place, ...]
    deadline_s: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """An order to store blocks of a request's prefix, from number `first_block` to the last block, which the step
    fills. `block_ids` has the pool block (or blocks) of each block of the whole prefix. If `stays` is True, these pool
    blocks stay until the request has ended, otherwise until `StepOrders.released` names them.
    """

    request_id: str
    prefix: RequestPrefix
    first_block: int
    block_ids: tuple[Place, ...]
    group: int = 0
    stays: bool = True


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders for one step of the engine. `loads` are for requests that this step computes. `beside` are for
    requests that wait until their load has ended. `ended` names requests whose pool blocks vLLM may give to others in
    this step; `released` are pool blocks that running requests gave up before it. The step computes `tokens` tokens,
    which attend to `attended` other tokens in all, and `decodes` requests continue their answers in it.
    """

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    ended: tuple[str, ...] = ()
    beside: tuple[LoadOrder, ...] = ()
    tokens: int = 0
    attended: float = 0.0
    decodes: int = 0
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A report on one load that has ended: `blocks` blocks were loaded, and the load delayed the request by
    `seconds`.
    """

    request_id: str
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """A report of a worker on a step and on loads. Computing a step of `tokens` tokens took `compute_s` seconds,
    without waiting for loads; 0 tokens mean that no step was measured. On a device the measured step is an earlier one.
    The report also has the loads that ended since the last report.
    """

    loads: tuple[LoadReport, ...] = ()
    tokens: int = 0
    attended: float = 0.0
    compute_s: float = 0.0

    def joined(self, other: StepReport) -> StepReport:
        """Return this report of one rank combined with the report `other` of another rank. The slower rank's times
        count. A step that one of the ranks could not measure is left out.
        """
        loads = {load.request_id: load for load in self.loads}
        for load in other.loads:
            known = loads.get(load.request_id, load)
            blocks, seconds = min(known.blocks, load.blocks), max(known.seconds, load.seconds)
            loads[load.request_id] = LoadReport(load.request_id, blocks, seconds)
        if (self.tokens, self.attended) != (other.tokens, other.attended):
            return StepReport(tuple(loads.values()))
        compute_s = max(self.compute_s, other.compute_s)
        return StepReport(tuple(loads.values()), self.tokens, self.attended, compute_s)
