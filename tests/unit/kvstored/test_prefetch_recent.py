"""The requests of the last minutes are remembered, deleted blocks are not."""

from __future__ import annotations

import gc

from kvstored.clock import NS_PER_S
from kvstored.store.prefetch.recent import TIDIED, RecentRequests

NS = NS_PER_S


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def named(recent: RecentRequests) -> set[bytes]:
    """Every key that can be reached from it."""
    found, left = set[bytes](), [recent.__dict__]
    seen = set[int]()
    while left:
        each = left.pop()
        kind = type(each)  # isinstance asks what a weak proxy refers to, which may be gone
        if id(each) in seen or issubclass(kind, type):
            continue
        seen.add(id(each))
        if kind is bytes and len(each) == 16:
            found.add(each)
        left += gc.get_referents(each)
    return found


def tidy(recent: RecentRequests, entries: int) -> None:
    for _ in range(2 + 3 * (1 + entries // TIDIED)):
        recent.tidy()


def test_a_get_twice_within_a_second_is_one_request() -> None:
    recent = RecentRequests()
    assert recent.got(0, 1, chain(0, 4), 2, 0)
    assert not recent.got(0, 1, chain(0, 4), 4, NS // 2)
    assert recent.got(0, 2, chain(0, 4), 4, NS // 2), "another session's"
    assert not recent.put(0, chain(2, 4), key(1), NS)
    assert recent.end_of(0, chain(0, 6)) == key(3)
    assert recent.names(0, key(3))[0] == key(5), "its answer was stored too"


def test_what_was_deleted_is_named_no_more() -> None:
    recent = RecentRequests()
    recent.got(0, 1, chain(0, 40), 20, 0)
    recent.got(0, 1, chain(100, 40), 20, 0)
    recent.forget(0, chain(20, 20))
    assert recent.end_of(0, chain(0, 40)) == key(39), "the chain's own, as of one that no request was of"
    tidy(recent, 100)
    assert not named(recent) & set(chain(20, 20))
    assert recent.end_of(0, chain(100, 40)) == key(139) and len(recent.names(0, key(139))) > 1


def test_a_ladder_loses_the_rungs_that_were_deleted() -> None:
    recent = RecentRequests()
    recent.got(0, 1, chain(0, 40), 20, 0)
    assert key(23) in recent.names(0, key(39))
    recent.forget(0, [key(23)])
    tidy(recent, 100)
    assert key(23) not in named(recent) and key(31) in recent.names(0, key(39))


def test_a_block_that_is_requested_again_is_remembered_again() -> None:
    recent = RecentRequests()
    recent.got(0, 1, chain(0, 4), 4, 0)
    recent.forget(0, chain(0, 4))
    assert recent.got(0, 1, chain(0, 4), 0, 2 * NS)
    tidy(recent, 100)
    assert recent.end_of(0, chain(0, 4)) == key(3) and key(3) in named(recent)


def test_tidying_takes_slices() -> None:
    recent = RecentRequests()
    for number in range(2 * TIDIED):
        recent.got(0, 1, [key(1), key(1000 + number)], 1, 0)
    recent.forget(0, [key(1)])
    recent.tidy()
    assert key(1) in named(recent), "not all at once"
    tidy(recent, 6 * TIDIED)
    assert key(1) not in named(recent)


def test_nothing_is_left_of_a_tenant() -> None:
    recent = RecentRequests()
    recent.got(0, 1, chain(0, 4), 4, 0)
    recent.forget(0, None)
    assert not named(recent)
