"""Orders of the scheduler side to the worker side, once a step: plain records that pickle well.

A block number counts the blocks of a prefix from 0; a block id is a place in vLLM's
paged pool.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens of a request in whole blocks, as packed little-endian int32, and what else they depend on.

    `digests[i]` covers everything except the tokens of blocks 0 to i; empty for a plain text request.
    """

    tokens: bytes
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Restore blocks first_block, first_block + 1, … of the prefix into pool blocks `block_ids`, before this step."""

    request_id: str
    prefix: Prefix
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store blocks first_block and later; the step fills the last of them. `block_ids`: of the whole prefix."""

    request_id: str
    prefix: Prefix
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All of one step. `ended`: requests whose pool blocks this step may already give to others."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    ended: tuple[str, ...] = ()
