"""Runs of chunks in a job, and the chunks' names in the store.

A job names chunks by vLLM's keys, in no particular order: a hash of all tokens up to the chunk's end, and four bytes
for the KV cache group. Pure. Invariants: a run is of one group; its chunks follow one another, so that the store may
keep the first ones longest; chunks of recurrent states form runs of one, because each can be restored without another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore_client.session import Session
from kvstore_connectors.page_keys import PageKeys
from kvstore_connectors.vllm_tier.engine import MIN_HASH_BYTES, GroupKind
from kvstore_proto.identity import BlockKeys

_GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks (blocks of vLLM's CPU tier) in one KV cache group. `keys` are vLLM's keys of the chunks, and
    `rows` their row numbers in the CPU tier. The chunks follow the chunk `before`; if that is None, they begin a chain.
    `adapter` is the digest of the adapter with which they were computed.
    """

    group: int
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    before: bytes | None = None
    adapter: str = ""

    def __len__(self) -> int:
        return len(self.keys)

    def parts(self, most: int) -> list[ChunkRun]:
        """Split this run into runs of at most `most` chunks, each behind the run before it, and return them."""
        return [
            replace(
                self,
                keys=self.keys[at : at + most],
                rows=self.rows[at : at + most],
                before=self.keys[at - 1] if at else self.before,
            )
            for at in range(0, len(self), most)
        ]


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def is_named_well(key: bytes) -> bool:
    """Return whether the hash in vLLM's `key` is long enough that it alone identifies a chunk."""
    return len(key) - _GROUP_BYTES >= MIN_HASH_BYTES


def names(session: Session, keys: Sequence[bytes], group: int, adapter: str) -> BlockKeys | None:
    """Return the store's keys of the chunks with vLLM's `keys`, in the KV cache group `group`, computed with the
    adapter `adapter`. Return None while there is no daemon, because the keys depend on a secret that the daemon hands
    out.
    """
    secret = session.keys([0] * session.block_tokens, group=group)
    return None if secret is None else PageKeys(secret[0]).of([key.hex() for key in keys], f"vllm tier/{adapter}")


def by_group(keys: Sequence[bytes]) -> dict[int, list[int]]:
    """Return for each KV cache group the positions in `keys` at which the keys of its chunks are."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[group_of(key)].append(place)
    return places


def runs_to_load(keys: Sequence[bytes], rows: Sequence[int], adapter: str) -> list[ChunkRun]:
    """Return one run of chunks for each KV cache group. The chunk `keys[i]` is to be loaded into row `rows[i]` of the
    CPU tier. The order of `keys` is kept, because vLLM names the chunks first that it needs first.
    """
    return [
        ChunkRun(group, tuple(keys[at] for at in places), tuple(rows[at] for at in places), adapter=adapter)
        for group, places in by_group(keys).items()
    ]


def runs_to_store(
    keys: Sequence[bytes],
    rows: Sequence[int],
    positions: Mapping[bytes, int],
    kinds: Mapping[int, GroupKind],
    adapter: str,
) -> list[ChunkRun]:
    """Return the runs of consecutive chunks to store. The chunk `keys[i]` is in row `rows[i]` of the CPU tier.
    `positions` has the position, in tokens, at which each chunk of the request ends, as far as it is known. `kinds` has
    the kind of state of each KV cache group, and `adapter` is the digest of the adapter of the request.
    """
    runs = []
    row_of = dict(zip(keys, rows, strict=True))
    for group, places in by_group(keys).items():
        kind = kinds.get(group, "unknown")
        wanted = {keys[at] for at in places}
        chain = chain_of(positions, group)
        alone = [key for key in sorted(wanted) if key not in positions]
        for first, last in _stretches(chain, wanted):
            members = chain[first:last]
            if kind == "recurrent":
                alone += members
            else:
                before = chain[first - 1] if kind == "full" and first else None
                runs.append(ChunkRun(group, tuple(members), tuple(row_of[key] for key in members), before, adapter))
        runs += [ChunkRun(group, (key,), (row_of[key],), adapter=adapter) for key in alone]
    return runs


def chain_of(positions: Mapping[bytes, int], group: int) -> list[bytes]:
    """Return the keys in `positions` (the chunks of a request, with the token at which each ends) that belong to the KV
    cache group `group`, in the order of the request's tokens.
    """
    return sorted((key for key in positions if group_of(key) == group), key=positions.__getitem__)


def _stretches(chain: Sequence[bytes], wanted: set[bytes]) -> list[tuple[int, int]]:
    """Return the begin and end, in the chain, of each stretch of consecutive wanted chunks."""
    found: list[tuple[int, int]] = []
    for at, key in enumerate(chain):
        if key in wanted:
            if found and found[-1][1] == at:
                found[-1] = (found[-1][0], at + 1)
            else:
                found.append((at, at + 1))
    return found
