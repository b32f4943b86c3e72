"""Work is refused when too much is under way: prefetch first, then puts, and gets for their own tenant's work alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstored.clients.pressure import Pressure, Work
from kvstored.telemetry import Counters
from kvstored.telemetry.flows import TenantFlow

REQUESTS, OWN_BYTES, ALL_BYTES = 8, 1000, 1600
ONE, OTHER = (SimpleNamespace(caller_id=number, tenant_id=99) for number in (1, 2))  # of whatever pool


def pressure() -> Any:
    limits = SimpleNamespace(requests_per_tenant=REQUESTS, moving_per_tenant_bytes=OWN_BYTES, moving_bytes=ALL_BYTES)
    store: Any = SimpleNamespace(
        config=SimpleNamespace(limits=limits), residency=None, retention=None, counters=Counters(),
        flows=SimpleNamespace(tenants=defaultdict(TenantFlow)),
    )  # fmt: skip
    made = Pressure(store)
    return SimpleNamespace(begin=made.begin, end=made.end, check=made.check, store=store, made=made)


def is_taken(scene: Any, session: Any, work: Work, nbytes: int = 0) -> bool:
    try:
        scene.check(session, work, nbytes)
    except KVStoreError as error:
        assert error.kind is ErrorKind.THROTTLED and error.retry_after_ms > 0 and "limits." in error.message
        return False
    return True


def test_requests_shed_prefetch_first_then_puts_then_their_own_gets() -> None:
    scene = pressure()
    taken = []
    for _ in range(REQUESTS):
        taken.append([is_taken(scene, ONE, work) for work in Work])
        scene.begin(ONE, Work.GET, 0)
    taken.append([is_taken(scene, ONE, work) for work in Work])
    assert [sum(column) for column in zip(*taken, strict=True)] == [REQUESTS // 2, REQUESTS * 3 // 4, REQUESTS]
    assert all(is_taken(scene, OTHER, work) for work in Work)
    counters = scene.store.counters
    assert (counters["shed_prefetches"], counters["shed_puts"], counters["throttled_requests"]) == (5, 3, 1)
    assert scene.store.flows.tenants[1].refused_requests == 9 and scene.store.flows.tenants[2].refused_requests == 0


def test_bytes_of_all_tenants_shed_the_puts_of_who_has_most() -> None:
    scene = pressure()
    scene.begin(ONE, Work.GET, 900)
    scene.begin(OTHER, Work.PUT, 100)
    assert not is_taken(scene, ONE, Work.PUT, 300), "over three quarters of its own bytes"
    scene.begin(OTHER, Work.PUT, 100)
    assert is_taken(scene, OTHER, Work.PUT, 200), "within its equal part, although all together have too much"
    assert not is_taken(scene, OTHER, Work.PUT, 500)
    assert is_taken(scene, OTHER, Work.GET, 800), "a get is refused for its own tenant's work alone"
    assert not is_taken(scene, OTHER, Work.GET, 801)


def test_one_request_that_is_larger_than_the_bound_is_taken_alone() -> None:
    scene = pressure()
    assert is_taken(scene, ONE, Work.PUT, OWN_BYTES * 2)


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.sampled_from(list(Work)), st.integers(0, 700))))
def test_what_ends_counts_no_more(steps: list[tuple[Any, Work, int]]) -> None:
    scene = pressure()
    begun = []
    for session, work, nbytes in steps:
        try:
            scene.begin(session, work, nbytes)
        except KVStoreError:
            continue
        begun.append((session, nbytes))
    for session in (ONE, OTHER):
        assert sum(1 for each, _ in begun if each is session) <= REQUESTS
        assert sum(nbytes for each, nbytes in begun if each is session) <= OWN_BYTES
    for session, nbytes in begun:
        scene.end(session, nbytes)
    assert not scene.made._loads and scene.made._moving_bytes == 0


def test_work_that_raises_counts_no_more() -> None:
    scene = pressure()
    with pytest.raises(ZeroDivisionError), scene.made.count(ONE, Work.PUT, 10):
        _ = 1 // 0
    assert not scene.made._loads
