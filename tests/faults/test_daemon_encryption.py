"""A daemon with a master key leaves nothing on its disk that says what was put, and finds all of it with the key.

Each scan reads the raw bytes of every file of the state directory, slabs and free pages of LMDB included.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

pytest.importorskip("cryptography", reason="needs the extra encryption")

import kvstore_client
from kvstore_client import Session
from kvstore_proto.arena import SEALED
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.nvme.inspect import Inspector
from kvstored.clock import SystemClock
from kvstored.state.process import StateProcess
from tests.reference.conversations import found_blocks, model, payloads_of, put_conversation, tokens_of
from tests.reference.damage import flip_on_disk, flip_record
from tests.reference.examples import each_nth
from tests.reference.running_daemon import DaemonDied, RunningDaemon, daemon_directory, ended_with, eventually

MODEL = model()
BLOCKS = 6
PIECE_BYTES = 24  # of a payload, or of token ids: no accident has them
MINE = f"uid-{os.geteuid()}"
EVERYTHING = "encryption.default=true"
STAGING = "nvme.codec_staging=4MiB"


def key_file(directory: Path, name: str = "master") -> Path:
    path = directory / name
    path.write_bytes(os.urandom(48))
    path.chmod(0o600)
    return path


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon that is not started yet, with a master key."""
    with daemon_directory() as directory:
        made = RunningDaemon(directory, f"encryption.key_file={key_file(directory)}", EVERYTHING, STAGING)
        with ended_with(made):
            yield made


def put(daemon: RunningDaemon, conversation: int) -> list[bytes]:
    """Store a conversation on NVMe. Return pieces of it which the disk must not show: of token ids and payloads, and
    the keys of its blocks."""
    with daemon.connect(MODEL) as session:
        receipt = put_conversation(session, conversation, BLOCKS, durability="always", wait="settled")
        assert receipt.durability == ["durable"] * BLOCKS, receipt
    tokens = tokens_of(conversation, BLOCKS).astype("<i4").tobytes()
    wholes = [tokens, *(payload.tobytes() for payload in payloads_of(conversation, BLOCKS, MODEL))]
    pieces = [whole[at : at + PIECE_BYTES] for whole in wholes for at in range(0, len(whole), 1000)]
    return [piece for piece in pieces if len(piece) == PIECE_BYTES] + keys_of(daemon)


def keys_of(daemon: RunningDaemon) -> list[bytes]:
    return [bytes.fromhex(block.key) for block in daemon.ask("Blocks", pb.BlocksRequest(limit=1000)).blocks]


def got(daemon: RunningDaemon, conversation: int) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, conversation, BLOCKS)


def files_with(directory: Path, pieces: list[bytes]) -> set[str]:
    contents = {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return {name for name, content in contents.items() if any(piece in content for piece in pieces)}


def without(daemon: RunningDaemon, *names: str) -> None:
    daemon.settings = tuple(each for each in daemon.settings if each.partition("=")[0] not in names)


def must_be_refused(daemon: RunningDaemon, *words: str) -> None:
    before = {path: path.read_bytes() for path in daemon.nvme_dir.rglob("*.slab")}
    (daemon.directory / "log").write_text("")
    with pytest.raises(DaemonDied):
        daemon.start()
    assert all(word in daemon.log for word in words), daemon.log
    assert "Traceback" not in daemon.log
    assert before == {path: path.read_bytes() for path in before}, "nothing is changed"


def test_no_file_shows_what_was_put_and_a_restart_finds_all_of_it(daemon: RunningDaemon) -> None:
    daemon.settings += (f"daemon.record={daemon.directory}/state/recording", "daemon.record_tokens=true")
    daemon.start()
    pieces = put(daemon, 1)
    with daemon.connect(MODEL) as session:
        session.touch(tokens_of(1, BLOCKS), ttl=5000)  # small state names these blocks now
    assert got(daemon, 2) == 0
    daemon.stop()
    assert not files_with(daemon.state_dir, pieces)
    lines = gzip.decompress((daemon.state_dir / "recording").read_bytes()).decode()
    assert '"op":"put"' in lines and '"x":' not in lines and not any(key[:8].hex() in lines for key in pieces[-BLOCKS:])
    without(daemon, "daemon.record", "daemon.record_tokens")
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    assert eventually(daemon.knows_its_state)
    state = daemon.ask("State", pb.StateRequest(database="pins"))
    assert len(state.values) == BLOCKS and not state.wrong_values and not state.set_aside
    daemon.kill9()
    assert not files_with(daemon.state_dir, pieces)
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    daemon.stop()
    asyncio.run(must_be_copied_unread(daemon))


async def must_be_copied_unread(daemon: RunningDaemon) -> None:
    """A backup needs no key; to show what is in small state does."""
    process = StateProcess(daemon.state_dir, "any", SystemClock(), shared=True)
    copy = await process.copy(daemon.directory)
    (original,) = daemon.state_dir.glob("state-*.mdb")
    assert copy.name == original.name and copy.stat().st_size
    with pytest.raises(OSError, match="a daemon with the key shows them"):
        await process.read("pins")
    await process.close()


def test_only_tenants_that_say_so_are_encrypted(daemon: RunningDaemon) -> None:
    without(daemon, "encryption.default")
    daemon.start()
    pieces = put(daemon, 1)
    assert files_with(daemon.nvme_dir, pieces), "the scan finds what is there"
    config = daemon.directory / "kvstored.toml"
    config.write_text(f"[[tenant]]\nname = 'me'\nuids = [{os.geteuid()}]\nencrypt = true\n")
    daemon.stop()
    daemon.config = config
    daemon.start()  # the tenant takes its user's blocks over, as they are
    assert got(daemon, 1) == BLOCKS
    later = put(daemon, 2)
    daemon.stop()
    forms = [header.codec for _, _, header in Inspector(daemon.nvme_dir).headers()]
    assert sorted(forms) == [0] * BLOCKS + [SEALED] * BLOCKS
    assert not files_with(daemon.nvme_dir, [piece for piece in later if piece not in pieces])
    daemon.start()
    assert got(daemon, 1) == got(daemon, 2) == BLOCKS
    daemon.stop()


def test_a_reload_encrypts_nothing_that_has_no_key(daemon: RunningDaemon) -> None:
    config = daemon.directory / "kvstored.toml"
    config.write_text("[[tenant]]\nname = 'me'\nuids = [0]\n")
    daemon.config, key_setting = config, daemon.settings[0]
    daemon.settings = ()
    daemon.start()
    key = key_setting.partition("=")[2]
    config.write_text(f"[encryption]\nkey_file = '{key}'\n[[tenant]]\nname = 'me'\nuids = [0]\nencrypt = true\n")
    with pytest.raises(grpc.RpcError, match=r"began without encryption\.key_file: restart it"):
        daemon.ask("Reload", pb.ReloadRequest())
    daemon.stop()


def test_without_the_right_key_the_start_is_refused_and_nothing_is_lost(daemon: RunningDaemon) -> None:
    daemon.start()
    put(daemon, 1)
    daemon.stop()
    right, wrong = daemon.settings, key_file(daemon.directory, "wrong")
    daemon.settings = (f"encryption.key_file={wrong}", EVERYTHING, STAGING)
    must_be_refused(daemon, "encryption.key_file is not the key", "--new-secret")
    daemon.settings = ()
    must_be_refused(daemon, f"{BLOCKS} encrypted blocks", "encryption.key_file", "--new-secret")
    daemon.settings = (EVERYTHING,)
    must_be_refused(daemon, "encryption.default = true needs a master key")
    daemon.settings = (f"encryption.key_file={daemon.directory}/absent", EVERYTHING, STAGING)
    must_be_refused(daemon, "encryption.key_file: cannot read")
    keys = daemon.state_dir / "keys"
    kept = keys.read_bytes()
    daemon.settings = right
    for damaged in (kept[:-40], b"[" * 100_000):
        keys.write_bytes(damaged)
        must_be_refused(daemon, "keys is damaged")
    keys.unlink()
    must_be_refused(daemon, f"{BLOCKS} encrypted blocks", "--new-secret")
    must_be_refused(daemon, f"{BLOCKS} encrypted blocks", "--new-secret")  # and at each further start
    keys.write_bytes(kept)
    keys.chmod(0o600)
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    daemon.stop()


def test_a_new_secret_drops_what_no_key_opens(daemon: RunningDaemon) -> None:
    daemon.start()
    put(daemon, 1)
    daemon.stop()
    (daemon.state_dir / "keys").unlink()
    daemon.arguments = ("--new-secret",)
    daemon.start()
    assert got(daemon, 1) == 0
    put(daemon, 1)
    daemon.stop()
    daemon.arguments = ()
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    daemon.stop()


@pytest.mark.slow
def test_another_master_key_takes_the_place_of_the_former(daemon: RunningDaemon) -> None:
    daemon.start()
    put(daemon, 1)
    daemon.stop()
    former = daemon.settings[0].partition("=")[2]
    now = f"encryption.key_file={key_file(daemon.directory, 'now')}"
    daemon.settings = (now, f"encryption.former_key_file={former}", EVERYTHING, STAGING)
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    daemon.stop()
    daemon.settings = (now, EVERYTHING, STAGING)
    daemon.start()
    assert got(daemon, 1) == BLOCKS
    daemon.stop()
    daemon.settings = (f"encryption.key_file={former}", EVERYTHING, STAGING)
    must_be_refused(daemon, "encryption.key_file is not the key")


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", ["file.keys=kill@1", "keys.written=kill@1", "keys.written=kill@2"])
def test_a_kill_while_keys_are_written_loses_no_durable_block(daemon: RunningDaemon, failpoint: str) -> None:
    daemon.failpoints = failpoint
    try:
        daemon.start()
        put(daemon, 1)
        is_durable = True
    except (DaemonDied, AssertionError, OSError, grpc.RpcError):
        is_durable = False
    except Exception:  # of the client that lost its daemon
        is_durable = False
    assert daemon.process is not None and (is_durable or daemon.process.wait(30) == -9)
    if is_durable:
        daemon.kill9()
    daemon.restart()
    assert got(daemon, 1) in ((BLOCKS,) if is_durable else range(BLOCKS + 1))
    put(daemon, 2)
    daemon.kill9()
    daemon.restart()
    assert got(daemon, 2) == BLOCKS
    daemon.stop()


def test_a_dropped_tenant_leaves_nothing_readable(daemon: RunningDaemon) -> None:
    daemon.start()
    pieces = put(daemon, 1)
    assert eventually(daemon.knows_its_state)
    with daemon.connect(MODEL) as session:
        session.touch(tokens_of(1, BLOCKS), ttl=5000)
    copies = {path: path.read_bytes() for path in daemon.nvme_dir.rglob("*.slab")}
    reply = daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    assert reply.key_destroyed and reply.slots >= BLOCKS and not reply.readable_slots and not reply.kept_blocks
    assert got(daemon, 1) == 0
    assert not files_with(daemon.state_dir, [*pieces, MINE.encode()])
    daemon.stop()
    for path, content in copies.items():  # of a backup, say: its records name blocks under a key that is gone
        path.write_bytes(content)
    (daemon.nvme_dir / "seal").unlink(missing_ok=True)
    daemon.start()
    assert got(daemon, 1) == 0 and not keys_of(daemon)
    put(daemon, 1)
    assert got(daemon, 1) == BLOCKS
    daemon.stop()


@pytest.mark.slow
def test_a_drop_ends_where_the_state_cannot_be_written(daemon: RunningDaemon) -> None:
    daemon.failpoints = "state.commit=error:ENOSPC"
    daemon.start()
    put(daemon, 1)
    with pytest.raises(grpc.RpcError, match=r"the blocks are dropped, but .*state.* cannot be written.*drop again"):
        daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    daemon.stop()
    daemon.failpoints = ""
    daemon.start()
    assert daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE)).readable_slots == 0 and got(daemon, 1) == 0
    daemon.stop()


@pytest.mark.parametrize("hit", each_nth(["file.keys=kill@3", "keys.written=kill@3", "state.commit=kill@2"], 3))
def test_a_drop_that_a_kill_cut_short_is_done_again(daemon: RunningDaemon, hit: str) -> None:
    daemon.failpoints = hit
    daemon.start()
    pieces = put(daemon, 1)
    with pytest.raises(grpc.RpcError):
        daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    assert daemon.process is not None and daemon.process.wait(30) == -9
    daemon.failpoints = ""
    daemon.restart()
    reply = daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    assert not reply.readable_slots and not reply.kept_blocks and got(daemon, 1) == 0
    assert not files_with(daemon.state_dir, [*pieces, MINE.encode()])
    daemon.stop()


@pytest.mark.slow
def test_a_warm_restart_keeps_dram_and_brings_no_dropped_tenant_back(daemon: RunningDaemon) -> None:
    config = daemon.directory / "kvstored.toml"
    config.write_text("".join(f"[[tenant]]\nname = '{name}'\nsocket = true\n" for name in ("kept", "gone")))
    daemon.config = config
    daemon.settings += ("host.warm_restart=holder",)
    daemon.start()

    def connect(tenant: str) -> Session:
        return kvstore_client.connect(
            daemon.socket_dir / "tenants" / tenant, fingerprint=MODEL, required=True, connect_timeout_s=30.0,
            deadline_s=30.0,
        )  # fmt: skip

    def found(tenant: str, conversation: int) -> int:
        with connect(tenant) as session:
            return found_blocks(session, conversation, BLOCKS)

    for tenant in ("kept", "gone"):
        with connect(tenant) as session:
            put_conversation(session, 1, BLOCKS, durability="none")
            receipt = put_conversation(session, 2, BLOCKS, durability="always", wait="settled")
            assert receipt.durability == ["durable"] * BLOCKS
    payloads = [payload.tobytes()[:PIECE_BYTES] for number in (1, 2) for payload in payloads_of(number, BLOCKS, MODEL)]
    copies = {path: path.read_bytes() for path in daemon.nvme_dir.rglob("*.slab")}
    assert daemon.ask("DropTenant", pb.DropTenantRequest(name="gone")).key_destroyed
    in_dram = daemon.tiers()["host"].blocks
    assert in_dram == 2 * BLOCKS
    daemon.kill9()
    for path, content in copies.items():  # the encrypted blocks of before the drop, as a backup has them
        path.write_bytes(content)
    daemon.restart()
    assert daemon.tiers()["host"].blocks == in_dram
    assert [found("kept", number) for number in (1, 2)] == [BLOCKS] * 2
    assert [found("gone", number) for number in (1, 2)] == [0, 0]
    daemon.drop("host", discard=True)
    assert [found("kept", number) for number in (1, 2)] == [0, BLOCKS], "from NVMe, by its key"
    assert not files_with(daemon.state_dir, payloads)
    daemon.stop()


@pytest.mark.slow
def test_a_tenant_that_was_never_encrypted_is_dropped_and_counted(daemon: RunningDaemon) -> None:
    without(daemon, "encryption.default")
    daemon.start()
    put(daemon, 1)
    reply = daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    assert not reply.key_destroyed and reply.readable_slots == BLOCKS and got(daemon, 1) == 0
    with pytest.raises(grpc.RpcError, match="no tenant 'nobody'"):
        daemon.ask("DropTenant", pb.DropTenantRequest(name="nobody"))
    daemon.stop()


@pytest.mark.slow
def test_a_changed_block_is_damage_and_goes_to_quarantine(daemon: RunningDaemon) -> None:
    daemon.is_spoilt = True
    daemon.settings += ("scrub.enabled=false",)
    daemon.start()
    pieces = put(daemon, 1)
    daemon.drop("host")
    assert flip_on_disk(daemon, depth=2) == 1
    assert got(daemon, 1) == 2
    (slot,) = daemon.ask("Quarantine", pb.QuarantineRequest()).slots
    assert "its seal is broken" in slot.reason and slot.tenant == MINE and bytes.fromhex(slot.key) in pieces
    held = Inspector(daemon.nvme_dir).slot(slot.slab, 0).slots[0]
    assert held["codec"] == "AES-GCM" and bytes.fromhex(str(held["key"])) not in pieces
    reply = daemon.ask("DropTenant", pb.DropTenantRequest(name=MINE))
    assert reply.quarantined == 1 and not daemon.ask("Quarantine", pb.QuarantineRequest()).slots
    daemon.kill9()


@pytest.mark.slow
def test_the_scrubber_finds_changed_blocks_and_records_without_a_key(daemon: RunningDaemon) -> None:
    daemon.is_spoilt = True
    daemon.settings += ("scrub.start_s=0", "scrub.interval_s=0.2", "scrub.rate=256MiB")
    daemon.start()
    pieces = put(daemon, 1)
    assert flip_record(daemon, depth=1) == 1
    assert eventually(lambda: "written again from the slot" in daemon.log)
    daemon.ask("Flush", pb.FlushRequest())
    assert daemon.status().counters["corrupt_blocks"] == 0
    assert flip_on_disk(daemon, depth=2) == 1
    assert eventually(lambda: daemon.status().counters["corrupt_blocks"] == 1)
    assert eventually(lambda: daemon.tiers()["nvme"].blocks == BLOCKS), "DRAM has it: it is written again"
    daemon.ask("Flush", pb.FlushRequest())
    daemon.kill9()
    daemon.restart()
    assert got(daemon, 1) == BLOCKS and not files_with(daemon.state_dir, pieces)
    daemon.kill9()
