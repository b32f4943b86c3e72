"""kvctl put, get, prefetch and delete against the real daemon: round trips to the byte, reasons, exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl.main import main
from kvctl.output import FAILED, MISS, OK, UNREACHABLE, USAGE
from kvstore_proto.objects import HEAD_BYTES, OBJECTS, object_tokens
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import MIB, RunningDaemon, eventually, running_daemon

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
MODEL = model()
BLOCK_BYTES = MODEL.payload_bytes()
OPEN = model("open size", kib_a_block=0)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: pytest.CaptureFixture[bytes]) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


@pytest.fixture
def fingerprint(tmp_path: Path) -> str:
    (tmp_path / "model.json").write_bytes(MODEL.canonical() + b"\n")
    return str(tmp_path / "model.json")


def some_bytes(path: Path, size: int, seed: int = 0) -> bytes:
    data = np.random.default_rng((seed, size)).integers(0, 256, size, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    return data


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


# Named objects


@pytest.mark.parametrize(
    "size", [0, 1, 65_536 - HEAD_BYTES - 1, 65_536 - HEAD_BYTES, 65_536 - HEAD_BYTES + 1, 3 * 65_536 + 5]
)
def test_a_named_object_comes_back_to_the_byte(kvctl: Kvctl, tmp_path: Path, size: int) -> None:
    data = some_bytes(tmp_path / "in", size)
    name = f"object of {size}"
    said = kvctl.json(["put", "--name", name, "--block-size", "64KiB", str(tmp_path / "in")])
    blocks = max(1, -(-(size + HEAD_BYTES) // 65_536))
    assert (said["stored_blocks"], said["bytes"], said["name"]) == (blocks, size, name)
    assert kvctl(["get", "--name", name]).bytes == data
    kvctl(["get", "--name", name, str(tmp_path / "out")])
    assert (tmp_path / "out").read_bytes() == data
    assert kvctl.json(["delete", "--name", name])["deleted_blocks"] == blocks


def test_an_object_over_staging_and_dram_goes_through_nvme_and_back(kvctl: Kvctl, tmp_path: Path) -> None:
    data = some_bytes(tmp_path / "in", 40 * MIB + 12_345)  # 24 MiB of DRAM, 2 MiB of staging, 64 MiB of NVMe
    said = kvctl.json(
        ["put", "--name", "large", "--block-size", "256KiB", "--durability", "batch", str(tmp_path / "in")]
    )
    assert said["durable_blocks"] == said["stored_blocks"] == 161
    kvctl(["get", "--name", "large", str(tmp_path / "out")])
    assert (tmp_path / "out").read_bytes() == data
    kvctl("delete --name large")
    assert not kvctl.daemon.ask("Blocks", _blocks_request()).total


def test_putting_the_same_again_stores_nothing_and_other_bytes_need_replace(kvctl: Kvctl, tmp_path: Path) -> None:
    first, second = some_bytes(tmp_path / "a", 200_000, 1), some_bytes(tmp_path / "b", 90_000, 2)
    kvctl(["put", "--name", "twice", str(tmp_path / "a"), "--block-size", "64KiB"])
    assert "stored already" in kvctl(["put", "--name", "twice", str(tmp_path / "a")]).out
    refused = kvctl(["put", "--name", "twice", str(tmp_path / "b")], exit_code=FAILED)
    assert "other content" in refused.err and "--replace" in refused.err
    assert kvctl("get --name twice").bytes == first
    kvctl(["put", "--name", "twice", "--replace", str(tmp_path / "b")])
    assert kvctl("get --name twice").bytes == second
    kvctl("delete --name twice")


def test_an_object_survives_the_daemon_when_it_was_called_durable(tmp_path: Path, capfdbinary: Any) -> None:
    data = some_bytes(tmp_path / "in", 300_000)
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        put = kvctl(["put", "--name", "kept", "--durability", "always", str(tmp_path / "in")])
        assert "durable" in put.out
        early = ["put", "--name", "late", "--durability", "none", str(tmp_path / "in")]
        assert "stored 1 block" in kvctl(early).out
        assert "already, 1 block, volatile" in kvctl(early).out
        late = ["put", "--name", "late", "--durability", "always", str(tmp_path / "in")]
        assert "already, 1 block, durable" in kvctl(late).out
        said = kvctl.json(late)
        assert (said["stored_blocks"], said["present_blocks"], said["durable_blocks"]) == (0, 1, 1)
        daemon.kill9()
        daemon.restart()
        assert kvctl("get --name kept").bytes == data
        assert kvctl("get --name late").bytes == data


def test_a_pipe_is_read_to_its_end(kvctl: Kvctl, stdin: Callable[[bytes], None]) -> None:
    stdin(b"from a pipe")
    kvctl("put --name piped -")
    assert kvctl("get --name piped -").bytes == b"from a pipe"
    kvctl("delete --name piped")


def test_json_says_what_was_got_and_the_bytes_go_to_the_file(kvctl: Kvctl, tmp_path: Path) -> None:
    data = some_bytes(tmp_path / "in", 1000)
    kvctl(["put", "--name", "j", str(tmp_path / "in")])
    said = kvctl.json(["get", "--name", "j", str(tmp_path / "out")])
    assert said == {"blocks": 1, "bytes": 1000, "promoted_bytes": 0, "reason": "", "file": str(tmp_path / "out")}
    assert (tmp_path / "out").read_bytes() == data
    clash = kvctl(["get", "--name", "j", "--json"], exit_code=USAGE)
    assert "name a file" in clash.err
    kvctl("delete --name j")


def test_a_miss_is_status_5_with_its_reason_and_leaves_no_file(kvctl: Kvctl, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("before")
    said = kvctl.json(["get", "--name", "nobody put this", str(target)], exit_code=MISS)
    assert (said["exit_code"], said["reason"]) == (MISS, "never_stored")
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]
    some_bytes(tmp_path / "in", 1000)
    kvctl(["put", "--name", "short", str(tmp_path / "in")])
    kvctl("delete --name short")
    assert kvctl.json(["get", "--name", "short", str(target)], exit_code=MISS)["reason"] == "dropped"
    assert kvctl.json("delete --name short", exit_code=MISS)["reason"] == "dropped"
    assert kvctl.json("prefetch --name short", exit_code=MISS)["reason"] == "dropped"


def test_an_object_whose_tail_is_gone_is_a_miss_and_can_be_put_again(kvctl: Kvctl, tmp_path: Path) -> None:
    data = some_bytes(tmp_path / "in", 250_000)
    kvctl(["put", "--name", "torn", "--block-size", "64KiB", str(tmp_path / "in")])
    with kvctl.daemon.connect(OBJECTS) as session:
        keys = session.keys(object_tokens("torn", 4))
        assert keys is not None and session.delete(keys=keys[2:]).blocks == 2
    said = kvctl.json(["get", "--name", "torn", str(tmp_path / "out")], exit_code=MISS)
    assert (said["found_blocks"], said["blocks"], said["reason"]) == (2, 4, "dropped")
    assert not (tmp_path / "out").exists()
    assert kvctl.json(["put", "--name", "torn", str(tmp_path / "in")])["stored_blocks"] == 2
    assert kvctl("get --name torn").bytes == data
    kvctl("delete --name torn")


def test_blocks_of_two_puts_are_never_served_as_one(kvctl: Kvctl, tmp_path: Path) -> None:
    """Another put's tail under our head: the checksum over the whole object fails."""
    some_bytes(tmp_path / "in", 250_000)
    kvctl(["put", "--name", "mixed", "--block-size", "64KiB", str(tmp_path / "in")])
    with kvctl.daemon.connect(OBJECTS) as session:
        tokens = object_tokens("mixed", 4)
        keys = session.keys(tokens)
        assert keys is not None and session.delete(keys=keys[3:]).blocks == 1
        tail = np.zeros(HEAD_BYTES + 250_000 - 3 * 65_536, np.uint8)
        assert session.put(tokens, payloads=[tail], first_block=3).stored_blocks == 1
    assert "different puts" in kvctl(["get", "--name", "mixed", str(tmp_path / "out")], exit_code=FAILED).err
    assert not (tmp_path / "out").exists()
    kvctl("delete --name mixed")


def test_an_existing_file_keeps_its_mode_and_a_device_can_be_written(kvctl: Kvctl, tmp_path: Path) -> None:
    some_bytes(tmp_path / "in", 10)
    (tmp_path / "out").touch(0o600)
    (tmp_path / "out").chmod(0o600)
    kvctl(["put", "--name", "modes", str(tmp_path / "in")])
    kvctl(["get", "--name", "modes", str(tmp_path / "out")])
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600
    kvctl(["get", "--name", "modes", os.devnull])
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    kvctl("delete --name modes")


# Blocks of a token prefix


def test_a_prefix_is_stored_from_a_file_and_read_by_tokens_and_by_an_engine(
    kvctl: Kvctl, tmp_path: Path, fingerprint: str
) -> None:
    data = some_bytes(tmp_path / "kv", 3 * BLOCK_BYTES)
    prefix = ["--tokens", "7000-7191,5,6", "--fingerprint", fingerprint]  # 3 blocks of 64 and two tokens over
    assert kvctl.json(["put", *prefix, str(tmp_path / "kv")])["stored_blocks"] == 3
    assert kvctl(["get", *prefix]).bytes == data
    with kvctl.daemon.connect(MODEL) as session, session.get(tokens_of(7, 3)) as lease:
        assert b"".join(lease.payload(block).tobytes() for block in range(3)) == data
    (tmp_path / "ids").write_text("[" + ",\n ".join(map(str, range(7000, 7192))) + "]\n")
    by_file = ["--tokens-file", str(tmp_path / "ids"), "--fingerprint", MODEL.digest().hex()[:12]]
    assert kvctl(["get", *by_file]).bytes == data
    assert kvctl.json(["delete", *by_file])["deleted_blocks"] == 3


def test_a_longer_prefix_than_is_stored_is_a_miss_or_partial(kvctl: Kvctl, tmp_path: Path, fingerprint: str) -> None:
    data = some_bytes(tmp_path / "kv", 2 * BLOCK_BYTES)
    prefix = ["--tokens", "9000-9319", "--fingerprint", fingerprint]
    kvctl(["put", *prefix, str(tmp_path / "kv")])  # two of five blocks
    said = kvctl.json(["get", *prefix, str(tmp_path / "out")], exit_code=MISS)
    assert (said["found_blocks"], said["blocks"], said["reason"]) == (2, 5, "never_stored")
    partly = kvctl(["get", *prefix, "--partial"], exit_code=MISS)
    assert partly.bytes == data and "3 more are not there: never stored" in partly.err
    kvctl(["delete", *prefix])


def test_a_fingerprint_that_leaves_the_size_open_takes_any(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "open.json").write_bytes(OPEN.canonical())
    data = some_bytes(tmp_path / "kv", 2 * 1234)
    prefix = ["--tokens", "0-127", "--fingerprint", str(tmp_path / "open.json")]
    kvctl(["put", *prefix, str(tmp_path / "kv")])
    assert kvctl(["get", *prefix]).bytes == data
    kvctl(["delete", *prefix])


def test_prefetch_brings_blocks_up_and_says_what_it_did(kvctl: Kvctl, tmp_path: Path) -> None:
    some_bytes(tmp_path / "in", 400_000)
    kvctl(["put", "--name", "p", "--block-size", "64KiB", "--durability", "always", str(tmp_path / "in")])
    kvctl.daemon.drop("host")
    before = kvctl.daemon.tiers()["host"].blocks
    assert before == 0
    said = kvctl.json("prefetch --name p --wait 20")
    assert said["mapped_blocks"] == said["stored_blocks"] == 7
    assert kvctl.daemon.tiers()["host"].blocks == 7
    assert "7 blocks in DRAM already, 0 being fetched" in kvctl("prefetch --name p").out
    kvctl.daemon.drop("host")
    limited = kvctl.json("prefetch --name p --budget 130KiB")
    assert limited["resident_blocks"] + limited["scheduled_blocks"] < 7
    lanes = lambda: kvctl.daemon.status().lanes  # noqa: E731
    assert eventually(lambda: not any(lane.queued or lane.in_flight for lane in lanes())), "it cannot be deleted yet"
    kvctl("delete --name p")


def test_delete_keeps_what_is_leased_or_continued(kvctl: Kvctl, tmp_path: Path, fingerprint: str) -> None:
    some_bytes(tmp_path / "kv", 4 * BLOCK_BYTES)
    long = ["--tokens", "3000-3255", "--fingerprint", fingerprint]
    short = ["--tokens", "3000-3127", "--fingerprint", fingerprint]
    kvctl(["put", *long, str(tmp_path / "kv")])
    said = kvctl.json(["delete", *short], exit_code=FAILED)
    assert (said["deleted_blocks"], said["continued_blocks"]) == (0, 2)
    with kvctl.daemon.connect(MODEL) as session, session.get(tokens_of(3, 4)) as lease:
        assert len(lease) == 4
        held = kvctl(["delete", *long], exit_code=FAILED)
        assert "kept 4 under lease" in held.out
    assert eventually(lambda: kvctl.daemon.status().leases == 0)
    assert kvctl.json(["delete", *long])["deleted_blocks"] == 4


def test_what_was_deleted_does_not_come_back_after_a_crash(tmp_path: Path, capfdbinary: Any) -> None:
    some_bytes(tmp_path / "in", 100_000)
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        kvctl(["put", "--name", "gone", "--durability", "always", str(tmp_path / "in")])
        kvctl("delete --name gone")
        daemon.kill9()
        daemon.restart()
        kvctl(["get", "--name", "gone", str(tmp_path / "out")], exit_code=MISS)
        assert daemon.status().blocks == 0


def test_a_block_just_put_can_be_deleted_at_once(daemon: RunningDaemon) -> None:
    """The block is pinned while it is written to NVMe: deleting waits for that instead of keeping it."""
    with daemon.connect(MODEL) as session:
        payloads = [np.full(BLOCK_BYTES, block, np.uint8) for block in range(8)]
        for conversation in range(50, 55):
            tokens = tokens_of(conversation, 8)
            assert session.put(tokens, payloads=payloads, durability="batch").stored_blocks == 8
            session.get(tokens).release()
            deleted = session.delete(tokens)
            assert (deleted.blocks, deleted.leased, deleted.missing) == (8, 0, 0)
            assert deleted.payload_bytes == 8 * BLOCK_BYTES
            assert session.delete(tokens).missing == 8


# Mistakes


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["put", "--name", "x", "{tmp}/not there"], USAGE, "cannot read {tmp}/not there: No such file or directory"),
        (["put", "--name", "x", "{tmp}"], USAGE, "Is a directory"),
        (["put", "--name", "", "{tmp}/small"], USAGE, "a name has 1 to"),
        (["get", "--name", "small", "{tmp}/no/such/folder/out"], FAILED, "cannot write"),
        (["get", "--name", "small", "{tmp}"], USAGE, "is a directory"),
        (["get", "--tokens", "1,2,3", "--fingerprint", "{model}"], USAGE, "3 tokens, shorter than one block of 64"),
        (["get", "--tokens", "1,two", "--fingerprint", "{model}"], USAGE, "'two' is no token id"),
        (["get", "--tokens", "9-1", "--fingerprint", "{model}"], USAGE, "'9-1' is no token id or run"),
        (["get", "--tokens", "0-99999999", "--fingerprint", "{model}"], USAGE, "more than"),
        (["get", "--tokens", "4294967296", "--fingerprint", "{model}"], USAGE, "is no token id"),
        (["get", "--tokens-file", "{tmp}/none", "--fingerprint", "{model}"], USAGE, "No such file"),
        (["get", "--tokens-file", "{tmp}/binary", "--fingerprint", "{model}"], USAGE, "is not text"),
        (["get", "--tokens", "0-63", "--fingerprint", "{tmp}/small"], USAGE, "fingerprint is not JSON"),
        (["get", "--tokens", "0-63", "--fingerprint", "model.jsn"], USAGE, "neither a file nor a hex digest"),
        (["get", "--tokens", "0-63", "--fingerprint", "0123456789"], FAILED, "knows no fingerprint"),
        (["get", "--tokens", "0-63", "--fingerprint", "{model}", "--group", "4"], USAGE, "no layer group 4; it has: 0"),
        (
            ["put", "--tokens", "0-63", "--fingerprint", "{model}", "{tmp}/small"],
            USAGE,
            "5 bytes are not 1 to 1 blocks",
        ),
        (["put", "--tokens", "0-63", "--fingerprint", "{model}", "{tmp}/large"], USAGE, "are not 1 to 1 blocks"),
        (["put", "--name", "big", "--block-size", "2MiB", "{tmp}/large"], FAILED, "over the daemon's limit"),
    ],
)
def test_a_mistake_gets_one_line_that_says_what_to_do(
    kvctl: Kvctl, tmp_path: Path, fingerprint: str, words: list[str], exit_code: int, said: str
) -> None:
    (tmp_path / "small").write_bytes(b"small")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    some_bytes(tmp_path / "large", 3 * MIB)
    if words[:3] == ["get", "--name", "small"]:
        kvctl(["put", "--name", "small", str(tmp_path / "small")])
    places = {"tmp": str(tmp_path), "model": fingerprint}
    wrong = kvctl([word.format(**places) for word in words], exit_code=exit_code)
    assert said.format(**places) in wrong.err
    assert wrong.err.count("\n") == 1 and not wrong.out


def test_no_room_is_said_and_leaves_nothing(tmp_path: Path, capfdbinary: Any) -> None:
    some_bytes(tmp_path / "in", 12 * MIB)
    with running_daemon("host.capacity=8MiB", "host.staging=2MiB", "nvme.enabled=false") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        wrong = kvctl(
            ["--timeout", "5", "put", "--name", "n", "--block-size", "64KiB", str(tmp_path / "in")], exit_code=FAILED
        )
        assert "none of its blocks is kept" in wrong.err
        assert daemon.status().blocks == 0


def test_a_put_that_loses_its_daemon_is_status_3(
    tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(os.urandom(3 * MIB // 2))
    with running_daemon() as running:
        monkeypatch.setattr("kvctl.put.Progress.say", lambda *_: running.kill9())  # after the first blocks
        put = f"put --name lost --block-size 512KiB {tmp_path / 'in'}"
        said = Kvctl(running, capfdbinary)(put, exit_code=UNREACHABLE).err
        assert "lost was not stored, put it again: the daemon went away" in said
        monkeypatch.undo()
        running.start()
        assert "lost: stored" in Kvctl(running, capfdbinary)(put).out


def test_no_daemon_is_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(b"x")
    for words in (["put", "--name", "x", str(tmp_path / "f")], ["get", "--name", "x"], ["delete", "--name", "x"]):
        assert main(["--socket-dir", str(tmp_path), *words]) == UNREACHABLE
        assert "kvstored serve --socket-dir" in capsys.readouterr().err


def test_a_stopped_daemon_is_status_3_in_time(kvctl: Kvctl) -> None:
    with kvctl.daemon.frozen():
        assert "does not answer" in kvctl("--timeout 0.3 get --name x", exit_code=UNREACHABLE).err


def _blocks_request() -> Any:
    from kvstore_proto.v1 import admin_pb2

    return admin_pb2.BlocksRequest()


@pytest.fixture
def as_other_user(kvctl: Kvctl) -> Run:
    """kvctl as another user, who has no operator's rights."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        become = ["setpriv", "--reuid=65534", "--regid=0", "--clear-groups"]
        call = [sys.executable, "-m", "kvctl.main", "--socket-dir", str(kvctl.daemon.socket_dir), *words]
        return subprocess.run([*become, *call], capture_output=True, timeout=60, cwd="/")

    if shutil.which("setpriv") is None or run("--version").returncode != OK:
        pytest.skip("another user cannot run this installation")
    kvctl.daemon.directory.chmod(0o711)
    return run


def test_the_tenant_is_the_calling_users(kvctl: Kvctl, as_other_user: Run, tmp_path: Path) -> None:
    """Nobody else finds what one user puts, not even root; and the user takes no operator's rights."""
    source = Path(tempfile.gettempdir()) / f"{tmp_path.name}-{os.getpid()}"
    source.write_bytes(b"nobody's")
    try:
        source.chmod(0o644)
        assert as_other_user("put", "--name", "mine", str(source)).returncode == OK
    finally:
        source.unlink()
    assert as_other_user("get", "--name", "mine").stdout == b"nobody's"
    assert kvctl.json(["get", "--name", "mine", str(tmp_path / "out")], exit_code=MISS)["reason"] == "never_stored"
    kvctl("delete --name mine", exit_code=MISS)
    assert as_other_user("delete", "--name", "mine").returncode == OK


@pytest.mark.slow
def test_a_user_may_have_his_own_blocks_and_misses_explained(kvctl: Kvctl, as_other_user: Run, tmp_path: Path) -> None:
    """The user needs no operator's rights for his own tenant, and sees nothing of another's."""
    (tmp_path / "secret").write_bytes(b"root's")
    kvctl(["put", "--name", "root's", str(tmp_path / "secret")])
    with kvctl.daemon.connect(MODEL) as session:
        assert session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL)).stored_blocks == 2
        assert session.lookup(tokens_of(7, 2)).blocks == 0
    assert as_other_user("put", "--name", "mine", "/etc/hostname").returncode == OK
    assert as_other_user("get", "--name", "not there").returncode == MISS
    mine = json.loads(as_other_user("--json", "explain", "--name", "mine").stdout)
    assert mine["usable_blocks"] == 1 and mine["blocks"][0]["tenant"] == "uid-65534"
    assert mine["blocks"][0]["block"]["location"] == "" and mine["blocks"][0]["copies"][0]["location"] == ""
    key = mine["blocks"][0]["key"]
    assert b"is stored" in as_other_user("explain", key[:12]).stdout
    recent = json.loads(as_other_user("--json", "explain", "--recent", "50").stdout)["misses"]
    assert {miss["tenant"] for miss in recent} == {"uid-65534"} and recent[0]["cause"] == "never_stored"
    theirs = kvctl.json("blocks --tenant uid-0")["blocks"][0]["key"]
    assert json.loads(as_other_user("--json", "explain", theirs).stdout)["cause"] == "never_stored"
    assert b"no block begins with" in as_other_user("explain", theirs[:12]).stderr
    assert b"each needs 32 digits" in as_other_user("explain", key[:12], key[:13]).stderr
    refused = as_other_user("explain", "--recent", "--tenant", "uid-0")
    assert (refused.returncode, b"its own tenant, uid-65534, only" in refused.stderr) == (FAILED, True)
    digest = MODEL.digest().hex()
    assert b"knows no fingerprint" in as_other_user("explain", "--tokens", "0-127", "--fingerprint", digest).stderr
    kvctl("explain --tokens 0-127 --fingerprint " + digest)


def test_other_bytes_under_a_names_key_are_reported_and_can_be_replaced(kvctl: Kvctl, tmp_path: Path) -> None:
    data = some_bytes(tmp_path / "in", 5000)
    with kvctl.daemon.connect(OBJECTS) as session:
        assert session.put(object_tokens("junk", 1), payloads=[b"no head at all" * 10]).stored_blocks == 1
    assert "no object that kvctl can read" in kvctl("get --name junk", exit_code=FAILED).err
    assert "--replace" in kvctl(["put", "--name", "junk", str(tmp_path / "in")], exit_code=FAILED).err
    kvctl(["put", "--name", "junk", "--replace", str(tmp_path / "in")])
    assert kvctl("get --name junk").bytes == data
    kvctl("delete --name junk")


def test_an_object_that_is_leased_cannot_be_replaced_and_stays_whole(kvctl: Kvctl, tmp_path: Path) -> None:
    data = some_bytes(tmp_path / "in", 200_000, 1)
    some_bytes(tmp_path / "other", 200_000, 2)
    kvctl(["put", "--name", "held", "--block-size", "64KiB", str(tmp_path / "in")])
    with kvctl.daemon.connect(OBJECTS) as session, session.get(object_tokens("held", 4)) as lease:
        assert len(lease) == 4
        refused = kvctl(["put", "--name", "held", "--replace", str(tmp_path / "other")], exit_code=FAILED)
        assert "cannot be deleted now: it is under lease" in refused.err
        assert kvctl("get --name held").bytes == data
    assert eventually(lambda: kvctl.daemon.status().leases == 0)
    kvctl("delete --name held")
