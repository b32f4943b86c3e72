"""A daemon whose GPU copies DRAM in place: blocks go both ways past the bounce buffer, while arenas come and go and the
worker dies, and what is given back to the system is mapped by nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvstore_client import Session
from kvstore_proto.arena import HEADER_BYTES
from tests.gpu.emulated import HostCopy, emulated_node, host_copies
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, put_many, use, whole
from tests.gpu.test_daemon_gpu_tier import workers_of
from tests.gpu.test_gpu_shared_memory import BOUNCE
from tests.gpu.test_gpu_worker import order
from tests.reference.held_memory import held_memory
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
PAYLOAD_BYTES = MODEL.payload_bytes()
ARENA = re.compile(r"/memfd:kvstore-arena-(\d+)\b")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the file in which the emulated driver notes copies."""
    path = tmp_path / "copies"
    path.touch()
    return path


@contextmanager
def running(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *settings: str, config: Path | None = None
) -> Iterator[RunningDaemon]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS, "scrub.enabled=false", *settings, config=config) as daemon:
        yield daemon
        assert "emulated CUDA:" not in daemon.log, "a rule of the driver was broken"


def message(daemon: RunningDaemon) -> str:
    """Return what `kvctl status` says of the GPU tier; nothing while its worker is down."""
    return next((each for each in daemon.status().warnings if each.startswith("vram: ")), "")


def arenas_of(process: int) -> set[int]:
    """Arenas of the host tier that a process has mapped; the numbers of shadows are far larger."""
    found = map(int, ARENA.findall(Path(f"/proc/{process}/maps").read_text()))
    return {number for number in found if number < 1 << 31}


def all_in_place(daemon: RunningDaemon) -> bool:
    """Return whether DRAM is full and all of it is registered."""
    host = daemon.tiers()["host"]
    return host.used_bytes == host.capacity_bytes and "; copies 4.0 MiB of host memory in place" in message(daemon)


def fill(daemon: RunningDaemon, session: Session) -> None:
    put_many(session, range(100, 170))
    assert eventually(lambda: all_in_place(daemon)), message(daemon)


def payloads_in_place(copies: list[HostCopy], *, to_device: bool) -> int:
    """Return how many payloads went in one direction, all of them in place: the bounce buffer has seen header pages
    alone.
    """
    own = [each for each in copies if each.to_device == to_device]
    payloads = [each for each in own if each.file != BOUNCE]
    assert {each.nbytes for each in payloads} == {PAYLOAD_BYTES} and all(ARENA.match(each.file) for each in payloads)
    assert sum(each.nbytes for each in own if each.file == BOUNCE) == len(payloads) * HEADER_BYTES
    return len(payloads)


def there_and_back(daemon: RunningDaemon, session: Session, log: Path, number: int) -> None:
    """A conversation's blocks are copied to the device, leave DRAM, and are copied back: in place."""
    before = len(host_copies(log))
    use(daemon, session, number)
    whole_bytes = BLOCKS * (HEADER_BYTES + PAYLOAD_BYTES)
    assert eventually(lambda: sum(each.nbytes for each in host_copies(log)[before:]) >= whole_bytes)
    assert payloads_in_place(host_copies(log)[before:], to_device=True) == BLOCKS
    put_many(session, range(200 + 100 * number, 270 + 100 * number))
    before = len(host_copies(log))
    assert whole(session, number)
    assert payloads_in_place(host_copies(log)[before:], to_device=False) == BLOCKS


def test_dram_is_copied_in_place_and_by_the_next_worker_too(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    with running(monkeypatch, emulated_node(copies=log)) as daemon, daemon.connect(MODEL) as session:
        fill(daemon, session)
        there_and_back(daemon, session, log, 1)
        (worker,) = workers_of(daemon.pid)
        os.kill(worker, signal.SIGKILL)
        assert eventually(lambda: workers_of(daemon.pid) not in ([], [worker]) and all_in_place(daemon))
        there_and_back(daemon, session, log, 2)


def test_what_the_driver_does_not_register_goes_by_the_bounce_buffer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Path
) -> None:
    control = tmp_path / "control"
    order(control, "cuMemHostRegister:2=2 cuMemHostRegister:3=2 cuMemHostRegister:4=2 cuMemHostRegister:5=2")
    with running(monkeypatch, emulated_node(control=control, copies=log)) as daemon, daemon.connect(MODEL) as session:
        put_many(session, range(100, 170))
        assert "copies host memory through its bounce buffer: cuMemHostRegister" in message(daemon)
        for number in range(1, 8):
            use(daemon, session, number)
        put_many(session, range(200, 270))
        for number in range(1, 8):
            assert whole(session, number)
        assert daemon.log.count("copies host memory through its bounce buffer") == 1


def test_without_register_host_no_arena_is_shared(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    variables = emulated_node(copies=log)
    with running(monkeypatch, variables, "tier.vram.register_host=false") as daemon:
        with daemon.connect(MODEL) as session:
            put_many(session, range(100, 170))
            use(daemon, session, 1)
        (worker,) = workers_of(daemon.pid)
        assert not arenas_of(worker) and {each.file for each in host_copies(log)} == {BOUNCE}


def test_arenas_are_given_back_while_blocks_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Path
) -> None:
    """DRAM shrinks and grows; no copy touches what was given back, and the worker keeps none of it."""
    file = tmp_path / "kvstored.toml"

    def capacity(mib: int) -> None:
        file.write_text(f'[host]\ncapacity = "{mib}MiB"\n')

    capacity(12)
    kept = tuple(setting for setting in SETTINGS if not setting.startswith("host.capacity"))
    for name, value in emulated_node(copies=log).items():
        monkeypatch.setenv(name, value)
    with running_daemon(*kept, "scrub.enabled=false", config=file) as daemon, daemon.connect(MODEL) as session:
        for turn in range(3):
            for number in range(1, 13):
                use_anew(session, 20 * turn + number)
            capacity(5 if turn % 2 == 0 else 12)
            os.kill(daemon.pid, signal.SIGHUP)
            for number in range(1, 13):
                assert eventually(partial(whole, session, 20 * turn + number))
        assert eventually(lambda: daemon.tiers()["host"].capacity_bytes == 5 << 20), daemon.log
        (worker,) = workers_of(daemon.pid)
        assert eventually(lambda: arenas_of(worker) <= arenas_open_in(daemon.pid))
        assert any(ARENA.match(each.file) for each in host_copies(log))
        assert "emulated CUDA:" not in daemon.log


def use_anew(session: Session, number: int) -> None:
    put_many(session, range(number, number + 1))
    assert whole(session, number)


def arenas_open_in(process: int) -> set[int]:
    """Return the arenas of which a process has a descriptor: it has not given them back."""
    numbers: set[int] = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            numbers.update(map(int, ARENA.findall(os.readlink(each))))
    return numbers


def test_arenas_of_the_process_before_are_shared(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    with running(monkeypatch, emulated_node(copies=log), "host.warm_restart=holder") as daemon:
        with daemon.connect(MODEL) as session:
            put_many(session, range(100, 170))
        (killed,) = workers_of(daemon.pid)
        os.kill(killed, signal.SIGKILL)
        assert eventually(lambda: workers_of(daemon.pid) not in ([], [killed]))
        before, (worker,) = arenas_open_in(daemon.pid), workers_of(daemon.pid)
        daemon.kill9()
        kept = held_memory(daemon.state_dir, "w")
        for descriptor in kept.values():
            os.close(descriptor)
        assert list(kept) == [f"w{worker}"], "it is waited for"
        daemon.restart()
        (worker,) = workers_of(daemon.pid)
        assert eventually(lambda: bool(arenas_of(worker) & before))
        assert eventually(lambda: "of host memory in place" in message(daemon))
        with daemon.connect(MODEL) as session:
            assert whole(session, 169)
