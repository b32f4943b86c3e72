"""The lookup index when its writer is stopped, killed or replaced, and when its answers are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvstore_client import BlockKeys, Session
from kvstore_client.lookup_index import LookupIndex
from kvstore_proto.lookup_index import IndexLayout
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, eventually

MODEL = model()
TOKENS = tokens_of(1, 4)


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    """Four blocks are stored, and the index is mapped."""
    with daemon.connect() as connected:
        connected.put(TOKENS, payloads=payloads_of(1, 4, MODEL), wait="settled")
        assert eventually(lambda: connected.probe(tokens_of(1, 5)).reason == "absent")
        yield connected


def test_a_daemon_that_is_killed_leaves_nothing_to_believe_in(daemon: RunningDaemon, session: Session) -> None:
    daemon.kill9()
    assert eventually(lambda: session.probe(TOKENS).reason == "no_daemon")
    assert session.probe(TOKENS).tiers == ()
    assert session.contains(TOKENS) is None
    daemon.restart()
    assert eventually(lambda: session.probe(TOKENS).tiers == ("nvme",) * 4), "the new daemon's index, not the old one's"
    with session.get(TOKENS) as lease:
        assert holds(lease, payloads_of(1, 4, MODEL))


def test_a_connection_that_ended_is_seen_before_anybody_says_so(daemon: RunningDaemon, session: Session) -> None:
    """The reader thread may notice it late: the probe looks at the handshake connection itself."""
    connection = session._connection.current()
    assert connection is not None
    daemon.kill9()
    assert eventually(lambda: not connection.is_alive())
    session._connection._healthy, session._connection._daemon = True, connection
    assert session.probe(TOKENS).reason == "no_daemon"


def test_a_stopped_daemon_answers_by_its_index_alone(daemon: RunningDaemon, session: Session) -> None:
    asked = session.statistics().grpc_message_bytes
    with daemon.frozen():
        assert session.contains(TOKENS) == 4
        assert session.contains(tokens_of(2, 3)) == 0
        assert session.probe(TOKENS).tiers == ("host",) * 4
        assert session.statistics().grpc_message_bytes == asked, "the daemon got no request"


def test_a_first_probe_of_a_stopped_daemon_gives_up_and_hears_the_late_answer(daemon: RunningDaemon) -> None:
    with daemon.connect(deadline_s=0.05) as fresh:
        with daemon.frozen():
            assert fresh.probe(TOKENS).reason == "unknown"
            assert fresh.probe(TOKENS).reason == "unknown"
            assert fresh.contains(TOKENS, deadline_s=0.02) is None
        assert eventually(lambda: fresh.probe(TOKENS).reason == "absent")


class WrongIndex(LookupIndex):
    """An index that answers that each key is in DRAM; or, with the other code, that no key is stored."""

    def __init__(self, code: int) -> None:
        super().__init__(memoryview(b""), IndexLayout(1, 0, bytes(16)))
        self.code = code

    def codes(self, keys: BlockKeys) -> list[int]:
        return [self.code] * len(keys)


def test_wrong_answers_of_an_index_cost_misses_and_never_a_wrong_byte(daemon: RunningDaemon, session: Session) -> None:
    connection = session._connection.current()
    assert connection is not None
    connection.index._index = WrongIndex(pb.TIER_CODE_HOST)
    expected = {1: payloads_of(1, 4, MODEL), 2: []}
    for conversation, payloads in expected.items():
        tokens = tokens_of(conversation, 6)
        probed = session.probe(tokens)
        assert probed.blocks == 6
        with session.get(tokens, max_blocks=probed.blocks) as lease:
            assert holds(lease, payloads)
    connection.index._index = WrongIndex(pb.TIER_CODE_ABSENT)
    assert session.probe(TOKENS).blocks == 0
    with session.get(TOKENS) as lease:
        assert holds(lease, expected[1]), "get never looks at the index"


@pytest.mark.parametrize("place", each_nth([4096, 4100, 4110, 4159], 2))
def test_a_damaged_bucket_is_asked_about_instead(daemon: RunningDaemon, session: Session, place: int) -> None:
    """Damage to a copy of the memory, bucket by bucket: it can only be written through the daemon's own mapping."""
    connection = session._connection.current()
    assert connection is not None
    mapped = connection.index._index
    assert mapped is not None
    image = bytearray(mapped._raw)
    for bucket in range(mapped.layout.buckets):
        image[place + 64 * bucket] ^= 0x55
    connection.index._index = LookupIndex(memoryview(image), mapped.layout)
    assert _all_unknown(session.probe(tokens_of(1, 5)).tiers)
    assert session.contains(tokens_of(1, 5)) == 4


def _all_unknown(tiers: Sequence[str]) -> bool:
    return set(tiers) == {"unknown"}
