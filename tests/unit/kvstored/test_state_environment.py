"""The environment of small state: what it refuses, what a rewrite leaves, and the golden directory that stays readable.

`python -m tests.unit.kvstored.test_state_environment` writes tests/golden/state-1 anew: only for a format that no
version has written yet.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstored.clock import ManualClock
from kvstored.state import environment, process
from kvstored.state.databases import DATABASES, SLOT
from kvstored.state.environment import (
    begin_rewrite,
    finish_rewrite,
    newest,
    open_environment,
    open_shared,
)
from kvstored.state.pages import Unusable, require_whole
from kvstored.state.process import Interrupted, StateProcess
from kvstored.state.shown import shown
from kvstored.state.tables import PIECE, packed
from kvstored.store.blocks.usage import GROUP_BYTES
from tests.reference.running_daemon import eventually

GOLDEN = Path(__file__).parents[2] / "golden" / "state-1"
ENTRIES: dict[str, list[tuple[bytes, bytes]]] = {
    "usage": [(bytes(7) + b"\x01", bytes(GROUP_BYTES))],
    "learned": [(b"host/lru/numbers" + PIECE.pack(0), packed(np.arange(5)))],
    "names": [(b"tenant:alice", b"")],
    "quarantine": [(SLOT.pack(1, 2, 3, 4), b"why")],
    "endurance": [(b"budget", b'{"level_bytes": 5}')],
    "scrub": [(b"position", b'{"slab": 3}')],
    "pins": [(b"a", b"b")],
}
Entry = tuple[bytes, bytes]


def write(place: Path) -> None:
    found = open_environment(place, "0.2.0.dev1").environment
    writing = found.begin()
    for name, entries in ENTRIES.items():
        writing.put(name, entries)
    writing.commit(durable=True)
    found.close()


def contents(place: Path) -> dict[str, list[Entry]]:
    found = open_environment(place, "later")
    assert not found.was_aside
    read = {each.name: list(found.environment.read(each.name)) for each in DATABASES}
    found.environment.close()
    assert all(value is not None for entries in read.values() for _, value in entries)
    return {name: [(key, value or b"") for key, value in entries] for name, entries in read.items()}


def test_the_golden_directory_is_read(tmp_path: Path) -> None:
    for path in GOLDEN.glob("state-*.mdb"):
        shutil.copy(path, tmp_path)
    found = contents(tmp_path)
    assert {name: entries for name, entries in found.items() if entries and name != "about"} == ENTRIES
    assert dict(found["about"]) == {b"format": b"1", b"writer": b"0.2.0.dev1"}
    for name, entries in found.items():
        assert all("wrong" not in shown(name, *entry) for entry in entries)


def test_another_format_is_set_aside_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    before = (tmp_path / "state-000001.mdb").read_bytes()
    monkeypatch.setattr(environment, "FORMAT", 2)
    found = open_environment(tmp_path, "later")
    assert found.is_new and found.was_aside == "written by 0.2.0.dev1 in format 1"
    found.environment.close()
    assert (tmp_path / "state.aside").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.mdb")] == ["state-000002.mdb"]


def test_a_value_that_is_changed_or_in_another_place_is_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "state-000001.mdb"
    path.write_bytes(
        path.read_bytes().replace(b'{"slab": 3}', b'{"slab": 4}').replace(b"tenant:alice", b"tenant:alicf")
    )
    found = open_environment(tmp_path, "later")
    read = found.environment
    assert not found.was_aside, "the pages are whole"
    assert list(read.read("scrub")) == [(b"position", None)] and list(read.read("names")) == [(b"tenant:alicf", None)]
    assert [value for _, value in read.read("quarantine")] == [b"why"]
    read.close()


@pytest.mark.slow
def test_what_was_deleted_is_nowhere_after_a_rewrite(tmp_path: Path) -> None:
    """A compact copy keeps deleted keys as separators of pages; every one is looked for."""
    chance = random.Random(1)
    keys = [chance.randbytes(16) for _ in range(20_000)]
    kept, gone = keys[::2], keys[1::2]
    former = open_environment(tmp_path, "1").environment
    for some in (keys, None):
        writing = former.begin()
        if some is None:
            writing.keep_only("names", set(kept))
        else:
            writing.put("names", [(key, b"x" * 40) for key in sorted(some)])
        writing.put("endurance", [(b"budget", b"{}")])
        writing.commit(durable=False)
    assert any(key in former.path.read_bytes() for key in gone)
    new = begin_rewrite(former, "1")
    writing = new.begin()
    writing.put("names", [(key, b"x" * 40) for key in sorted(kept)])
    writing.commit(durable=True)
    finish_rewrite(former, new).close()
    whole = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [key for key in gone if key in whole] and all(key in whole for key in kept)
    assert newest(tmp_path) == tmp_path / "state-000002.mdb"


def test_a_crash_in_a_rewrite_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path)
    former = open_environment(tmp_path, "1").environment
    begin_rewrite(former, "1").close()
    former.close()
    assert list(tmp_path.glob("*.new"))
    assert contents(tmp_path)["pins"] == ENTRIES["pins"] and not list(tmp_path.glob("*.new*"))
    shutil.copy(tmp_path / "state-000001.mdb", tmp_path / "state-000002.mdb")
    assert contents(tmp_path)["pins"] == ENTRIES["pins"] and not (tmp_path / "state-000001.mdb").exists()


def test_files_of_others_are_neither_read_nor_removed(tmp_path: Path) -> None:
    others = ["state-5.mdb", "state-000001.mdb.bak", "state-of-things.txt", "state-٣٣٣٣٣٣.mdb"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    write(tmp_path)
    former = open_environment(tmp_path, "1").environment
    finish_rewrite(former, begin_rewrite(former, "1")).close()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == sorted([*others, "state-000002.mdb", "state-000002.mdb-lock"])


@pytest.mark.parametrize("kind", ["directory", "link", "dangling link", "fifo", "of another user"])
def test_what_is_no_file_of_this_user_is_set_aside(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "state-000001.mdb", tmp_path / "other"
    (tmp_path / "state.aside").write_bytes(b"of before")
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "of another user":
        path.write_bytes(b"x")

        def verify(_: str, **__: bool) -> list[str]:
            raise PermissionError

        monkeypatch.setattr("lmdb.verify.verify", verify)
    else:
        path.symlink_to(other)
        if kind == "link":
            other.write_bytes(b"mine")
    found = open_environment(tmp_path, "1")
    found.environment.close()
    assert found.is_new and ("regular file" in found.was_aside or "belongs to uid" in found.was_aside)
    assert not os.path.lexists(path) and os.path.lexists(tmp_path / "state.aside")
    assert kind != "link" or other.read_bytes() == b"mine"


def test_on_a_full_disk_it_is_set_aside_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state-000001.mdb").write_bytes(bytes(5000))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(environment, "make", full)
        open_environment(tmp_path, "1")
    found = open_environment(tmp_path, "1")
    found.environment.close()
    assert found.was_aside.startswith("damaged: ")


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(1 << 16), os.urandom(1 << 16)])
def test_what_is_no_environment_is_never_given_to_lmdb(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state-000001.mdb").write_bytes(content)
    with pytest.raises(Unusable, match="damaged"):
        require_whole(tmp_path / "state-000001.mdb")


def test_a_map_that_is_full_grows_for_the_next_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FIRST_MAP_BYTES", 1 << 20)
    found = open_environment(tmp_path, "1").environment
    entries = [(number.to_bytes(4, "big"), bytes(1000)) for number in range(3000)]
    tries = 0
    while True:
        try:
            writing = found.begin()
            writing.put("learned", entries)
            writing.commit(durable=False)
            break
        except OSError as error:
            assert error.errno == 28
            tries += 1
    assert 0 < tries < 5 and len(list(found.read("learned"))) == 3000
    found.close()


# The process


def test_one_transaction_is_there_or_nothing_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        state = StateProcess(tmp_path, "1", ManualClock())
        async with state.transaction() as change:
            await change.put("pins", [(b"a", b"1")])
        with pytest.raises(RuntimeError):
            async with state.transaction() as change:
                await change.put("pins", [(b"a", b"2"), (b"b", b"2")])
                raise RuntimeError
        assert await state.read("pins") == [(b"a", b"1")]
        with pytest.raises(OSError, match="its process ended with status -9"):
            async with state.transaction() as change:
                await change.put("pins", [(b"c", b"3")])
                os.kill(state.pid, 9)
        assert await state.read("pins") == [(b"a", b"1")], "another one has it open"
        async with state.transaction(rewrite=True) as change:
            await change.put("names", [(b"tenant:x", b"")])
        assert await state.read("pins") == [(b"a", b"1")], "what only the environment has is copied"
        assert state.path.name == "state-000002.mdb"
        await state.close()

    asyncio.run(run())


def test_an_urgent_transaction_may_come_while_one_that_gives_way_is_being_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        state = StateProcess(tmp_path, "1", ManualClock())
        await state.open()

        async def fails() -> None:
            async with state.transaction(yields=True) as change:
                await change.put("pins", [(b"a", b"1")])
                raise RuntimeError("of its own")

        failing = asyncio.create_task(fails())
        for _ in range(3):  # it has failed, and the process has not answered yet
            await asyncio.sleep(0)
        assert not failing.done()
        async with state.transaction(is_urgent=True) as change:
            await change.put("pins", [(b"b", b"2")])
        with pytest.raises(RuntimeError, match="of its own"):
            await failing
        assert await state.read("pins") == [(b"b", b"2")]
        await state.close()

    asyncio.run(run())


def test_what_gives_way_gives_way_also_when_its_turn_comes_before_the_urgent_one(tmp_path: Path) -> None:
    async def run() -> None:
        state, ends = StateProcess(tmp_path, "1", ManualClock()), asyncio.Event()
        await state.open()

        async def stands(*, yields: bool) -> None:
            async with state.transaction(yields=yields):
                await ends.wait()
                ends.clear()

        async def urgent() -> None:
            async with state.transaction(is_urgent=True) as change:
                await change.put("pins", [(b"b", b"2")])

        tasks = []
        for work in (stands(yields=False), stands(yields=True), urgent()):
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(0)
        ends.set()
        async with asyncio.timeout(30):
            await tasks[2]
        await tasks[0]
        with pytest.raises(Interrupted):
            await tasks[1]
        await state.close()

    asyncio.run(run())


def test_after_two_deaths_it_is_set_aside_and_who_saves_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        clock, told = ManualClock(), []
        state = StateProcess(tmp_path, "1", clock)
        state.listeners.append(told.append)
        for wait_s in (0, process.DEATHS_IN_S + 1, 0):
            clock.advance(s=wait_s)
            await state.open()
            os.kill(state.pid, 11)
            with pytest.raises(OSError):
                await state.read("pins")
        assert told == [""] and not (tmp_path / "state.aside").exists()
        await state.open()
        assert len(told) == 2 and "died 2 times" in told[1] and (tmp_path / "state.aside").exists()
        await state.close()

    asyncio.run(run())


def test_without_lmdb_one_line_says_so_and_the_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "lmdb.py").write_text("raise ImportError")

    async def run() -> None:
        state = StateProcess(tmp_path, "1", ManualClock())
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(broken))
            for _ in range(process.DEATHS + 1):
                with pytest.raises(OSError, match="lmdb cannot be imported"):
                    await state.open()
        assert await state.read("pins") == ENTRIES["pins"]
        assert not state.was_aside
        await state.close()

    asyncio.run(run())


def test_a_file_set_aside_is_told_to_later_daemons_too(tmp_path: Path) -> None:
    """Else damage and a kill -9 would give a full endurance budget away, as a first start does."""

    async def has_aside() -> bool:
        state = StateProcess(tmp_path, "1", ManualClock())
        await state.open()
        await state.close()
        return state.has_aside

    assert not asyncio.run(has_aside())
    (tmp_path / "state-000001.mdb").write_bytes(b"x" * 5000)
    assert asyncio.run(has_aside())
    assert asyncio.run(has_aside())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_lock_of_root_who_looked_at_it_stops_no_write() -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chown(place, 65534, 65534)
        os.seteuid(65534)
        write(place)
        os.seteuid(0)
        (place / "state-000001.mdb-lock").unlink()
        open_shared(place).close()
        assert (place / "state-000001.mdb-lock").stat().st_uid == 0
        os.seteuid(65534)
        found = open_environment(place, "1").environment
        assert not found.is_readonly
        found.close()
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


_DAEMON = """
import asyncio, os, signal, sys
from pathlib import Path
from kvstored.clock import SystemClock
from kvstored.state.process import StateProcess

async def run():
    state = StateProcess(Path(sys.argv[1]), "1", SystemClock())
    await state.open()
    os.kill(state.pid, signal.SIGSTOP)
    print(state.pid, flush=True)
    async with state.transaction(rewrite=True) as change:
        await change.put("pins", [(b"late", b"")])
        asyncio.get_running_loop().call_later(0.1, lambda: print("asked", flush=True))  # to commit

asyncio.run(run())
"""


def test_the_process_of_a_killed_daemon_writes_nothing_beside_the_next_one(tmp_path: Path) -> None:
    write(tmp_path)
    with subprocess.Popen([sys.executable, "-c", _DAEMON, str(tmp_path)], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        assert daemon.stdout.readline() == "asked\n"
        daemon.kill()
    found = open_environment(tmp_path, "2").environment
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
    found.close()
    assert newest(tmp_path) == tmp_path / "state-000001.mdb" and contents(tmp_path)["pins"] == ENTRIES["pins"]


if __name__ == "__main__":
    for path in GOLDEN.glob("state*"):
        path.unlink()
    write(GOLDEN)
    for path in GOLDEN.glob("*-lock"):
        path.unlink()
