"""Negative answers against a plain model: a list of what was said, searched from its end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.clock import NS_PER_S
from kvstored.store.remote import FIRST_ABSENT_S, LAST_ABSENT_S, Absences
from tests.reference.examples import examples

TENANTS, KEYS = st.integers(0, 1), st.sampled_from([bytes([number]) * 16 for number in range(4)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), TENANTS, KEYS),
        st.tuples(st.just("forget"), TENANTS, st.lists(KEYS, max_size=3)),
        st.tuples(st.just("forget"), TENANTS, st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 7.0, 40.0]), st.none()),
    ),
    max_size=60,
)


class Model:
    def __init__(self, most: int) -> None:
        self.most = most
        self.said: list[tuple[int, bytes, int, float]] = []  # oldest first: tenant, key, until, seconds

    def find(self, tenant: int, key: bytes) -> tuple[int, float] | None:
        return next(((until, lasts) for owner, each, until, lasts in self.said if (owner, each) == (tenant, key)), None)

    def note(self, tenant: int, key: bytes, now_ns: int) -> None:
        before = self.find(tenant, key)
        lasts = FIRST_ABSENT_S if before is None else min(LAST_ABSENT_S, before[1] * 2)
        self.forget(tenant, [key])
        self.said.append((tenant, key, now_ns + round(lasts * NS_PER_S), lasts))
        self.said = self.said[-self.most :]

    def forget(self, tenant: int, keys: list[bytes] | None) -> None:
        self.said = [each for each in self.said if each[0] != tenant or (keys is not None and each[1] not in keys)]


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 6))
def test_answers_are_as_a_plain_list_says(steps: list[tuple[str, float, object]], most: int) -> None:
    absences, model, now_ns = Absences(most), Model(most), 0
    for what, which, argument in steps:
        if what == "wait":
            now_ns += round(which * NS_PER_S)
        elif what == "note":
            absences.note(int(which), argument, now_ns)  # type: ignore[arg-type]
            model.note(int(which), argument, now_ns)  # type: ignore[arg-type]
        else:
            absences.forget(int(which), argument)  # type: ignore[arg-type]
            model.forget(int(which), argument)  # type: ignore[arg-type]
        assert len(absences._known) == len(model.said) <= most
        for tenant in (0, 1):
            for number in range(4):
                key = bytes([number]) * 16
                known = model.find(tenant, key)
                assert absences.covers(tenant, key, now_ns) == (known is not None and now_ns < known[0])
