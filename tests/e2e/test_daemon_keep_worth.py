"""A whole daemon, whose clock the test moves, values chains: what leaves by itself, what goes to NVMe."""

from __future__ import annotations

from kvstore_client import Session
from kvstored.store.transfer.gate import Refusal
from tests.reference.clocked_daemon import ClockedDaemon, clocked_daemon
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.policies import trust_at_once
from tests.reference.running_daemon import eventually
from tests.reference.tiers import HOST, NVME

MODEL = model()
REQUESTS = 30  # the policy believes itself from 24 on, and once two chains have been continued
LONG_LEASES = "limits.lease_ttl_ms=1000000000"  # the clock jumps


def request(daemon: ClockedDaemon, session: Session, conversation: int, blocks: int) -> list[str]:
    """Get what is there, put what is not; the durability of each block put."""
    daemon.clock.advance(ns=200_000_000)
    tokens = tokens_of(conversation, blocks)
    with session.get(tokens):
        pass
    daemon.settle()
    receipt = session.put(tokens, payloads=payloads_of(conversation, blocks, MODEL), wait="settled")
    daemon.settle()
    return list(receipt.durability)


def teach(daemon: ClockedDaemon, session: Session) -> None:
    """Requests enough that ranks are in force; the first conversations go on."""
    for number in range(REQUESTS):
        request(daemon, session, number, 2)
        if number < 3:
            request(daemon, session, number, 4)
    assert daemon.ask(lambda store: not store.policies[HOST].is_lru)


def blocks_in(daemon: ClockedDaemon, tier: int) -> int:
    found: int = daemon.ask(lambda store: store.residency.tier_blocks(tier))
    return found


def test_what_is_worth_too_little_leaves_by_itself_and_what_is_leased_stays() -> None:
    with clocked_daemon("host.keep_worth=4", "nvme.enabled=false", LONG_LEASES) as daemon, daemon.connect() as session:
        teach(daemon, session)
        stored = blocks_in(daemon, HOST)
        assert stored == 2 * REQUESTS + 3 * 2, "six seconds old, and all of them warm"
        with session.get(tokens_of(7, 2)) as lease:
            assert lease.blocks == 2
            daemon.clock.advance(ns=7200 * 1_000_000_000)
            assert eventually(lambda: blocks_in(daemon, HOST) == 2)
            assert bytes(lease.payload(0)) == bytes(payloads_of(7, 2, MODEL)[0])
        assert eventually(lambda: blocks_in(daemon, HOST) == 0)
        assert daemon.ask(lambda store: store.counters.snapshot()["expired_blocks"]) == stored
        assert daemon.ask(lambda store: store.counters.snapshot()["evicted_blocks"]) == 0
        assert session.lookup(tokens_of(7, 2)).reason == "expired"


def test_by_worth_only_what_is_worth_a_place_is_written() -> None:
    with clocked_daemon("nvme.admission=worth", LONG_LEASES) as daemon, daemon.connect() as session:
        assert request(daemon, session, 50, 2) == ["volatile"] * 2, "second touch, as long as little is known"
        teach(daemon, session)
        written = blocks_in(daemon, NVME)
        assert request(daemon, session, 51, 2) == ["durable"] * 2, "new, and warm"
        assert blocks_in(daemon, NVME) == written + 2


def test_by_worth_what_is_not_stays_volatile_and_says_why() -> None:
    """No chain is worth the uses an hour that this asks for."""
    chosen = ("nvme.admission=worth", "host.keep_worth=1e6", LONG_LEASES)
    with clocked_daemon(*chosen) as daemon, daemon.connect() as session:
        for number in range(REQUESTS):
            request(daemon, session, number, 2)
        request(daemon, session, 1, 4)
        daemon.ask(lambda store: trust_at_once(store.policies[HOST]))
        daemon.clock.advance(ns=5_000_000_000)
        # The look at all chains that is due at this time, so that the next one comes when the clock has moved.
        daemon.ask(lambda store: store.policies[HOST].below_keep_worth(store.clock.monotonic_ns(), 1))
        tokens = tokens_of(60, 2)
        receipt = session.put(tokens, payloads=payloads_of(60, 2, MODEL), wait="settled")
        assert list(receipt.durability) == ["volatile"] * 2
        why = daemon.ask(
            lambda store: {
                store.writeback.gate.refusal_of(row)
                for row in range(store.residency.rows.capacity)
                if store.residency.tier_mask(row)
            }
        )
        assert Refusal.WORTH in why
