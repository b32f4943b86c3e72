"""More than fits: victims go to NVMe and come back whole, and no capacity is exceeded at any moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client.testing.pressure import filled
from tests.reference.conversations import found_blocks, holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.running_daemon import MIB, RunningDaemon, connected_as, eventually, running_daemon

MODEL = model(kib_a_block=64)
SOMEONE_ELSE = 65534  # a uid
BLOCKS = 16  # of 68 KiB each: a conversation is a little over 1 MiB


class Watcher:
    """Samples `used_bytes` of every tier and the bytes of the NVMe directory while a test runs."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.samples = 0
        self.over: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def look(self) -> None:
        for tier in self.daemon.tiers().values():
            self.samples += 1
            if tier.used_bytes > tier.capacity_bytes:
                self.over.append(f"{tier.name}: {tier.used_bytes} of {tier.capacity_bytes}")
            if sum(tier.used_by.values()) != tier.used_bytes:
                self.over.append(f"{tier.name}: {dict(tier.used_by)} is not {tier.used_bytes}")
            if tier.name == "nvme":
                on_disk = disk_bytes(Path(tier.path))
                if on_disk > tier.capacity_bytes:
                    self.over.append(f"{on_disk} bytes on disk of {tier.capacity_bytes}")

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.look()

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()
        assert self.samples > 2 and not self.over, self.over


def disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_blocks * 512
        except FileNotFoundError:  # a file that was just renamed
            continue
    return total


def put(daemon: RunningDaemon, conversation: int, blocks: int = BLOCKS, durability: str = "none") -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, conversation, blocks, durability=durability)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("host.capacity=16MiB", "host.staging=4MiB", "nvme.capacity=48MiB") as running:
        yield running


def test_a_prompt_that_is_computed_again_and_again_is_stored_though_its_engine_sends_no_get() -> None:
    """The prompt is put again as connectors do whose lookup finds nothing: until then it is declined for prompts that
    were used.
    """
    tokens = tokens_of(1, BLOCKS)
    with running_daemon("host.capacity=32MiB", "nvme.enabled=false") as daemon, daemon.connect(MODEL) as session:
        payloads = payloads_of(1, BLOCKS, session.fingerprint)

        def put_again() -> set[str]:
            return set(session.put(tokens, payloads=payloads, durability="none").statuses)

        with filled(daemon.socket_dir):
            assert put_again() == {"no_room"}
        assert put_again() == {"declined"}
        assert eventually(lambda: put_again() == {"stored"})


def test_victims_go_down_and_come_back_whole(daemon: RunningDaemon) -> None:
    conversations = range(1, 25)  # 26 MiB in 12 MiB of DRAM
    with Watcher(daemon):
        for conversation in conversations:
            put(daemon, conversation)
        tiers = daemon.tiers()
        assert tiers["host"].evicted_blocks > 0 and tiers["nvme"].blocks > 0
        with daemon.connect(MODEL) as session:
            for conversation in conversations:
                assert session.lookup(tokens_of(conversation, BLOCKS)).blocks == BLOCKS
                with session.get(tokens_of(conversation, BLOCKS)) as lease:
                    assert holds(lease, payloads_of(conversation, BLOCKS, MODEL)), (conversation, lease)
    assert daemon.status().counters["evicted_blocks"] == 0, "everything fits in DRAM and NVMe together"
    assert daemon.status().counters["promoted_blocks"] > 0


@pytest.mark.slow
def test_over_both_tiers_the_coldest_leave_from_the_tail_and_say_so(daemon: RunningDaemon) -> None:
    with Watcher(daemon):
        for conversation in range(1, 61):  # 65 MiB
            put(daemon, conversation, durability="batch")
    counters = daemon.status().counters
    assert counters["evicted_blocks"] > 0 and counters["no_room_blocks"] == 0
    reasons = set()
    whole = 0
    with daemon.connect(MODEL) as session:
        for conversation in range(1, 61):
            found = session.lookup(tokens_of(conversation, BLOCKS))
            present = [tier != "absent" for tier in found.tiers]
            assert not any(present[found.blocks :]), "leaf-first: a stored prefix has no hole"
            reasons.add(found.reason)
            whole += found.blocks == BLOCKS
            with session.get(tokens_of(conversation, BLOCKS)) as lease:
                assert holds(lease, payloads_of(conversation, found.blocks, MODEL))
    assert reasons == {"", "evicted"} and whole > 20


@pytest.mark.slow
def test_blocks_of_another_size_and_of_another_model_find_room(daemon: RunningDaemon) -> None:
    """Arenas and slabs hold one size each; when all is full of one, another size still gets in, and back."""
    small, large = model("small", kib_a_block=16), model("large", kib_a_block=256)
    with Watcher(daemon):
        for turn in range(2):
            for fingerprint, blocks in ((MODEL, BLOCKS), (small, 64), (large, 4)):
                with daemon.connect(fingerprint) as session:
                    for number in range(14):
                        conversation = 1000 * turn + number
                        payloads = payloads_of(conversation, blocks, fingerprint)
                        receipt = session.put(tokens_of(conversation, blocks), payloads=payloads, durability="batch")
                        assert receipt.statuses == ["stored"] * blocks, (turn, fingerprint.weights_digest, receipt)
                        with session.get(tokens_of(conversation, blocks)) as lease:
                            assert holds(lease, payloads), (turn, lease)


@pytest.mark.slow
@pytest.mark.parametrize("guest", ["another tenant", "another model"])
def test_one_block_of_another_size_takes_one_arena_and_one_slab(guest: str) -> None:
    """The tiers are full of conversations whose blocks are spread over all arenas and slabs."""
    if guest == "another tenant" and os.geteuid() != 0:
        pytest.skip("becomes another user")
    settings = ("host.capacity=16MiB", "host.staging=4MiB", "nvme.capacity=48MiB")
    with running_daemon(*settings) as daemon:
        with daemon.connect(MODEL) as session:
            for blocks in (4, 8, 12, BLOCKS):  # conversations that grow in turn
                for conversation in range(1, 61):
                    session.put(tokens_of(conversation, blocks), payloads=payloads_of(conversation, blocks, MODEL))
        before, small = daemon.tiers(), model("guest", kib_a_block=8)
        daemon.socket_dir.parent.chmod(0o711)
        uid = 0 if guest == "another model" else SOMEONE_ELSE
        with connected_as(daemon, uid, small) as session, Watcher(daemon):  # as that user it could not watch
            payloads = payloads_of(900, 1, small)
            receipt = session.put(tokens_of(900, 1), payloads=payloads, durability="always", wait="settled")
            assert receipt.durability == ["durable"], receipt
            with session.get(tokens_of(900, 1)) as lease:
                assert holds(lease, payloads)
        after = daemon.tiers()
        for name, container_bytes in (("host", 2 * MIB), ("nvme", 4 * MIB)):
            lost_bytes = (before[name].blocks - after[name].blocks + 1) * 68 * 1024
            assert 0 < lost_bytes <= container_bytes, (name, before[name].blocks, after[name].blocks)
        assert daemon.status().counters["relocated_blocks"] > 0
        with daemon.connect(MODEL) as session:
            for conversation in range(1, 61):
                found_blocks(session, conversation, BLOCKS)


def test_a_get_of_more_than_dram_holds_gets_a_prefix_and_harms_nothing(daemon: RunningDaemon) -> None:
    blocks = 220  # 15 MiB in 12 MiB of DRAM
    with daemon.connect(MODEL) as session, Watcher(daemon):
        for first in (0, blocks // 2):
            payloads = payloads_of(1, blocks // 2, MODEL, first)
            assert session.put(tokens_of(1, blocks), payloads=payloads, first_block=first).stored_blocks == blocks // 2
            daemon.drop("host")
        assert session.lookup(tokens_of(1, blocks)).blocks == blocks
        with session.get(tokens_of(1, blocks), deadline_s=5) as lease:
            assert 100 < len(lease) < blocks
            assert holds(lease, payloads_of(1, len(lease), MODEL))
        assert eventually(lambda: daemon.status().leases == 0)
        put(daemon, 2)


def test_one_chain_over_all_of_dram_is_stored_as_far_as_it_goes(daemon: RunningDaemon) -> None:
    """Leaf-first: a chain does not push out its own head. What was stored is a prefix, the rest finds no room: where
    its end was published in time to go down to NVMe, that is all of it."""
    blocks = 220
    with daemon.connect(MODEL) as session, Watcher(daemon):
        receipt = session.put(tokens_of(1, blocks), payloads=payloads_of(1, blocks, MODEL), durability="none")
        stored = receipt.stored_blocks
        assert stored > 100 and receipt.statuses == ["stored"] * stored + ["no_room"] * (blocks - stored)
        assert session.lookup(tokens_of(1, blocks)).blocks == stored


def test_leases_keep_their_blocks_while_everything_else_goes(daemon: RunningDaemon) -> None:
    put(daemon, 1)
    with daemon.connect(MODEL) as session, session.get(tokens_of(1, BLOCKS)) as lease:
        for conversation in range(2, 30):
            put(daemon, conversation)
        assert lease.valid and holds(lease, payloads_of(1, BLOCKS, MODEL))


def test_dram_alone_evicts_and_never_throttles() -> None:
    with running_daemon("host.capacity=12MiB", "host.staging=3MiB", "nvme.enabled=false") as daemon, Watcher(daemon):
        for conversation in range(1, 20):
            put(daemon, conversation)
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(1, BLOCKS)).reason == "evicted"
            assert session.lookup(tokens_of(19, BLOCKS)).blocks == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "chain-hazard"])
def test_what_a_put_continues_does_not_leave_for_it(policy: str) -> None:
    """The first to leave is the tail of the oldest conversation, which is the one that is put again, longer."""
    with running_daemon(
        "host.capacity=12MiB", "host.staging=3MiB", "nvme.enabled=false", f"host.policy={policy}"
    ) as daemon, daemon.connect(MODEL) as session:  # fmt: skip
        for conversation in range(1, 12):
            put(daemon, conversation, 12)
        for conversation in range(1, 12):
            there = session.lookup(tokens_of(conversation, 12)).blocks
            if there < 2:
                continue
            longer = there + 1
            receipt = session.put(
                tokens_of(conversation, longer), payloads=payloads_of(conversation, longer, MODEL), durability="none"
            )
            visible = [status in ("stored", "present") for status in receipt.statuses]
            leading = visible.index(False) if False in visible else longer
            assert session.lookup(tokens_of(conversation, longer)).blocks >= leading


def test_a_tenants_maximum_is_its_own(tmp_path: Path) -> None:
    config = tmp_path / "k.toml"
    config.write_text(f"[[tenant]]\nname = 'small'\nuids = [{os.getuid()}]\nhost_max = '4MiB'\n")
    with running_daemon("nvme.enabled=false", config=config) as daemon:
        for conversation in range(1, 10):
            put(daemon, conversation)
            assert daemon.tiers()["host"].used_by["blocks"] <= 4 * MIB
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(9, BLOCKS)).blocks == BLOCKS
