"""A bad medium or a wrong directory: no room, no right, no direct I/O, errors, two daemons. Said clearly, survived."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers import failpoints
from kvstore_tiers.base import ERRORS_IN_A_ROW, Outcome, OutcomeKind, Slot, TierState
from kvstore_tiers.nvme import DirectoryInUse, DirectoryUnusable, NvmeTier
from kvstore_tiers.nvme import directory as directory_module
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.health import RETRY_FULL_AFTER_S
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.stored_blocks import stored_slot

pytestmark = pytest.mark.usefixtures("nothing_stays_armed")
CAPACITY_BYTES = 3 << 20
BLOCK = block(1, 10_000)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def open_tier(path: Path, clock: Clock | None = None, **options: bool) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, clock=clock or Clock(), **options)


def write_outcome(tier: NvmeTier, number: int = 1) -> tuple[Slot, Outcome]:
    header, payload = block(number, 10_000)
    slot = tier.allocate(16384)
    assert slot is not None
    return slot, finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))


def test_a_full_disk_fails_the_write_and_is_tried_again_later(tmp_path: Path) -> None:
    clock = Clock()
    with closing(open_tier(tmp_path, clock)) as tier:
        failpoints.arm("nvme.slab-allocated=error:ENOSPC")
        slot, outcome = write_outcome(tier)
        assert (outcome.kind, outcome.errno) == (OutcomeKind.FAILED, errno.ENOSPC)
        assert tier.statistics().state is TierState.FULL
        assert "No space left" in tier.statistics().message
        tier.free(slot)
        assert tier.statistics().used_by["free"] == 0, "a slab that was never made holds nothing"
        assert not list((tmp_path / "slabs").iterdir())
        assert tier.allocate(16384) is None
        failpoints.disarm()
        clock.now_s += RETRY_FULL_AFTER_S
        assert write_outcome(tier)[1].ok
        assert tier.statistics().state is TierState.OK
        assert finish(tier.sync).ok
    assert check_directory(tmp_path) == []


def test_a_full_disk_leaves_the_slabs_that_are_there(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        assert put(tier, *BLOCK)
        failpoints.arm("nvme.slab-allocated=error:ENOSPC")
        header, payload = block(2, 100_000)
        slot = tier.allocate(106496)
        assert slot is not None
        assert not finish(lambda done: tier.write(slot, header, [segment_of(payload)], done)).ok
        assert tier.statistics().state is TierState.FULL
        assert put(tier, *block(3, 10_000)), "slab 1 still has free slots"


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from tests.faults.test_nvme_medium import open_tier, write_outcome\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "tier = open_tier(Path(sys.argv[1]))\n"
        "outcome = write_outcome(tier)[1]\n"
        "print(outcome.kind.value, tier.statistics().state.value)\n"
        "tier.close()\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), root, *sys.path], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["failed", "full"], done.stderr


def test_write_errors_make_it_read_only_and_reads_go_on(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = stored_slot(tier, *BLOCK)
        failpoints.arm("nvme.before-slot-write=error:EIO")
        for number in range(ERRORS_IN_A_ROW):
            assert tier.statistics().state is TierState.OK
            tier.free(write_outcome(tier, number + 2)[0])
        assert tier.statistics().state is TierState.READ_ONLY
        assert tier.statistics().errors == ERRORS_IN_A_ROW
        assert tier.allocate(16384) is None
        assert get(tier, slot, BLOCK[0].key, 10_000)[0].ok


def test_a_read_only_file_system_is_noticed_at_once(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        failpoints.arm("nvme.before-slot-write=error:EROFS")
        assert write_outcome(tier)[1].errno == errno.EROFS
        assert tier.statistics().state is TierState.READ_ONLY


def test_read_errors_fail_the_tier(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = stored_slot(tier, *BLOCK)
        failpoints.arm("nvme.read=error:EIO")
        for _ in range(ERRORS_IN_A_ROW):
            outcome, _ = get(tier, slot, BLOCK[0].key, 10_000)
            assert (outcome.kind, outcome.errno) == (OutcomeKind.FAILED, errno.EIO)
        assert tier.statistics().state is TierState.FAILED


@pytest.mark.parametrize("where", ["nvme.after-data-sync", "nvme.between-records", "nvme.after-records-write"])
def test_a_failed_sync_says_so_and_the_next_one_makes_up_for_it(tmp_path: Path, where: str) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = stored_slot(tier, *BLOCK)
        failpoints.arm(f"{where}=error:EIO@1")
        assert finish(tier.sync).kind is OutcomeKind.FAILED
        assert finish(tier.sync).ok
    with closing(open_tier(tmp_path)) as tier:
        assert [slot for slot, _ in tier.recover()] == [slot]


def test_a_medium_without_direct_io_works_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def without_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(directory_module.os, "open", without_direct)
    with closing(open_tier(tmp_path / "a")) as tier:
        slot = stored_slot(tier, *BLOCK)
        assert get(tier, slot, BLOCK[0].key, 10_000)[0].ok
        assert "no direct I/O" in tier.statistics().message
    with pytest.raises(DirectoryUnusable, match="without direct I/O"):
        open_tier(tmp_path / "b", require_direct=True)


def test_a_second_daemon_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)):
        with pytest.raises(DirectoryInUse, match=f"in use by process {os.getpid()}") as refused:
            open_tier(tmp_path)
        assert refused.value.holder_pid == os.getpid()
    open_tier(tmp_path).close()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("999999\n")
    open_tier(tmp_path).close()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match="give a directory"):
        open_tier(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_directory_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(DirectoryUnusable, match="Permission denied"):
                open_tier(Path(path))
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("error", ["EROFS", "ENOSPC", "EDQUOT", "EIO", "EACCES"])
def test_what_a_recovery_cannot_repair_is_served_and_repaired_before_anything_is_written(
    tmp_path: Path, error: str
) -> None:
    tier = open_tier(tmp_path)
    slot = stored_slot(tier, *BLOCK)
    assert finish(tier.sync).ok
    tier.close()
    (tmp_path / "seal").unlink()
    failpoints.arm(f"nvme.recover-before-repair=error:{error}@1-2")
    with closing(open_tier(tmp_path)) as tier:
        assert tier.statistics().state is TierState.READ_ONLY and "cannot be written" in tier.statistics().message
        assert [slot for slot, _ in tier.recover()] == [slot] and get(tier, slot, BLOCK[0].key, 10_000)[0].ok
        assert tier.allocate(16384) is None
        assert not finish(tier.probe).ok and tier.statistics().state is TierState.READ_ONLY
        assert finish(tier.probe).ok and tier.statistics().state is TierState.OK
        assert put(tier, *block(2, 10_000)) and finish(tier.sync).ok
    assert check_directory(tmp_path) == []


def test_a_seal_that_cannot_be_removed_holds_writes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = stored_slot(tier, *BLOCK)
        assert finish(tier.sync).ok
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "seal":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        tier = open_tier(tmp_path)
        assert tier.allocate(16384) is None and get(tier, slot, BLOCK[0].key, 10_000)[0].ok
        assert not finish(tier.probe).ok
        tier.close()
    assert (tmp_path / "seal").exists(), "nothing was changed, so it still holds"
    with closing(open_tier(tmp_path)) as tier:
        assert put(tier, *block(2, 10_000))
    assert check_directory(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_files_that_this_user_may_only_read_are_served_until_it_may_write() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "nvme"
        tier = open_tier(path)
        slot = stored_slot(tier, *BLOCK)
        assert finish(tier.sync).ok
        tier.close()
        entries = [Path(place), path, path / "slabs", *(path / "slabs").iterdir(), *path.iterdir()]
        for entry in entries:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
        os.seteuid(65534)
        try:
            with closing(open_tier(path)) as tier:
                assert tier.statistics().state is TierState.READ_ONLY
                assert get(tier, slot, BLOCK[0].key, 10_000)[0].ok and not finish(tier.probe).ok
                with pytest.raises(DirectoryInUse):
                    open_tier(path)
                os.seteuid(0)
                for entry in entries:
                    os.chown(entry, 65534, 65534)
                os.seteuid(65534)
                assert finish(tier.probe).ok and put(tier, *block(2, 10_000)) and finish(tier.sync).ok
        finally:
            os.seteuid(0)
        assert check_directory(path) == []
