"""Records that another process judged before the tier was opened: used while they are true, left alone when not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore_tiers.nvme import DirectoryInUse, NvmeTier, early_scan
from kvstore_tiers.nvme.directory_files import slab_path
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstore_tiers.nvme.slab_file import SlabFile, find_superblock
from kvstore_tiers.testing.transfers import finish
from tests.reference.examples import each_nth
from tests.reference.stored_blocks import recovered_numbers, store_numbers

CAPACITY_BYTES = 8 << 20
SLAB_BYTES = 1 << 20
BLOCKS = range(1, 201)  # of three slabs


@contextmanager
def opened(path: Path, ahead: EarlyRecordScan | None = None) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=1, early_scan=ahead)) as tier:
        yield tier


def test_the_scanning_process_loads_no_module_for_sockets() -> None:
    program = "import sys; from kvstore_tiers.nvme.shared_columns import SlabScanner; sys.exit('socket' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def store(tier: NvmeTier, *numbers: int) -> None:
    store_numbers(tier, numbers)
    assert finish(tier.sync).ok


def slab(directory: Path, number: int) -> Path:
    return slab_path(directory / "slabs", number)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    with opened(path) as tier:
        store(tier, *BLOCKS)
    assert len(list((path / "slabs").iterdir())) == 3
    return path


@pytest.fixture
def directory(stored: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slabs whose records are read by who opens the tier."""
    read: list[int] = []
    original = SlabFile.read_records_into

    def watched(self: SlabFile, buffer: memoryview, first: int) -> None:
        read.append(self.superblock.number)
        original(self, buffer, first)

    monkeypatch.setattr(SlabFile, "read_records_into", watched)
    return read


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slabs are worth a process."""
    monkeypatch.setattr(early_scan, "LEAST_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def begun(directory: Path) -> EarlyRecordScan:
    ahead = EarlyRecordScan.begin(directory)
    assert ahead is not None
    return ahead


def done(directory: Path) -> EarlyRecordScan:
    """Everything that can be judged ahead has been."""
    ahead = begun(directory)
    os.waitid(os.P_PID, ahead._pid, os.WEXITED | os.WNOWAIT)
    return ahead


def test_what_was_judged_ahead_is_not_read_again(directory: Path, read_here: list[int]) -> None:
    with opened(directory, done(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert read_here == []
        store(tier, 1000)
    with opened(directory) as tier:
        assert recovered_numbers(tier) == {*BLOCKS, 1000}
        assert read_here == [1, 2, 3]


@pytest.mark.parametrize("cut", [False, True])
def test_judged_ahead_and_judged_here_are_the_same(
    directory: Path, read_here: list[int], cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Column by column, for any numbering of the origins, with holes in each slab; and one that was cut."""
    with opened(directory) as tier:
        held = tier.recover_columns()
        for at in range(3, len(held), 7):
            tier.free(held.slot_of(at))
        assert finish(tier.sync).ok

    def columns(ahead: EarlyRecordScan | None) -> list[object]:
        read_here.clear()
        with opened(directory, ahead) as tier:
            assert bool(read_here) == (ahead is None)
            found = tier.recover_columns()
            origins = [found.origins[number] for number in found.origin]
            named = [origin.fingerprint + origin.tenant for origin in origins]
            names = ("key", "parent", "depth", "offset", "payload_bytes", "generation")
            books = [bytes(each) for slab in tier._space.slabs.values() for each in (slab.states, slab.generations)]
            return [*named, *(getattr(found, name).tobytes() for name in names), *books, tier.recovery_report]

    if cut:
        superblock = find_superblock(slab(directory, 2))
        assert not isinstance(superblock, str)
        os.truncate(slab(directory, 2), superblock.slot_offset(20))
    other = tmp_path_factory.mktemp("other")  # since recovery repairs what it finds
    shutil.copytree(directory, other, dirs_exist_ok=True)
    report, directory = columns(done(directory)), other
    assert report == columns(None)


def test_slabs_are_shared_with_who_opens_early(
    directory: Path, read_here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here with one that got nowhere, and does not go on."""
    monkeypatch.setattr(early_scan, "_SILENCE_S", 0.05)
    ahead = begun(directory)
    os.kill(ahead._pid, signal.SIGSTOP)
    with opened(directory, ahead) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert sorted(read_here) == [1, 2, 3]


def test_what_it_has_begun_is_waited_for_and_the_rest_is_taken(directory: Path, read_here: list[int]) -> None:
    for _ in range(3):
        read_here.clear()
        ahead = begun(directory)
        taken = ahead.claim()  # all that it returns is report: no process has judged it yet
        with opened(directory, ahead) as tier:
            assert recovered_numbers(tier) == set(BLOCKS)
            assert len(read_here) == len(set(read_here)), "nothing is read twice"
            assert taken is None or taken in read_here


def test_columns_of_another_slab_are_not_taken(directory: Path, read_here: list[int]) -> None:
    ahead = done(directory)
    os.pwrite(ahead._memory, bytes(SUPERBLOCK_BYTES), 0)  # where the first one's superblock is
    with opened(directory, ahead) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert len(read_here) == 1


def test_names_that_are_no_slabs_are_left_alone(directory: Path) -> None:
    for name in ("20261122140422.slab", "1.slab", "notes.slab"):
        (directory / "slabs" / name).write_bytes(slab(directory, 1).read_bytes())
    with opened(directory, done(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)


def test_it_ends_where_sigchld_is_ignored(directory: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        ahead = begun(directory)
        with opened(directory, ahead) as tier:
            assert recovered_numbers(tier) == set(BLOCKS)
        ahead.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_where_no_process_can_be_had_nothing_is_left_open(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    fds = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_spawn", refuse)
    assert EarlyRecordScan.begin(directory) is None
    assert len(os.listdir("/proc/self/fd")) == fds


def test_it_has_neither_the_manager_s_descriptors_nor_its_variables(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    seen: dict[str, object] = {}

    def spawned(path: str, command: list[str], variables: dict[str, str], **how: object) -> int:
        seen.update(command=command, variables=variables, **how)
        raise OSError(errno.EAGAIN, "seen")

    monkeypatch.setattr(os, "posix_spawn", spawned)
    assert EarlyRecordScan.begin(directory) is None
    assert not {"LISTEN_PID", "LISTEN_FDS", "NOTIFY_SOCKET"} & set(seen["variables"])  # type: ignore[call-overload]
    closed = [action for action in seen["file_actions"] if action[0] == os.POSIX_SPAWN_CLOSE]  # type: ignore[attr-defined]
    assert [fd for _, fd in closed] == [3, 4]
    assert "-P" in seen["command"]  # type: ignore[operator]


def test_what_a_process_that_died_did_not_report_is_judged_here(directory: Path, read_here: list[int]) -> None:
    ahead = begun(directory)
    os.kill(ahead._pid, signal.SIGKILL)
    taken = ahead.claim()  # as if it had begun with this one
    with opened(directory, ahead) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert taken is None or taken in read_here


def test_a_line_that_was_cut_short_is_ignored(
    directory: Path, read_here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_early(_: Path, queue: int, memory: int, reporting: int) -> int:
        while os.read(queue, 4):
            pass
        os.write(reporting, b"[1, [1, 2")
        return os.posix_spawn("/bin/true", ["true"], {})

    monkeypatch.setattr(early_scan, "_start", dies_early)
    with opened(directory, begun(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert sorted(read_here) == [1, 2, 3]


def test_nothing_is_left_of_it(directory: Path) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    for ahead in (begun(directory), done(directory)):
        pid = ahead._pid
        ahead.close()
        ahead.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_memory_of_verdicts_is_free_once_they_are_taken(directory: Path) -> None:
    with opened(directory, done(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        files = [os.readlink(each) for each in map(str, Path("/proc/self/fd").iterdir()) if os.path.lexists(each)]
        assert "kvstored-judged" not in Path("/proc/self/maps").read_text() + str(files)


def test_a_slab_that_changed_meanwhile_is_read_anew(directory: Path, read_here: list[int]) -> None:
    ahead = done(directory)
    with opened(directory) as tier:
        store(tier, 1000)
        columns = tier.recover_columns()
        tier.free(columns.slot_of(0))
        assert finish(tier.sync).ok
    read_here.clear()
    with opened(directory, ahead) as tier:
        assert recovered_numbers(tier) == {*BLOCKS, 1000} - {int.from_bytes(columns.key[0].tobytes(), "big")}
        assert read_here == [1, 2, 3]


@pytest.mark.parametrize("by", each_nth(["writing", "rename"], 2))
def test_what_was_restored_meanwhile_is_read_anew(directory: Path, read_here: list[int], by: str) -> None:
    """The operator copies slabs back and takes no lock, so that the mark is as before."""
    second = slab(directory, 2)
    backup = second.read_bytes()
    with opened(directory) as tier:
        columns = tier.recover_columns()
        freed = next(at for at in range(len(columns)) if columns.container[at] == 2)
        tier.free(columns.slot_of(freed))
        assert finish(tier.sync).ok
    ahead = done(directory)
    if by == "rename":
        (directory / "restored").write_bytes(backup)
        (directory / "restored").rename(second)
    else:
        second.write_bytes(backup)
    read_here.clear()
    with opened(directory, ahead) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)
        assert read_here == [2]


def test_another_directory_is_not_taken_for_this_one(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with opened(other) as tier:
        store(tier, 5)
    with opened(other, done(directory)) as tier:
        assert recovered_numbers(tier) == {5}


def test_there_is_nothing_to_judge_ahead(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert EarlyRecordScan.begin(empty / "absent") is None
    with opened(empty):
        assert EarlyRecordScan.begin(empty) is None, "another process has the directory open"
    assert EarlyRecordScan.begin(empty) is None, "no slabs"
    monkeypatch.setattr(early_scan, "LEAST_BYTES", 1 << 20)
    assert EarlyRecordScan.begin(directory) is None, "little to judge"
    monkeypatch.setattr(early_scan, "LEAST_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert EarlyRecordScan.begin(directory) is None, "it would have the core that the modules need"


@pytest.mark.parametrize("damage", each_nth(["superblocks", "cut", "slots", "gone"], 2))
def test_damage_is_found_as_without_it(directory: Path, damage: str) -> None:
    second = slab(directory, 2)
    superblock = find_superblock(second)
    assert not isinstance(superblock, str)
    expected = set(BLOCKS)
    if damage == "cut":
        os.truncate(second, SUPERBLOCK_BYTES + 40 * RECORD_BYTES)
    with open(second, "r+b", buffering=0) as file:
        if damage in ("superblocks", "slots"):  # the front one; in the latter its count of slots alone
            at = 48 if damage == "slots" else 0
            os.pwrite(file.fileno(), b"\xff" * (8 if damage == "slots" else SUPERBLOCK_BYTES), at)
    ahead = done(directory)
    if damage == "gone":
        second.unlink()
    with opened(directory, ahead) as tier:
        found = recovered_numbers(tier)
    lost = {*BLOCKS} - found
    if damage in ("cut", "gone"):
        assert len(lost) == superblock.slots, "those of the second slab"
    else:
        assert found == expected


def test_a_damaged_record_is_withdrawn_wherever_it_is_judged(directory: Path) -> None:
    with open(slab(directory, 2), "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\xff", SUPERBLOCK_BYTES + 5 * RECORD_BYTES + 30)
    for turn in range(2):  # the second time it is gone
        with opened(directory, done(directory)) as tier:
            damaged, found = tier.recovery_report.damaged_records, recovered_numbers(tier)
        assert len(found) == len(BLOCKS) - 1
        assert damaged == (turn == 0)


def test_an_open_waits_a_while_for_a_shared_lock(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(directory / "lock", "rb", buffering=0) as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        naps: list[float] = []
        monkeypatch.setattr(time, "sleep", naps.append)
        with pytest.raises(DirectoryInUse, match="another process"), opened(directory):
            pass  # it looks for longer than anybody does
        assert sum(naps) >= 0.5

        def sleep(_: float) -> None:
            naps.append(0)
            if len(naps) == 10:  # it had lost its core meanwhile
                fcntl.flock(looker, fcntl.LOCK_UN)

        naps.clear()
        monkeypatch.setattr(time, "sleep", sleep)
        with opened(directory) as tier:
            assert recovered_numbers(tier) == set(BLOCKS)
            naps.clear()
            with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"), opened(directory):
                pass
            assert not naps, "who has it keeps it: that is said at once"
