"""The prefetch queue under random plans: within its budgets, of the tenant named, and nothing that is pointless."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstored.store.prefetch.queue import BURST_S, PrefetchCandidate, PrefetchQueue, UnmappedBlock

RATE, AHEAD, LARGEST = 1000, 3000, 900


@st.composite
def candidates(draw: st.DrawFn) -> list[PrefetchCandidate]:
    """Return the candidates of a few tenants, over few tokens, so that chains share blocks; a tenant's tokens are its
    own.
    """
    found = []
    for number in range(draw(st.integers(0, 4))):
        tenant = draw(st.integers(0, 2))
        tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
        made = [UnmappedBlock(100 * tenant + token, 100 + 80 * token, 1 + token % 2, 0.01) for token in tokens]
        due_s, probability = draw(st.floats(0, 20)), draw(st.floats(0.1, 1))
        found.append(PrefetchCandidate(tenant, bytes([tenant, number]), probability, due_s, due_s, due_s + 5, made))
    return found


Step = tuple[str, list[PrefetchCandidate], float, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(("plan", "start", "start", "end")), candidates(), st.floats(0, 2), st.integers(0, 9)),
    max_size=40,
)


@given(STEPS)
def test_the_queue_keeps_its_word(steps: list[Step]) -> None:
    queue = PrefetchQueue(RATE, AHEAD)
    now_s, wanted = 0.0, dict[tuple[int, bytes], PrefetchCandidate]()
    under_way: dict[int, tuple[UnmappedBlock, tuple[int, bytes]]] = {}
    named = set[int]()  # as given up, once each
    spent = {1: 0, 2: 0}
    for what, planned, later_s, which in steps:
        now_s += later_s
        if what == "plan":
            wanted = {(each.tenant, each.key): each for each in planned}
            given_up = queue.plan(wanted.values())
            unwanted = {token for token, (_, of) in under_way.items() if of not in wanted}
            assert sorted(given_up) == sorted(unwanted - named)
            named |= unwanted
        elif what == "start" and (found := queue.next(now_s)) is not None:
            candidate, block = found
            assert wanted[candidate.tenant, candidate.key] is candidate and block in candidate.blocks
            assert block.token // 100 == candidate.tenant, "never a block of another tenant"
            if block.token in under_way:  # two chains share it
                queue.skip(block)
                continue
            queue.started(candidate, block)
            under_way[block.token] = (block, (candidate.tenant, candidate.key))
            spent[block.source] += block.nbytes
            ahead = sum(each.nbytes for each, _ in under_way.values() if each.source == block.source)
            assert ahead <= max(AHEAD, block.nbytes)
            assert spent[block.source] <= RATE * (BURST_S + now_s) + LARGEST, "a debt of one block at most"
        elif what == "end" and under_way:
            token = sorted(under_way)[which % len(under_way)]
            del under_way[token]
            named.discard(token)
            queue.ended(token)
        assert queue.under_way == len(under_way)
