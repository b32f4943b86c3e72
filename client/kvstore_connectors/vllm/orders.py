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
    """The leading tokens of a request in whole blocks, as packed little-endian int32, and digests of its other inputs.

    `digests[i]` covers everything except the tokens of blocks 0 to i; empty for a plain text request.
    """

    tokens: bytes
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to restore blocks first_block, first_block + 1, … of the prefix's layer group into pool blocks
    `block_ids`. Blocks that have not come after `deadline_s` count as failed.
    """

    request_id: str
    prefix: RequestPrefix
    first_block: int
    block_ids: tuple[Place, ...]
    deadline_s: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """An order to store blocks first_block and later; the step fills the last of them. `block_ids`: the ids of the
    whole prefix. `stays`: its blocks stay in the pool until their request has ended, or `StepOrders.released` names
    them.
    """

    request_id: str
    prefix: RequestPrefix
    first_block: int
    block_ids: tuple[Place, ...]
    group: int = 0
    stays: bool = True


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders of one step. `loads` are for requests that this step computes, layer by layer; `beside` are for
    requests that wait until their load has ended. `ended`: requests whose pool blocks this step may already give to
    others; `released`: pool blocks that running requests gave up before it. The step computes `tokens` tokens, which
    attend to `attended` others; `decodes` requests continue their answers in it.
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
    """A load that has ended: `blocks` blocks came, and the request was delayed by `seconds`."""

    request_id: str
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The time that a step took apart from waiting for loads (0 tokens: nothing was measured), and the loads that ended
    since the last report. On a device the step is an earlier one.
    """

    loads: tuple[LoadReport, ...] = ()
    tokens: int = 0
    attended: float = 0.0
    compute_s: float = 0.0

    def joined(self, other: StepReport) -> StepReport:
        """Return the report of two ranks together: the slower one counts. A step that one of them could not measure is
        left out.
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
