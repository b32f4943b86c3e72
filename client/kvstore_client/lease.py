"""A lease gives the right to read the leading blocks of a prefix in place, until it ends.

The module owns the views that an engine reads, and the answer to whether their content may still be trusted. A lease
never extends itself silently and never unmaps memory: views are safe to touch for ever, and only the promise about
their *content* ends with the lease. After a restart of the daemon a lease goes on if the daemon still has it
(`DaemonSession.succeed`). A lease that an engine dropped without releasing it is given back (`anchors`). A prefix that
took several requests has one lease with several parts: each part covers the blocks after the part before it, and the
lease is valid only while every part is.

Before a byte is used, the header of its block is checked: a stale offset, a recycled slot, a colliding key or a mistake
of the daemon becomes a miss. The daemon verifies the checksum of the payload whenever bytes come from a slower medium.
`kvstore_proto.arena` has the layout of headers, and compares them.

Invariants: views are read-only; `valid` turns False before the daemon may recycle a byte, given a clock that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore_client import arguments
from kvstore_client.anchors import Anchor, give_back_dropped
from kvstore_client.arrays import Kind, LeaseArray
from kvstore_client.errors import invalid
from kvstore_client.keys import Chain
from kvstore_client.memory import Bytes
from kvstore_cuda.host_copies import address_of, copy_runs
from kvstore_proto.arena import ERROR_OFFSET, HEADER_BYTES, mismatch
from kvstore_proto.kv_layout import KVLayout
from kvstore_proto.token_ids import TokenIds

MAX_MARGIN_S = 0.5
MARGIN_SHARE = 0.1


class Chunk(Protocol):
    """A piece of device memory, `nbytes` bytes at `address`, that this process may read."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int:
        """The number of the CUDA device, as this process counts."""
        ...

    def read(self, offset: int, nbytes: int) -> Bytes: ...


class LeasedBlock(NamedTuple):
    """The place of one leased block in memory. Its header is at `offset` of `arena`, and the payload follows the
    header. For a block on a device, `offset` is a place in `chunk`, and `arena` is a copy of the header alone.
    """

    arena: Bytes
    offset: int
    payload_bytes: int
    generation: int
    key: bytes
    chunk: Chunk | None = None


class Grant(Protocol):
    """The daemon's permission to read some blocks, by which a lease is renewed and released. Each block has
    `block_tokens` tokens and `layer_count` layers. `layer_count` is 0 if the fingerprint lists no layers.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def name(self) -> str:
        """The number of the lease in the daemon, for messages to people."""
        ...

    def is_alive(self) -> bool: ...
    def renew(self) -> float | None:
        """Ask the daemon to extend the lease. Return the seconds until it ends, counted from before the call, or None
        if it has ended already.
        """
        ...

    def release(self) -> None: ...
    def chain(self, tokens: TokenIds) -> Chain: ...


class Lease:
    """A right to read the first `len(lease)` blocks of a prefix where they are stored. Use it as a context manager:
    leaving it releases the blocks. `reason` says why the lease has no further blocks. `promoted_bytes` is the number of
    bytes that were read from slower tiers for this lease. After `get(promote=False)`, `resident_blocks` is the number
    of leading blocks that can be read in some tier, and a get of all of them would take about `estimated_load_s`
    seconds.
    """

    def __init__(
        self,
        blocks: Sequence[LeasedBlock] = (),
        grant: Grant | None = None,
        *,
        expires_in_s: float = 0.0,
        reason: str = "",
        promoted_bytes: int = 0,
        resident_blocks: int = 0,
        estimated_load_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held_blocks = tuple(blocks)
        self.grant = grant
        self._clock = clock
        self._released = False
        self._exports, self._is_exported = Anchor(), False
        self._usable_for(expires_in_s, clock())
        self.reason = reason
        self.promoted_bytes = promoted_bytes
        self.resident_blocks = resident_blocks
        self.estimated_load_s = estimated_load_s

    def __len__(self) -> int:
        return len(self.held_blocks)

    @property
    def blocks(self) -> int:
        return len(self.held_blocks)

    @property
    def tokens(self) -> int:
        return 0 if self.grant is None else len(self.held_blocks) * self.grant.block_tokens

    @property
    def payload_bytes(self) -> int:
        """The sum of the payload bytes of all leased blocks."""
        return sum(block.payload_bytes for block in self.held_blocks)

    @property
    def valid(self) -> bool:
        """True if the content of the blocks may be trusted now. Check it after you used the bytes. A lease without
        blocks is not valid.
        """
        if self._released or not self.held_blocks or self.grant is None or self._clock() >= self.valid_until:
            return False
        return self.grant.is_alive()

    def payload(self, block: int) -> Bytes:
        """Return the payload of block number `block` as a read-only array uint8[payload_bytes]. It is a view of the
        stored bytes, or a copy for a block on a device. Raises KVStoreError after `release`, IndexError if the lease
        has no such block, and DeviceError if the device gives no copy.
        """
        leased = self.leased(block)
        start = leased.offset + HEADER_BYTES
        if leased.chunk is not None:
            return leased.chunk.read(start, leased.payload_bytes)
        return leased.arena[start : start + leased.payload_bytes]

    def error_bound(self, block: int) -> float:
        """Return the largest difference between a number of the block and the number that was put: 0 for an exact copy,
        which is what every session gets that did not `connect(exact=False)`. Raises the errors of `payload`."""
        leased = self.leased(block)
        start = ERROR_OFFSET + (leased.offset if leased.chunk is None else 0)
        return float(leased.arena[start : start + 4].view("<f4")[0])

    def device_address(self, block: int) -> int:
        """Return the address in device memory of the payload of block number `block`, or 0 if the block is in host
        memory. Work that reads the payload there has to end before the lease is released. Raises the errors of
        `payload`.
        """
        leased = self.leased(block)
        return 0 if leased.chunk is None else leased.chunk.address + leased.offset + HEADER_BYTES

    def layer(self, block: int, layer: int) -> Bytes:
        """Return one layer of block number `block`, as uint8[bytes of a layer]. `layer` counts the layers of the
        block's layer group, from 0. Raises the errors of `payload`, and KVStoreError when the fingerprint lists no
        layers or `layer` is not one of them.
        """
        count = 0 if self.grant is None else self.grant.layer_count
        if count == 0:
            raise invalid("this layer group's fingerprint lists no layers: its payload is opaque")
        payload = self.payload(block)
        if not 0 <= arguments.count("layer", layer) < count or len(payload) % count:
            raise invalid(f"layer {layer} of {count} cannot be cut from {len(payload)} bytes")
        size = len(payload) // count
        return payload[layer * size : (layer + 1) * size]

    def array(self, block: int, layer: int | None = None, *, kind: Kind) -> LeaseArray:
        """Return an array over K (`kind` "k") or V ("v") of one layer of block number `block`, where it is stored, for
        NumPy, torch, JAX or CuPy. The shape is [token, head, number of the head], or [token, number] when the group
        does not say its heads. With `layer` None it has all layers, as the first axis. `kind` "bytes" shows the
        stored bytes of any layout. Raises the errors of `payload`, and KVStoreError(INVALID) when the fingerprint
        does not say where K and V are.
        """
        leased = self.leased(block)
        if self.grant is None:
            raise invalid("a lease that nothing was granted for has no arrays")
        layer = None if layer is None else arguments.count("layer", layer)
        numbers, start = self.grant.layout.numbers(leased.payload_bytes, layer, kind), leased.offset + HEADER_BYTES
        if (chunk := leased.chunk) is not None:
            return LeaseArray(numbers, chunk.address + start, chunk, self, readonly=True, device=chunk.device)
        address = leased.arena.__array_interface__["data"][0] + start
        return LeaseArray(numbers, address, leased.arena, self, readonly=True)

    def hold(self) -> object:
        """Return an object. As long as a caller refers to it, the blocks are not given back, even after `release`.
        Raises BufferError once the lease has ended, and in a forked child, which cannot know when the lease ends.
        """
        self._is_exported = True  # first: `release` ends the lease first, and looks at this then
        held, is_ours = self._exports, self._exports.is_ours
        if not is_ours or not self.valid:
            name = "" if self.grant is None else f" {self.grant.name}"
            why = "has ended: its bytes may be another block's" if is_ours else "is the parent process's"
            raise BufferError(f"lease{name} of {len(self)} blocks {why}; get the blocks again")
        return held

    def copy_into(self, destinations: Sequence[npt.NDArray[Any]], first_block: int = 0) -> int:
        """Copy the payload of block `first_block` + i into `destinations[i]`, for each array there. The arrays are
        C-contiguous and have the exact size of a payload. The GIL is not held while bytes are copied.

        Return the number of blocks that were copied while the lease was valid: all of them, or 0 if the lease had ended
        by then (the content of the destinations is then undefined). Raises KVStoreError for arrays that do not fit.
        """
        if not isinstance(destinations, Sequence) and getattr(destinations, "ndim", 0) < 1:
            raise invalid(f"copy_into needs a list of arrays, got {type(destinations).__name__}")
        if arguments.count("first_block", first_block) + len(destinations) > len(self.held_blocks):
            raise invalid(f"{len(destinations)} destinations from block {first_block}, but {len(self)} blocks are held")
        blocks = range(first_block, first_block + len(destinations))
        pairs = [
            (_flat_bytes(destination, len(payload)), payload)
            for destination, payload in zip(destinations, map(self.payload, blocks), strict=True)
        ]
        for nbytes, alike in groupby(pairs, key=lambda pair: pair[0].nbytes):
            targets, sources = np.array([(address_of(target), address_of(payload)) for target, payload in alike]).T
            copy_runs(targets, sources, nbytes, shares=True)
        return len(destinations) if self.valid else 0

    def verify(self, tokens: TokenIds) -> bool:
        """Return True if the headers of all leased blocks say that the blocks hold the prefix `tokens`. `get` has
        checked this already, unless it was called with verify=False.
        """
        if self.grant is None:
            return not self.held_blocks
        chain = self.grant.chain(tokens)
        return len(chain) >= len(self.held_blocks) and all(
            not mismatch(
                block.arena.data,
                block.offset if block.chunk is None else 0,
                chain.keys[index],
                chain.tokens_of(index),
                block.payload_bytes,
                block.generation,
            )
            for index, block in enumerate(self.held_blocks)
        )

    def renew(self) -> bool:
        """Ask the daemon to extend the lease. Return False if the lease has ended; get the blocks again then."""
        if not self.valid or self.grant is None:
            return False
        before = self._clock()  # the daemon's time starts later than this
        expires_in_s = self.grant.renew()
        if expires_in_s is None:
            return False
        self._usable_for(expires_in_s, before)
        return self.valid

    def keep(self) -> bool:
        """Extend the lease if half of its time has passed. Return False if the lease has ended; get the blocks again
        then.
        """
        return self.valid if self._clock() < self._renew_at else self.renew()

    def release(self) -> None:
        """Release the blocks without waiting. A second call does nothing. If arrays of other libraries still show
        blocks, the blocks are given back once the last of these arrays is freed.
        """
        if self._released:
            return
        self._released = True
        if self.grant is None:
            return
        if not self._is_exported:
            self.grant.release()
            return
        self._exports.give_back(self.grant.release)
        self._exports = Anchor()  # nothing of this lease is handed out any more
        give_back_dropped()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else "valid" if self.valid else "ended"
        return f"Lease({len(self)} blocks, {state}{', ' + self.reason if self.reason else ''})"

    def _usable_for(self, expires_in_s: float, since: float) -> None:
        usable_s = _usable_s(expires_in_s)
        self.valid_until, self._renew_at = since + usable_s, since + usable_s / 2

    def leased(self, block: int) -> LeasedBlock:
        """Return the place of block number `block`. Raises KVStoreError after `release`, and IndexError if the lease
        has no such block.
        """
        if self._released:
            raise invalid("the lease was released: its bytes may be recycled; copy what you need before releasing it")
        try:
            return self.held_blocks[block]
        except TypeError:
            raise invalid(f"a block is named by its number, got {type(block).__name__}") from None


def _usable_s(expires_in_s: float) -> float:
    return expires_in_s - min(expires_in_s * MARGIN_SHARE, MAX_MARGIN_S)


def _flat_bytes(destination: npt.NDArray[Any], expected_bytes: int) -> Bytes:
    if not isinstance(destination, np.ndarray) or destination.dtype.hasobject:
        raise invalid(f"copy_into needs arrays of numbers, got {type(destination).__name__}")
    if not destination.flags.c_contiguous or not destination.flags.writeable:
        raise invalid("copy_into needs writable C-contiguous destinations")
    if destination.nbytes != expected_bytes:
        raise invalid(f"a destination has {destination.nbytes} bytes, its block {expected_bytes}")
    return destination.reshape(-1).view(np.uint8)


class JoinedGrant:
    """The grants of several leases that make up one lease, on consecutive pieces of a prefix in one layer group. It
    implements `Grant`.
    """

    def __init__(self, grants: Sequence[Grant]) -> None:
        self._grants = grants
        self.block_tokens = grants[0].block_tokens
        self.layer_count, self.layout = grants[0].layer_count, grants[0].layout
        self.name = "+".join(grant.name for grant in grants)

    def is_alive(self) -> bool:
        return all(grant.is_alive() for grant in self._grants)

    def renew(self) -> float | None:
        """Renew all grants, one after the other. Return the seconds until the first of them ends, or None if a grant
        has ended already.
        """
        shortest: float | None = None
        for grant in self._grants:
            expires_in_s = grant.renew()
            if expires_in_s is None:
                return None
            shortest = expires_in_s if shortest is None else min(shortest, expires_in_s)
        return shortest

    def release(self) -> None:
        for grant in self._grants:
            grant.release()

    def chain(self, tokens: TokenIds) -> Chain:
        return self._grants[0].chain(tokens)


def joined(parts: Sequence[Lease], clock: Callable[[], float]) -> Lease:
    """Return one lease on the blocks of all `parts`, which are leases on consecutive pieces of a prefix. Releasing it
    releases the parts, which must not be used any more. `clock` returns seconds.
    """
    if len(parts) == 1:
        return parts[0]
    held = [part for part in parts if len(part)]
    whole = Lease(
        [block for part in held for block in part.held_blocks],
        JoinedGrant([part.grant for part in held if part.grant is not None]) if held else None,
        reason=parts[-1].reason,
        promoted_bytes=sum(part.promoted_bytes for part in parts),
        resident_blocks=sum(part.resident_blocks for part in parts),
        estimated_load_s=sum(part.estimated_load_s for part in parts),
        clock=clock,
    )
    whole.valid_until = min((part.valid_until for part in held), default=0.0)
    return whole
