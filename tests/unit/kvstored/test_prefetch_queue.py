"""The queue of prefetch by prediction: what goes first, when, and within which budget."""

from __future__ import annotations

from kvstored.store.prefetch.queue import PrefetchCandidate, PrefetchQueue, UnmappedBlock

SLOW, FAST = 2, 1  # tiers
MIB = 1 << 20


def blocks(first: int, count: int, source: int = SLOW, load_s: float = 0.01) -> list[UnmappedBlock]:
    return [UnmappedBlock(token, MIB, source, load_s) for token in range(first, first + count)]


def chain(first: int, count: int, probability: float = 1.0, due_s: float = 0.0, **how: object) -> PrefetchCandidate:
    key = first.to_bytes(16, "big")
    return PrefetchCandidate(0, key, probability, due_s, due_s, due_s + 5, blocks(first, count, **how))  # type: ignore[arg-type]


def drained(queue: PrefetchQueue, now_s: float = 0.0) -> list[int]:
    """The tokens of what is handed out, when each has ended before the next."""
    found = []
    while (what := queue.next(now_s)) is not None:
        queue.started(*what)
        queue.ended(what[1].token)
        found.append(what[1].token)
    return found


def test_what_saves_the_most_waiting_for_a_byte_goes_first() -> None:
    queue = PrefetchQueue(0, 64 * MIB)
    queue.plan([chain(10, 2, 0.5), chain(20, 2, 0.9), chain(30, 2, 0.9, source=FAST, load_s=0.001)])
    assert drained(queue) == [20, 21, 10, 11, 30, 31]


def test_a_chain_waits_until_loading_it_would_end_just_before_it_is_due() -> None:
    queue = PrefetchQueue(0, 64 * MIB)
    queue.plan([chain(10, 100, due_s=60.0)])  # takes a second
    assert queue.next(50.0) is None
    assert queue.next(58.0) is not None


def test_what_is_late_already_goes_at_once() -> None:
    queue = PrefetchQueue(0, 64 * MIB)
    queue.plan([chain(10, 1, due_s=1.0)])
    assert drained(queue, 5.0) == [10]


def test_a_link_has_no_more_under_way_than_it_may() -> None:
    queue = PrefetchQueue(0, 2 * MIB)
    queue.plan([chain(10, 8), chain(20, 8, source=FAST)])
    begun = []
    while (what := queue.next(0.0)) is not None:
        queue.started(*what)
        begun.append(what[1])
    assert [block.source for block in begun].count(SLOW) == [block.source for block in begun].count(FAST) == 2
    queue.ended(begun[0].token)
    assert queue.next(0.0) is not None, "and goes on when one has ended"


def test_a_block_larger_than_what_may_be_under_way_goes_by_itself() -> None:
    queue = PrefetchQueue(0, MIB // 2)
    queue.plan([chain(10, 2)])
    queue.started(*queue.next(0.0))  # type: ignore[misc]
    assert queue.next(0.0) is None


def test_the_budget_is_kept_on_the_average() -> None:
    queue = PrefetchQueue(2 * MIB, 64 * MIB)
    queue.plan([chain(10, 100)])
    assert len(drained(queue, 0.0)) == 2
    assert len(drained(queue, 0.1)) == 1, "what is larger than what is left is paid for afterwards"
    assert drained(queue, 0.4) == []
    assert len(drained(queue, 10.0)) == 2, "a pause saves up for one second alone"


def test_what_the_next_plan_lacks_is_given_up() -> None:
    queue = PrefetchQueue(0, 64 * MIB)
    first, second = chain(10, 2), chain(20, 2)
    queue.plan([first, second])
    for _ in range(3):
        queue.started(*queue.next(0.0))  # type: ignore[misc]
    assert queue.plan([second]) == [10, 11], "of what is under way"
    assert drained(queue) == [21], "what is under way is not begun twice"


def test_a_dropped_chain_and_a_skipped_block_are_not_named_again() -> None:
    queue = PrefetchQueue(0, 64 * MIB)
    queue.plan([chain(10, 2), chain(20, 2)])
    queue.drop(0, (10).to_bytes(16, "big"))
    what = queue.next(0.0)
    assert what is not None and what[1].token == 20
    queue.skip(what[1])
    assert drained(queue) == [21] and len(queue) == 0


def test_what_is_given_up_is_named_once() -> None:
    """A request may have joined the same promotion: giving it up twice would take the request's share."""
    queue = PrefetchQueue(0, 64 * MIB)
    queue.plan([chain(10, 1)])
    what = queue.next(0.0)
    assert what is not None
    queue.started(*what)
    assert (queue.under_way, queue.under_way_of(0), queue.under_way_of(1)) == (1, 1, 0), "a tenant's own alone"
    assert [queue.plan([]), queue.plan([]), queue.plan([chain(10, 1)]), queue.plan([])] == [[10], [], [], []]
    queue.ended(10)
    assert queue.under_way == queue.under_way_of(0) == 0
