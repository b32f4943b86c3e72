"""The sessions that session-return follows, against a plain list of them."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_predictor.sessions import AwaitedReturns
from tests.reference.examples import examples

SLOTS = 6
PROMPT = 3  # blocks that all sessions of a tenant share


def keys(session: int, blocks: list[int]) -> list[bytes]:
    return [b"prompt" + bytes([at] * 10) for at in range(PROMPT)] + [
        bytes([session, at]) + number.to_bytes(14, "big") for at, number in enumerate(blocks)
    ]


def check_deletion(sessions: AwaitedReturns) -> None:
    """No chain is left under the name of a block that was deleted, be it its last or the one before."""
    names = [
        (sessions.tenant[slot], key)
        for slot in range(SLOTS)
        for key in (sessions.last[slot], sessions.above[slot])
        if key is not None
    ]
    for tenant, key in names:
        after = deepcopy(sessions)
        after.forget(tenant, [key])
        left = [(after.tenant[slot], each[slot]) for slot in range(SLOTS) for each in (after.last, after.above)]
        assert (tenant, key) not in left
        assert sum(after.live) == sum(sessions.live) - 1


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans(), st.integers(0, 3), st.booleans()), max_size=40
    )
)
def test_a_request_continues_the_last_of_its_session(steps: list[tuple[int, int, bool, int, bool]]) -> None:
    sessions, fresh = AwaitedReturns(SLOTS), iter(range(1 << 30))
    known: dict[tuple[int, int], list[int]] = {}  # by tenant and session: its blocks; the last used come last
    taken: dict[tuple[int, int], int] = {}
    for number, (tenant, session, replaces_last, more, forgets) in enumerate(steps):
        name = (tenant, session)
        if forgets and name in known:
            sessions.forget(tenant, [keys(session, known[name])[-1]])
            del known[name], taken[name]
        for other in [each for each, at in taken.items() if number - at > SLOTS]:
            del known[other], taken[other]  # the ring has come round
        before = known.pop(name, None)
        blocks = list(before or [next(fresh), next(fresh)])
        if before is not None and replaces_last:
            blocks[-1] = next(fresh)
        blocks += [next(fresh) for _ in range(more)]
        wanted = keys(session, blocks)
        slot, reach = sessions.find(tenant, wanted)
        if before is None:
            assert (slot, reach) == (-1, 0)
            fan = 0
        else:
            assert sessions.last[slot] == keys(session, before)[-1]
            assert reach == PROMPT + len(before) - replaces_last
            fan = 0  # a partial block, not a shared one
            sessions.drop(slot)
        taken.pop(name, None)
        slot = sessions.take(tenant, wanted, fan)
        sessions.length[slot] = len(wanted)
        known[name], taken[name] = blocks, number
        assert sum(sessions.live) <= SLOTS
        check_deletion(sessions)
        assert len(list(sessions.marks())) <= 2 * SLOTS + 8
