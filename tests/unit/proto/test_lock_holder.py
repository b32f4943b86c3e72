"""/proc/locks shows a file's own lock, on file systems with and without a device of their own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore_proto.lock_holder import UNLOCKED, UNSEEN, _is_file, lock_holder


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def line(path: Path, pid: int, *, kind: str = "FLOCK", mode: str = "WRITE", further: int = 0) -> str:
    status = path.stat()
    device = f"{os.major(status.st_dev) + further:02x}:{os.minor(status.st_dev):02x}"
    return f"1: {kind}  ADVISORY  {mode} {pid} {device}:{status.st_ino} 0 EOF\n"


@pytest.mark.parametrize(
    ("listed", "holder"),
    [({}, 4711), ({"further": 1}, UNLOCKED), ({"kind": "POSIX"}, UNLOCKED), ({"mode": "READ"}, UNLOCKED)],
)
def test_a_lock_is_of_one_file_of_one_file_system(
    lock: Path, tmp_path: Path, listed: dict[str, int | str], holder: int
) -> None:
    locks = tmp_path / "locks"
    locks.write_text(line(lock, 4711, **listed))  # type: ignore[arg-type]
    assert lock_holder(tmp_path / "missing", lock, locks=locks) == holder
    assert lock_holder(tmp_path / "missing", locks=locks) == UNLOCKED


@pytest.mark.parametrize("shown", [0, -1])
def test_a_process_of_another_namespace_has_no_number(lock: Path, tmp_path: Path, shown: int) -> None:
    locks = tmp_path / "locks"
    locks.write_text(line(lock, shown))
    assert lock_holder(lock, locks=locks) == UNSEEN


def test_on_anonymous_devices_the_inode_must_do() -> None:
    """The file's device on btrfs and overlay is another one than what the kernel lists for its locks."""
    own = SimpleNamespace(st_dev=os.makedev(0, 41), st_ino=260)
    assert _is_file("00:1f:260", own) and not _is_file("00:1f:261", own)  # type: ignore[arg-type]
    on_disk = SimpleNamespace(st_dev=os.makedev(8, 1), st_ino=260)
    assert not _is_file("08:02:260", on_disk) and not _is_file("00:1f:260", on_disk)  # type: ignore[arg-type]


def test_the_kernel_lists_the_lock_of_this_process(lock: Path) -> None:
    import fcntl

    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holder(lock) in (os.getpid(), UNSEEN)
    assert lock_holder(lock) == UNLOCKED
