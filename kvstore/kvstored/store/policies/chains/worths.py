"""The worths of many chains' last blocks at once, and the choice of the least.

Compiled code of the predictor (`hazards.cpp`) does the work once it is there, in a tenth of the time; else NumPy does,
with the same bits. Exponentials and powers, which no two libraries round alike, are always NumPy's. The module changes
`base` and `entry` of the chains that it looks at, and nothing else.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvstore_cuda.host_copies import address_of
from kvstore_predictor import estimates
from kvstore_predictor.ages import EDGES_S, SHARE_A_S, Floats, Ints, leaning
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies.chains.book import ChainBook
from kvstored.store.policies.chains.table import TAU_S, ChainTable

TWICE_DEPTH = (
    3000.0  # a block so far down its prompt counts twice: attention makes it more expensive; more weight costs hits
)
LEFTOVER = 1e-9  # what is left of a chain that another one has continued
END_OF_DISTANCE = (0, 1, 2, 2, 3)
_ENDS = np.array((END_OF_DISTANCE[0], *END_OF_DISTANCE))  # by a distance that is one more
_EDGES_AT, _SHARES_AT = address_of(EDGES_S), address_of(SHARE_A_S)
_ANY = -1  # tenant
_ALL = float("inf")


def worths(book: ChainBook, tenant: int, begin: int, end: int, now_s: float) -> tuple[Ints, Floats]:
    """Return the chains of `tenant` with numbers from `begin` up to `end` (excluded) whose last block may be evicted,
    and the expected uses a second of these blocks. The chains' ranks in `base` are up to date afterwards, and their
    `entry` is 0.
    """
    library = estimates.native.get()
    if library is None:
        return _worths(book, tenant, begin, end, now_s)
    chains, depths, shared, room = book.chains, book.residency.rows.depth, book.touches, end - begin
    if not room:
        return np.empty(0, np.int64), np.empty(0)
    numbers, found = np.empty((2, room + 1), np.int64), np.empty((4, room))
    numbers_at, found_at, settings = address_of(numbers), address_of(found), array("d", book.end_reuse)
    given = (
        begin, end, tenant if len(book.ghosts) > 1 else _ANY, now_s, *chains.read_at, depths.buffer_info()[0],
        depths.itemsize, shared.count.buffer_info()[0], shared.as_of_s.buffer_info()[0], book.tables.ranks_at,
        _EDGES_AT, _SHARES_AT, LEFTOVER, TWICE_DEPTH, settings.buffer_info()[0],
    )  # fmt: skip
    changed = (*chains.written_at, numbers_at, numbers_at + 8 * (room + 1), found_at, room)
    count = library.kv_worths(*given, 0, *changed)
    if count > 0 and (lean := book.tables.lean):
        factors = leaning(found[1, :count], lean)
        library.kv_worths(*given, address_of(factors), *changed)
    if count < 0:
        return _worths(book, tenant, begin, end, now_s)
    slots, worth = numbers[0, :count], found[0, :count]
    if touches := int(numbers[1, room]):
        worth[numbers[1, :touches]] += _by_touches(book, *found[2:, :touches])
    return slots, worth


def _by_touches(book: ChainBook, touches: Floats, ages_s: Floats) -> Floats:
    """Return what `touches` (decayed counts of uses by others, as of `ages_s` seconds before now) are worth."""
    found: Floats = touches * np.exp(-ages_s / TAU_S) / book.touches.span_s
    return found


def _worths(book: ChainBook, tenant: int, begin: int, end: int, now_s: float) -> tuple[Ints, Floats]:
    chains = book.chains
    eligible = chains.ints(chains.tail)[begin:end] >= 0
    if chains.blocked.find(1, begin, end) >= 0:
        eligible &= ~chains.flags(chains.blocked)[begin:end]
    if len(book.ghosts) > 1:
        eligible &= chains.ints(chains.tenant)[begin:end] == tenant
    slots = eligible.nonzero()[0] + begin
    chains.longs(chains.entry)[slots] = 0
    worth = book.standings(slots, now_s)
    is_live = chains.flags(chains.live)[slots]
    if not is_live.all():
        worth[~is_live] = LEFTOVER
    chains.floats(chains.base)[slots] = worth
    rows = chains.ints(chains.tail)[slots]
    depth = as_array(book.residency.rows.depth)[rows].astype(np.int32)
    due_s = chains.floats(chains.due_s)[slots]
    if due_s.any():
        for at in due_s.nonzero()[0].tolist():  # few
            worth[at] = chains.worth(int(slots[at]), int(depth[at]), float(worth[at]), now_s)
    distance = chains.ints(chains.length)[slots]
    distance -= depth
    # Distances begin at 1, at the end of a chain; one further down than its chain is long is at the end too.
    worth *= np.array(book.end_reuse)[_ENDS].take(distance, mode="clip")
    share = depth / TWICE_DEPTH
    share += 1.0
    worth *= share
    touched = np.frombuffer(book.shared, np.float64)[rows].nonzero()[0]
    if len(touched):
        since_s = np.frombuffer(book.shared_s, np.float64)[rows[touched]]
        worth[touched] += _by_touches(book, np.frombuffer(book.shared, np.float64)[rows[touched]], now_s - since_s)
    return slots, worth


def least(chains: ChainTable, slots: Ints, worth: Floats, wanted: int, first: int) -> tuple[Ints, Floats, Ints, float]:
    """Return the `wanted` chains among `slots` whose `worth` is least, their worths, the orders of their last uses, and
    the largest of the worths (infinite if all chains are returned). Chains with as much worth as the last of these are
    returned too, but of more than twice as many only `wanted`, used longest ago. The chains get the `entry` numbers
    from `first` on.
    """
    library, count = estimates.native.get(), len(slots)
    if library is not None:
        chosen, ceiling = np.empty(count, np.int64), array("d", (_ALL,))
        count = library.kv_least(
            count, wanted, first, chains.order.buffer_info()[0], address_of(slots), address_of(worth),
            chains.entry.buffer_info()[0], address_of(chosen), ceiling.buffer_info()[0],
        )  # fmt: skip
        return slots[:count], worth[:count], chosen[:count], ceiling[0]
    most, orders = _ALL, chains.longs(chains.order)
    if count > wanted:
        most = float(np.partition(worth, wanted)[wanted])
        part = (worth <= most).nonzero()[0]
        if len(part) > 2 * wanted:
            used = orders[slots[part]]
            part = part[used <= np.partition(used, wanted - 1)[wanted - 1]][:wanted]
        slots, worth = slots[part], worth[part]
    chains.longs(chains.entry)[slots] = np.arange(first, first + len(slots))
    return slots, worth, orders[slots], most
