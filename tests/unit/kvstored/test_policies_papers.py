"""Each classical policy against its paper: pseudo-code written down as it stands there, and sequences worked by hand.

Chains of one block, so that leaf-first says nothing. The papers evict before they insert, the simulator after; hits and
evictions must be the same.
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from importlib import import_module

import pytest

from kvstore_simulator.policies import POLICIES, create
from kvstored.lifecycle import Cause
from tests.reference.blocks import Shelf, key
from tests.reference.examples import each_nth

Evictions = list[tuple[int, ...]]  # what each request made leave


@pytest.mark.parametrize("name", POLICIES)
def test_each_cites_its_paper_and_says_where_it_is_a_bad_choice(name: str) -> None:
    text = " ".join((import_module(POLICIES[name].partition(":")[0]).__doc__ or "").split())
    assert re.search(r"\b(19|20)\d\d\b", text), "a paper has its year"
    assert re.search("bad choice", text, re.IGNORECASE)


def ours(policy_name: str, requests: Iterable[int], capacity: int) -> Evictions:
    """Return what leaves, request by request: store and use the block, then evict down to the capacity."""
    shelf = Shelf(ghost_keys=0)
    policy = create(policy_name, shelf.residency, 0)
    block_of: dict[int, int] = {}
    found: Evictions = []
    for shelf.now_ns, block in enumerate(requests, 1):
        (row,) = shelf.chain(block)
        block_of[row] = block
        gone = []
        while len(policy) > capacity:
            victim = policy.next_victim(shelf.now_ns)
            gone.append(block_of[victim])
            shelf.residency.remove(victim, Cause.EVICTED, shelf.now_ns)
        found.append(tuple(gone))
    return found


def lru(requests: Iterable[int], capacity: int) -> Evictions:
    held: OrderedDict[int, None] = OrderedDict()
    found: Evictions = []
    for block in requests:
        gone: tuple[int, ...] = ()
        if block not in held and len(held) == capacity:
            gone = (held.popitem(last=False)[0],)
        held[block] = None
        held.move_to_end(block)
        found.append(gone)
    return found


def fifo(requests: Iterable[int], capacity: int) -> Evictions:
    held: deque[int] = deque()
    found: Evictions = []
    for block in requests:
        gone: tuple[int, ...] = ()
        if block not in held:
            if len(held) == capacity:
                gone = (held.popleft(),)
            held.append(block)
        found.append(gone)
    return found


def sieve(requests: Iterable[int], capacity: int) -> Evictions:
    """NSDI 2024, algorithm 1: the hand goes from the tail (oldest) to the head and stays where it evicted."""
    queue: list[int] = []  # the tail first
    visited: dict[int, bool] = {}
    hand: int | None = None
    found: Evictions = []
    for block in requests:
        gone: tuple[int, ...] = ()
        if block in visited:
            visited[block] = True
        else:
            if len(queue) == capacity:
                at = queue.index(hand) if hand is not None else 0
                while visited[queue[at]]:
                    visited[queue[at]] = False
                    at = (at + 1) % len(queue)
                hand = queue[at + 1] if at + 1 < len(queue) else None
                gone = (queue.pop(at),)
                del visited[gone[0]]
            queue.append(block)
            visited[block] = False
        found.append(gone)
    return found


def s3_fifo(requests: Iterable[int], capacity: int) -> Evictions:
    """SOSP 2023, algorithm 1, where one use passes the trial."""
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: deque[int] = deque()
    uses: dict[int, int] = {}
    found: Evictions = []

    def evict() -> int:
        """Passing the trial may fill the main queue: then one leaves there, and room is made."""
        while 10 * len(small) >= capacity or not main:
            block = small.popleft()
            if not uses[block]:
                ghost.append(block)
                return block
            uses[block] = 0
            main.append(block)
        while uses[main[0]]:
            uses[main[0]] -= 1
            main.rotate(-1)
        return main.popleft()

    for block in requests:
        gone: list[int] = []
        if block in uses:
            uses[block] = min(uses[block] + 1, 3)
        else:
            if len(uses) == capacity:
                gone = [evict()]
                del uses[gone[0]]
                while len(ghost) > capacity - capacity // 10:
                    ghost.popleft()
            if block in ghost:
                ghost.remove(block)
                main.append(block)
            else:
                small.append(block)
            uses[block] = 0
        found.append(tuple(gone))
    return found


def arc(requests: Iterable[int], c: int) -> Evictions:
    """FAST 2003, figure 4; the front of each list is its LRU end."""
    t1: OrderedDict[int, None] = OrderedDict()
    t2: OrderedDict[int, None] = OrderedDict()
    b1: OrderedDict[int, None] = OrderedDict()
    b2: OrderedDict[int, None] = OrderedDict()
    p = 0.0
    found: Evictions = []

    def replace(x: int) -> int:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            gone = t1.popitem(last=False)[0]
            b1[gone] = None
        else:
            gone = t2.popitem(last=False)[0]
            b2[gone] = None
        return gone

    for x in requests:
        gone: list[int] = []
        if x in t1 or x in t2:
            t1.pop(x, None)
            t2[x] = None
            t2.move_to_end(x)
        elif x in b1:
            p = min(p + max(1.0, len(b2) / len(b1)), c)
            gone.append(replace(x))
            del b1[x]
            t2[x] = None
        elif x in b2:
            p = max(p - max(1.0, len(b1) / len(b2)), 0.0)
            gone.append(replace(x))
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    gone.append(replace(x))
                else:
                    gone.append(t1.popitem(last=False)[0])
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == c:
                    gone.append(replace(x))
            t1[x] = None
        found.append(tuple(gone))
    return found


def lfu_da(requests: Iterable[int], capacity: int) -> Evictions:
    """K = uses + L, L the K of the last victim; of equals the longest unused goes. Who comes has its K before room is
    made, so by the victim before.
    """
    key: dict[int, tuple[int, int]] = {}
    uses: dict[int, int] = {}
    age = 0
    found: Evictions = []
    for now, block in enumerate(requests):
        uses[block] = uses.get(block, 0) + 1
        key[block] = (uses[block] + age, now)
        gone: tuple[int, ...] = ()
        if len(key) > capacity:
            gone = (min(key, key=lambda each: key[each]),)
            age = key.pop(gone[0])[0]
            del uses[gone[0]]
        found.append(gone)
    return found


def w_tinylfu(requests: Iterable[int], capacity: int) -> Evictions:
    """ACM TOS 2017 and Caffeine: a window of one block, the main part a segmented LRU, four fifths of it protected;
    what the window gives up stands against the oldest of the main part. Counts are exact here, up to 15. Who comes
    first to a full tier is let in unasked: ours cannot know that it is full.
    """
    is_known_to_be_full = False
    window: OrderedDict[int, None] = OrderedDict()
    trial: OrderedDict[int, None] = OrderedDict()
    kept: OrderedDict[int, None] = OrderedDict()
    seen: dict[int, int] = {}
    found: Evictions = []
    for block in requests:
        seen[block] = min(seen.get(block, 0) + 1, 15)
        gone: tuple[int, ...] = ()
        if block in window:
            window.move_to_end(block)
        elif block in trial or block in kept:
            trial.pop(block, None)
            kept[block] = None
            kept.move_to_end(block)
            while len(kept) > max(1, 0.8 * (len(trial) + len(kept))):
                trial[kept.popitem(last=False)[0]] = None
        else:
            window[block] = None
            if len(window) > 1:
                candidate = window.popitem(last=False)[0]
                if len(window) + len(trial) + len(kept) < capacity:
                    trial[candidate] = None
                else:
                    victim = next(iter(trial or kept))
                    if seen[candidate] > seen[victim] or not is_known_to_be_full:
                        (trial if trial else kept).popitem(last=False)
                        trial[candidate] = None
                        gone = (victim,)
                    else:
                        gone = (candidate,)
                    is_known_to_be_full = True
        found.append(gone)
    return found


PAPERS: dict[str, Callable[[Iterable[int], int], Evictions]] = {
    "lru": lru, "fifo": fifo, "sieve": sieve, "s3-fifo": s3_fifo, "arc": arc, "lfu": lfu_da, "lfu-ttl": lfu_da,
    "gdsf": lfu_da,  # blocks of one cost and size: greedy dual, size and frequency is LFU with ageing
    "w-tinylfu": w_tinylfu,
}  # fmt: skip


def zipf(seed: int, blocks: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return chance.choices(range(blocks), [1 / (rank + 1) for rank in range(blocks)], k=count)


def shifting(seed: int, count: int) -> list[int]:
    """Popular blocks that change, scans, and loops: what makes adaptive policies adapt."""
    chance = random.Random(seed)
    made: list[int] = []
    while len(made) < count:
        base = chance.randrange(60)
        shape = chance.randrange(3)
        if shape == 0:
            made += [base + min(int(chance.expovariate(0.3)), 30) for _ in range(chance.randrange(5, 60))]
        elif shape == 1:
            made += range(1000 + len(made), 1000 + len(made) + chance.randrange(3, 25))
        else:
            made += list(range(base, base + chance.randrange(4, 16))) * 3
    return made[:count]


@pytest.mark.parametrize("capacity", [3, 10, 20, 33])
@pytest.mark.parametrize("seed", each_nth(range(4), 4))
@pytest.mark.parametrize("name", sorted(PAPERS))
def test_it_evicts_what_the_paper_evicts(name: str, seed: int, capacity: int) -> None:
    for requests in (zipf(seed, 80, 600), shifting(seed, 600)):
        evicted, wanted = ours(name, requests, capacity), PAPERS[name](requests, capacity)
        first = next((at for at, pair in enumerate(zip(evicted, wanted, strict=True)) if pair[0] != pair[1]), None)
        assert first is None, f"request {first}, block {requests[first]}: {evicted[first]} for {wanted[first]}"


def leaving(policy_name: str, requests: Iterable[int], capacity: int) -> list[int]:
    return [block for gone in ours(policy_name, requests, capacity) for block in gone]


def test_sieve_by_hand() -> None:
    """1 and 3 are used; 4 comes: the hand spares 1, takes 2. 5 comes: it spares 3, takes 4, the only one ahead that
    came since. 6 comes: it has gone round and takes 1, whose use is spent.
    """
    assert leaving("sieve", [1, 2, 3, 1, 3, 4, 5, 6], 3) == [2, 4, 1]


def test_s3_fifo_by_hand() -> None:
    """The tier has room for ten: one block fills the small queue. 1 passes its trial; 2, 3 and 4 fail theirs. 2
    returns, is remembered and goes to the main queue: what fails next is 5, and so on, never 1 or 2.
    """
    assert leaving("s3-fifo", [*range(1, 11), 1, 11, 12, 13, 2, 14, 15], 10) == [2, 3, 4, 5, 6, 7]


def test_arc_by_hand() -> None:
    """1 and 2 are used twice (T2), 3 is in T1, with a target of 0: 4 drives out 3, 5 drives out 4. 4 returns: the
    target is 1, T1 (5) is within it, so the older of T2 goes: 1. 1 returns: the target is 0 again, and 5 goes.
    """
    assert leaving("arc", [1, 2, 1, 2, 3, 4, 5, 4, 1], 3) == [3, 4, 1, 5]


def test_lfu_with_ageing_by_hand() -> None:
    """1 has been used three times: K is 3. 2 and 3 have K = 1, 4 and 5 the age of a victim more, 2; 6 and 7 have 3, and
    of equal K the longest unused goes, which is 1 by then.
    """
    assert leaving("lfu", [1, 1, 1, 2, 3, 4, 5, 6, 7], 2) == [2, 3, 4, 5, 1]


def test_w_tinylfu_by_hand() -> None:
    """The tier has room for three: the window is one block. 1 and 2 are in the main part, used twice; 3 in the window.
    The first victim, for 4, only shows that the tier is full. Then the blocks that leave the window, seen once, lose:
    4, 5.
    """
    assert leaving("w-tinylfu", [1, 2, 1, 2, 3, 4, 5, 6], 3)[1:] == [4, 5]


def test_gdsf_weighs_uses_by_what_a_block_costs() -> None:
    """A block 64 places down its chain costs twice what a first one does: used once, it is worth a first one used twice
    and goes before one used three times. Each victim raises the age, from which blocks that are used now start.
    """
    shelf = Shelf()
    policy = create("gdsf", shelf.residency, 0)
    deep = shelf.chain(*range(65))[-1]
    for block, uses in ((100, 3), (101, 1), (102, 2)):
        for _ in range(uses):
            shelf.chain(block)
    rows = {block: shelf.residency.find(0, key(block)) for block in (100, 101, 102)}

    def evict() -> int:
        row = policy.next_victim(1)
        shelf.residency.remove(row, Cause.EVICTED, 1)
        return row

    assert evict() == rows[101], "K = 1 * 64"
    assert evict() == deep, "K = 1 * 128, and unused for longer than the one of 2 * 64"
    shelf.chain(103)  # K = 127 + 64: the block above the deep one cost 127, and goes with K = 127 before
    order = [evict() for _ in range(66)]
    assert order.index(rows[102]) < order.index(rows[100])
