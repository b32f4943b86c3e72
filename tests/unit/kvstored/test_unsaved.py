"""Small files that cannot be written: nothing is left beside them, each is named once, and all are tried again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from kvstore_proto.replaced_file import remove_leftover
from kvstore_proto.state_identity import IDENTITY_FILE, read_identity
from kvstore_tiers import failpoints
from kvstore_tiers.nvme import directory
from kvstore_tiers.replaced_file import replace_file, replaced_file
from kvstored import sockets
from kvstored.clients.tenants import Peer, TenantDirectory, keyring
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.listed_users import ListedUsers
from kvstored.config import TenantSection
from kvstored.lifetime.instance import AlreadyRunning, InstanceLock
from kvstored.unsaved import Unsaved

pytestmark = pytest.mark.usefixtures("nothing_stays_armed")
FULL = OSError(errno.ENOSPC, "No space left on device")
ERRORS = ["ENOSPC", "EDQUOT", "EROFS", "EIO"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, error: str, durable: bool) -> None:
    path = tmp_path / "seal"
    replace_file(path, b"old", durable=durable)
    failpoints.arm(f"file.seal=error:{error}")
    with pytest.raises(OSError) as failed:
        replace_file(path, b"new", durable=durable)
    assert failed.value.filename == str(path) and failed.value.errno == getattr(errno, error)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    failpoints.disarm()
    replace_file(path, b"new", durable=durable)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_fills_up_while_a_file_is_written(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    path = tmp_path / "identity.json"
    (tmp_path / "identity.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"identity\.json'") as failed, replaced_file(path) as file:
        file.write(bytes(1 << 20))
    assert failed.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_a_leftover_that_cannot_be_removed_is_left(tmp_path: Path) -> None:
    remove_leftover(tmp_path / "a")
    (tmp_path / "a.new").mkdir()
    remove_leftover(tmp_path / "a")
    (tmp_path / "b.new").touch()
    remove_leftover(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a.new"]


def test_each_file_is_named_once_until_it_can_be_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    unsaved, path = Unsaved(), Path("/state/seal")
    for _ in range(3):
        unsaved.failed(path, FULL, "labels are lost")
    said = "/state/seal cannot be written (No space left on device): labels are lost"
    assert unsaved.sentences() == [said] and caplog.messages == [said]
    unsaved.saved(path)
    unsaved.saved(path)
    assert unsaved.sentences() == [] and caplog.messages[1:] == ["/state/seal can be written again"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def until_written(run: Coroutine[None, None, None], name: str, failures: int, unsaved: Unsaved) -> None:
    """Run what writes the file `name`, let more than `failures` writes fail, and then wait for one that does not."""
    task = asyncio.create_task(run)
    await until(lambda: failpoints.hits(f"file.{name}") > failures)
    failpoints.disarm()
    await until(lambda: not unsaved.sentences())
    task.cancel()


def test_a_check_value_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "RETRY_S", 0.0)
    state, nvme = tmp_path / "state", tmp_path / "nvme"
    for place in (state, nvme):
        place.mkdir()
    Keyring(state, nvme).begin()
    for place in (state, nvme):
        (place / IDENTITY_FILE).unlink()
    unsaved = Unsaved()
    failpoints.arm("file.identity.json=error:ENOSPC")
    ring = Keyring(state, nvme, unsaved=unsaved)
    ring.begin()
    assert [sentence.partition(" ")[0] for sentence in unsaved.sentences()] == [str(state / IDENTITY_FILE)]

    asyncio.run(until_written(ring.run(), "identity.json", 4, unsaved))
    assert read_identity(state / IDENTITY_FILE) == read_identity(nvme / IDENTITY_FILE) is not None


def test_what_a_restart_would_not_find_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that is newly listed under a name whose blocks have another one by now gets an identity of its own."""
    monkeypatch.setattr(keyring, "RETRY_S", 0.0)
    before = Keyring(tmp_path)
    before.bind("new", "old")
    before.begin()
    failpoints.arm("file.identity.json=error:ENOSPC")
    ring = Keyring(tmp_path)
    sections = (TenantSection("old", uids=(7,)), TenantSection("new", uids=(8,)))
    tenants = TenantDirectory(tmp_path, sections, "by-uid", ring)
    ring.begin()
    caller = Peer(1, 7, 7)
    assert tenants.resolve(caller) is None and "identity.json cannot be written" in tenants.why_refused(caller)
    assert tenants.named("old") is None and tenants.is_named("old"), "a token for it is no mistake"
    assert tenants.resolve(Peer(1, 8, 8)) is not None and tenants.resolve(Peer(1, 9, 9)) is not None

    async def run() -> None:
        task = asyncio.create_task(ring.run())
        failpoints.disarm()
        await until(lambda: tenants.resolve(caller) is not None)
        task.cancel()

    asyncio.run(run())
    assert Keyring(tmp_path).bound() == ring.bound() and set(ring.bound()) == {"old", "new"}


def test_a_new_secret_has_to_be_on_the_medium(tmp_path: Path) -> None:
    failpoints.arm("file.secret=error:EDQUOT")
    with pytest.raises(OSError, match="a new secret has to be written before anything is stored") as refused:
        Keyring(tmp_path)
    assert refused.value.filename == str(tmp_path / "secret") and list(tmp_path.iterdir()) == []


def test_a_directory_is_locked_where_no_lock_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise FULL
        return real(path, flags, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(directory.os, "open", full)
        first = InstanceLock(tmp_path)
        with pytest.raises(AlreadyRunning):
            InstanceLock(tmp_path)
    with pytest.raises(AlreadyRunning):
        InstanceLock(tmp_path)  # there is room again, and it made the file
    assert (tmp_path / "lock").exists()
    first.release()
    InstanceLock(tmp_path).release()


def test_a_mark_keeps_the_space_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").write_text("123456789012\n")
    cuts: list[int] = []
    real = os.ftruncate

    def cut(descriptor: int, length: int) -> None:
        cuts.append(length)
        real(descriptor, length)

    monkeypatch.setattr(directory.os, "ftruncate", cut)
    InstanceLock(tmp_path).release()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n" and 0 not in cuts


def test_a_socket_that_cannot_be_removed_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(sockets.Path, "unlink", unlink)
    sockets.remove_socket(tmp_path / "data.sock")
    assert f"{tmp_path}/data.sock cannot be removed (Read-only file system)" in caplog.text


def test_a_listing_that_cannot_be_written_keeps_who_was_in_it(tmp_path: Path) -> None:
    """Also a user that was listed in between is found to be listed no more, by whoever reads the file."""
    unsaved, before = Unsaved(), [TenantSection("team", uids=(1, 2)), TenantSection("pool", readers=("team",))]
    listed = ListedUsers(tmp_path, unsaved)
    assert listed.narrowed(before) == set(), "nobody was listed"
    listed.settle(before)
    listed.widen([TenantSection("team", uids=(1, 3))])
    assert ListedUsers(tmp_path, unsaved).narrowed([TenantSection("team", uids=(1, 2)), before[1]]) == {"team"}
    failpoints.arm("file.listing.json=error:ENOSPC")
    with pytest.raises(OSError, match=r"listing\.json"):
        listed.widen([TenantSection("other", socket=True)])
    listed.settle(before[:1])
    assert "listing.json cannot be written (No space left on device" in unsaved.sentences()[0]
    assert ListedUsers(tmp_path, unsaved).narrowed(before[:1]) == {"team", "pool"}
    failpoints.disarm()
    listed.settle(before)
    assert unsaved.sentences() == [] and ListedUsers(tmp_path, unsaved).narrowed(before) == set()


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"[" * 100_000, b'{"team": [[1, []]]}', b'{"team": 5}', b'{"team": [[1]]}'],
    ids=range(7),
)
def test_a_spoilt_listing_stands_for_everybody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "listing.json").write_bytes(content)
    listed = ListedUsers(tmp_path, Unsaved())
    assert listed.narrowed([TenantSection("team", uids=(1,))]) == {"team"}
    listed.settle([TenantSection("team", uids=(1,))])
    assert ListedUsers(tmp_path, Unsaved()).narrowed([TenantSection("team", uids=(1,))]) == set()
