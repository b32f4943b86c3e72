"""The process of the codec `lossless`, and what its failures say of the bytes: the library may be broken, memory may be
short, and the process may stop."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from kvstore_tiers.codecs import NotReadable, Undecodable, lossless
from kvstore_tiers.codecs.library_worker import COMPRESS, DECOMPRESS, HEAD, OPENZL, serve
from kvstore_tiers.codecs.lossless import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def _library(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let processes that begin from now on find a library of this code."""
    package = folder / "openzl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ext.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("error", ["ImportError('no libstdc++')", "MemoryError()", "OSError(12, 'no memory')"])
def test_a_library_that_cannot_work_says_nothing_of_the_bytes(
    error: str, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _library(tmp_path, monkeypatch, f"raise {error}")
    kind = NotReadable if "Import" in error else RuntimeError
    with worker.room(4096), pytest.raises(kind, match=error.partition("(")[0]):
        worker.ask(DECOMPRESS, OPENZL, [64], [4])


def test_bytes_that_a_library_refuses_are_not_its_own(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _library(tmp_path, monkeypatch, "raise RuntimeError('corrupt frame')")
    with worker.room(4096), pytest.raises(Undecodable, match="corrupt frame"):
        worker.ask(DECOMPRESS, OPENZL, [64], [4])


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_daemon_that_ends_within_a_request_ends_its_process_in_order(is_answered: bool) -> None:
    ours, theirs = Pipe()
    if is_answered:
        theirs.send_bytes(b"an answer that nobody reads")
    else:
        ours.send_bytes(HEAD.pack(DECOMPRESS, OPENZL, False, 0, 0))
    ours.close()
    memory_fd = os.memfd_create("kvstored-codec", os.MFD_CLOEXEC)
    os.ftruncate(memory_fd, mmap.PAGESIZE)
    serve(theirs, memory_fd)
    os.close(memory_fd)


def test_a_process_that_stops_within_a_request_is_killed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "ANSWER_S", 0.2)
    begin = worker._start

    def begin_stopped() -> Any:
        connection = begin()
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGSTOP)
        return connection

    monkeypatch.setattr(worker, "_start", begin_stopped)
    with worker.room(4096), pytest.raises(RuntimeError, match="died"):
        worker.ask(COMPRESS, OPENZL, [16], [16] * 60_000)  # more than a socket holds
    assert worker._process is None


def test_memory_that_could_not_be_mapped_is_asked_for_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> mmap.mmap:
        raise OSError(12, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(OSError, match="no memory"), worker.room(4096):
            pass
    with worker.room(4096) as (source, target):
        assert min(source.nbytes, target.nbytes) >= 4096
