"""The lookup index against plain dictionaries: overflow, torn reads, and everything that residency can do."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from kvstore_client.lookup_index import usable_blocks
from kvstore_proto.lookup_index import ABSENT, BUCKET_BYTES, HEADER_BYTES, SLOTS_A_BUCKET, UNKNOWN
from kvstore_proto.matching import restorable_blocks
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.property.test_residency_model import BLOCKS, TIERS, ResidencyAgainstModel
from tests.reference.blocks import key
from tests.reference.examples import examples
from tests.reference.index_memory import image_of, index_over, key_of, reader_of, run_of, table_of

HOST, NVME = pb.TIER_CODE_HOST, pb.TIER_CODE_NVME
KEYS = 16
ALL = run_of(*range(KEYS))
change = st.tuples(st.integers(0, KEYS - 1), st.sampled_from([ABSENT, HOST, NVME, NVME]))
changes = st.lists(change, max_size=120) | st.lists(change, min_size=30, max_size=60)


@settings(max_examples=examples(150), deadline=None)
@given(buckets=st.sampled_from([1, 2, 8]), seed=st.integers(0, 2**64 - 1), steps=changes)
def test_answers_are_true_and_a_stored_key_is_never_called_absent(
    buckets: int, seed: int, steps: list[tuple[int, int]]
) -> None:
    table = table_of(buckets, seed)
    reader = reader_of(table)
    model: dict[int, int] = {}
    for number, code in steps:
        if code:
            table.put([key_of(number)], code)
            model[number] = code
        else:
            table.remove([key_of(number)])
            model.pop(number, None)
        answers = reader.codes(ALL)
        assert all(answers[n] in (model.get(n, ABSENT), UNKNOWN) for n in range(KEYS))
        slots = buckets * SLOTS_A_BUCKET
        assert table.keys == sum(code not in (ABSENT, UNKNOWN) for code in answers) <= min(len(model), slots)
        if buckets == 1:  # then a bucket is full before any key is turned away, and refilled when a slot is free
            assert table.keys == min(len(model), slots)
            assert (UNKNOWN in answers) is (len(model) > slots)
    for number in list(model):
        table.remove([key_of(number)])
    assert set(reader.codes(ALL)) == {ABSENT}
    table.close()


@settings(max_examples=examples(150), deadline=None)
@given(before=changes, after=changes, new_words=st.sets(st.integers(0, BUCKET_BYTES // 8 - 1)))
def test_a_torn_read_is_unknown_or_one_of_the_two_states(
    before: list[tuple[int, int]], after: list[tuple[int, int]], new_words: set[int]
) -> None:
    """The reader finds some 8-byte words of the bucket as they were, and some as they will be, in any mixture."""
    table = table_of()
    whole = []
    for steps in (before, after):
        for number, code in steps:
            if code:
                table.put([key_of(number)], code)
            else:
                table.remove([key_of(number)])
        whole.append((image_of(table), reader_of(table).codes(ALL)))
    (torn, old), (image, new) = whole
    for word in new_words:
        place = slice(HEADER_BYTES + 8 * word, HEADER_BYTES + 8 * word + 8)
        torn[place] = image[place]
    answers = index_over(torn, table).codes(ALL)
    assert answers in (old, new, [UNKNOWN] * KEYS)
    table.close()


class IndexFollowsResidency(ResidencyAgainstModel):
    """Two tenants' tables of one bucket each, so that they overflow; residency notifies them of every change."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [table_of(), table_of()]
        self.readers = [reader_of(table) for table in self.tables]
        self.residency.observe(self)

    def changed(self, tenant: int, rows: Sequence[int]) -> None:
        for row in rows:
            block_key, mask = self.residency.key(row), self.residency.rows.mask[row]
            if mask:
                self.tables[tenant].put([block_key], HOST if mask & 1 else NVME)
            else:
                self.tables[tenant].remove([block_key])

    @invariant()
    def the_index_says_what_residency_says(self) -> None:
        for tenant, (table, reader) in enumerate(zip(self.tables, self.readers, strict=True)):
            readable = 0
            for number in range(BLOCKS):
                row = self.residency.find(tenant, key(number))
                mask = 0 if row < 0 else self.residency.tier_mask(row)
                readable += row >= 0
                expected = (ABSENT, HOST, NVME, HOST)[mask]
                code = _code_of(reader, key(number))
                assert code in (expected, UNKNOWN)
                assert code != UNKNOWN or self.residency.tenant_blocks(tenant) > SLOTS_A_BUCKET
            assert table.keys == min(readable, SLOTS_A_BUCKET)


def _code_of(reader: object, block_key: bytes) -> int:
    from kvstore_client.lookup_index import LookupIndex
    from kvstore_proto.identity import BlockKeys

    assert isinstance(reader, LookupIndex)
    return reader.codes(BlockKeys(block_key))[0]


assert TIERS == ("host", "nvme")
IndexFollowsResidency.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestIndexFollowsResidency = IndexFollowsResidency.TestCase


@given(
    present=st.lists(st.booleans(), max_size=12),
    kind=st.sampled_from([("full", 0), ("latent", 0), ("sliding", pb.MATCH_WINDOW), ("recurrent", pb.MATCH_EXACT)]),
    window=st.integers(0, 5),
)
def test_client_and_daemon_reckon_alike(present: list[bool], kind: tuple[str, int], window: int) -> None:
    rows = [0 if is_present else -1 for is_present in present]
    match = kind[1] or pb.MATCH_PREFIX
    assert usable_blocks(present, kind[0], window) == restorable_blocks([row >= 0 for row in rows], match, window)
