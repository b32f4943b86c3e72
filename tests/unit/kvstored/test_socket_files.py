"""Socket files that somebody removed are bound again; another process's are left alone."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from kvstored.rpc.grpc_socket import bind_grpc
from kvstored.socket_files import LOOK_S, SocketFiles, serve_grpc
from kvstored.sockets import SocketError


class Place:
    """A directory whose files stand for sockets, and a clock that is set."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now_s, self.bound = directory, 0.0, 0
        self.files = SocketFiles(self.prepare, lambda: self.now_s)

    def prepare(self) -> None:
        if (self.directory.parent / "closed").exists():
            raise SocketError("it is closed")
        self.directory.mkdir(exist_ok=True)

    async def bind(self, path: Path) -> None:
        path.touch()
        self.bound += 1

    async def look(self) -> None:
        self.now_s += LOOK_S
        self.files.tick()
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "run")
    made.prepare()
    return made


async def started(place: Place) -> list[Path]:
    paths = [place.directory / name for name in ("a", "b")]
    for path in paths:
        await place.files.bind(path, partial(place.bind, path))
    return paths


@pytest.mark.parametrize("what", ["a file", "the directory"])
def test_what_was_removed_is_made_again(place: Place, what: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        paths = await started(place)
        await place.look()
        assert place.bound == 2 and not caplog.records
        if what == "a file":
            paths[0].unlink()
        else:
            shutil.rmtree(place.directory)
        await place.look()
        assert all(path.exists() for path in paths) and place.bound == (3 if what == "a file" else 4)
        await place.look()
        assert place.bound == (3 if what == "a file" else 4), "once"
        await place.files.close()
        assert not any(path.exists() for path in paths)

    asyncio.run(run())
    assert f"{place.directory / 'a'} was removed, and is made again" in caplog.text


def test_another_process_s_file_is_left_alone_and_said_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        first, _ = await started(place)
        first.rename(place.directory / "kept")  # so that its inode is not used again
        first.write_text("theirs")
        for _ in range(3):
            await place.look()
        await place.files.close()
        assert place.bound == 2 and first.read_text() == "theirs"

    asyncio.run(run())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_directory_that_cannot_be_made_is_tried_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        paths = await started(place)
        shutil.rmtree(place.directory)
        (place.directory.parent / "closed").touch()
        for _ in range(3):
            await place.look()
        assert place.bound == 2
        (place.directory.parent / "closed").unlink()
        await place.look()
        assert all(path.exists() for path in paths)
        await place.files.close()

    asyncio.run(run())
    assert caplog.text.count("it is closed") == 2, "once a file"


def test_a_file_for_which_there_is_no_room_is_not_bound_and_said_once(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def run() -> None:
        first, _ = await started(place)
        first.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_room)
            for _ in range(3):
                await place.look()
        assert place.bound == 2, "gRPC writes to stderr at each try"
        await place.look()
        assert place.bound == 3 and first.exists()

    asyncio.run(run())
    assert caplog.text.count("cannot be made again: No space left on device") == 1


def test_a_server_whose_socket_no_client_may_use_is_stopped_and_bound_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The group is gone when the file is made again, and there again at the look after it."""
    path, is_refused = place.directory / "a", False

    def admit(_: Path) -> None:
        if is_refused:
            raise SocketError("there is no such group")

    async def look(is_done: Callable[[], bool]) -> None:
        place.now_s += LOOK_S
        place.files.tick()
        async with asyncio.timeout(60):
            while not is_done():
                await asyncio.sleep(0.001)

    async def run() -> None:
        nonlocal is_refused
        async with AsyncExitStack() as stack:
            await serve_grpc(
                place.files, path, partial(bind_grpc, path, max_message_bytes=1024, connections=1), admit, stack
            )
            path.unlink()
            is_refused = True
            await look(lambda: "there is no such group" in caplog.text)
            assert not path.exists(), "nobody may connect there"
            is_refused = False
            await look(path.exists)
            await place.files.close()
            assert not path.exists()

    asyncio.run(run())
    assert "another process" not in caplog.text


def test_a_place_that_another_process_has_is_taken_when_it_is_free_and_never_removed_before(place: Place) -> None:
    theirs, ours = place.directory / "theirs", place.directory / "ours"

    async def scene() -> None:
        for path in (theirs, ours):
            path.touch()
            place.files.watch(path, partial(place.bind, path), is_bound=False)
        await place.look()
        assert place.bound == 0
        ours.unlink()
        await place.look()
        assert place.bound == 1 and ours.exists()
        await place.files.close()

    asyncio.run(scene())
    assert theirs.exists() and not ours.exists()
