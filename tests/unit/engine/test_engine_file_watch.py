"""A model's file that is changed in each way while it is open: what is noticed, and what goes on."""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import FileChanged, FileDigest, FileWatch, GGUFFile, OpenFile
from kvstore_engine.models.convert import convert
from kvstore_engine.server.options import HandedFile
from tests.reference.make_gguf import TinyModel, write_model

_TINY = TinyModel(layers=1, width=64, heads=2, kv_heads=1, head_dim=32, feed_forward=64)
_OTHER = replace(_TINY, seed=1)
_TEMPLATE = replace(_TINY, metadata={"tokenizer.chat_template": "{{ messages[0]['content'] }}"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", _TINY)


def _new(path: Path, model: TinyModel = _OTHER) -> Path:
    return write_model(path.with_name("new.gguf"), model)


def _moved_over(path: Path) -> None:
    _new(path).rename(path)


def _deleted(path: Path) -> None:
    path.unlink()


def _linked(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


def _touched(path: Path) -> None:
    os.utime(path)


def _with_the_same_times(path: Path) -> None:
    """Replace the file as a backup does that puts the time of the last access back."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns))


def _of_another_mode(path: Path) -> None:
    path.chmod(0o600)


def _appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"behind the last tensor")


def _written_again_as_it_was(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def _overwritten(path: Path) -> None:
    path.write_bytes(_new(path).read_bytes())


def _overwritten_in_secret(path: Path) -> None:
    before = path.stat()
    _overwritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _overwritten_through_a_link(path: Path) -> None:
    link = path.with_name("link")
    link.hardlink_to(path)
    path.unlink()
    link.write_bytes(_new(link).read_bytes())


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _of_another_shape(path: Path) -> None:
    path.write_bytes(_new(path, replace(_TINY, layers=2)).read_bytes())


def _with_another_template(path: Path) -> None:
    path.write_bytes(_new(path, _TEMPLATE).read_bytes())


def _a_byte_by_a_map(path: Path) -> None:
    other = path.read_bytes()[-8] ^ 0xFF
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[len(mapped) - 8] = other


_HARMLESS = [_moved_over, _deleted, _linked, _of_another_mode, _with_the_same_times]
_CHANGES = [
    _touched,
    _appended,
    _written_again_as_it_was,
    _overwritten,
    _overwritten_in_secret,
    _overwritten_through_a_link,
    _cut,
    _emptied,
    _of_another_shape,
    _with_another_template,
    _a_byte_by_a_map,
]


@pytest.mark.parametrize("harmless", _HARMLESS)
def test_what_leaves_the_bytes_alone_costs_one_look_at_the_file(path: Path, harmless: Callable[[Path], None]) -> None:
    with GGUFFile.open(path) as file:
        watch = FileWatch(file)
        digest = watch.digest()
        assert watch.check()
        harmless(path)
        assert not watch.check(), "it was touched: what was read in between may be wrong"
        assert watch.check()
        assert watch.digest() == digest


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_is_noticed_and_final(path: Path, change: Callable[[Path], None]) -> None:
    before = path.read_bytes()
    with GGUFFile.open(path) as file:
        watch = FileWatch(file)
        watch.digest()
        change(path)
        with pytest.raises(FileChanged, match=r"model\.gguf was changed while it was in use"):
            watch.check()
        if path.exists():
            path.write_bytes(before)
        for again in (watch.check, watch.digest, watch.require_untouched):
            with pytest.raises(FileChanged):
                again()


@pytest.mark.parametrize("touch", [_moved_over, _overwritten])
def test_without_a_digest_nothing_is_known_of_a_touched_file(path: Path, touch: Callable[[Path], None]) -> None:
    with GGUFFile.open(path) as file:
        watch = FileWatch(file)
        touch(path)
        with pytest.raises(FileChanged):
            watch.digest()


def test_a_touch_that_the_digest_saw_first_still_counts(path: Path) -> None:
    with GGUFFile.open(path) as file:
        watch = FileWatch(file)
        watch.digest()
        _of_another_mode(path)
        watch.digest()
        assert not watch.check(), "what the caller of check has read in between may be wrong"
        assert watch.check()


class _TouchedWhileRead(GGUFFile):
    """A file that `then` changes once it was read."""

    then: Callable[[Path], None]

    def digest(self) -> FileDigest:
        found = super().digest()
        self.then(self.path)
        return found


def test_a_change_while_the_digest_is_computed(path: Path) -> None:
    with _TouchedWhileRead.open(path) as file:
        file.then = _overwritten
        with pytest.raises(FileChanged):
            FileWatch(file).digest()


def test_a_symbolic_link_that_is_turned_elsewhere_leaves_the_open_file(path: Path) -> None:
    link = path.with_name("current.gguf")
    link.symlink_to(path)
    with GGUFFile.open(link) as file:
        watch = FileWatch(file)
        watch.digest()
        link.unlink()
        link.symlink_to(_new(path))
        assert watch.check()


def _handed(file: OpenFile, digest: FileDigest | None) -> HandedFile:
    descriptor = os.dup(file.descriptor)  # as a child has it
    return HandedFile.decode(replace(HandedFile.of(file, digest), descriptor=descriptor).encode())


def test_a_handed_file_is_the_one_that_was_opened(path: Path) -> None:
    with OpenFile.open(path) as file, _handed(file, None).taken_over() as first:
        digest = first.digest()
        _moved_over(path)
        with _handed(file, digest).taken_over() as second:
            assert second.digest() == digest
            np.testing.assert_array_equal(second.file.data, first.file.data)
        with pytest.raises(FileChanged), _handed(file, None).taken_over():
            pass  # without a digest nothing shows what the first process has read


@pytest.mark.parametrize("change", _CHANGES)
def test_a_handed_file_that_was_changed_is_refused(path: Path, change: Callable[[Path], None]) -> None:
    with OpenFile.open(path) as file:
        with _handed(file, None).taken_over() as first:
            digest = first.digest()
        change(path)
        with pytest.raises(FileChanged), _handed(file, digest).taken_over():
            pass


def test_the_digest_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    read = GGUFFile.digest
    monkeypatch.setattr(GGUFFile, "digest", lambda file: passes.append(file) or read(file))
    with OpenFile.open(path) as file:
        with _handed(file, None).taken_over() as first:
            digest = first.digest()
            assert first.digest() == digest and first.check()
        with _handed(file, digest).taken_over() as second:
            assert second.digest() == digest
    assert len(passes) == 1


def test_a_file_that_is_being_written_to_is_not_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: os.utime(path))
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns)
    with pytest.raises(FileChanged, match="another program is writing to this file"):
        OpenFile.open(path)


def test_where_times_are_whole_seconds_a_file_is_opened_once_its_second_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, changed_ns, now_ns = (
        importlib.import_module("kvstore_engine.gguf.open_file"),
        7 * 10**9,
        [7 * 10**9 + 10**8],
    )
    exact = module._identity
    monkeypatch.setattr(module, "_identity", lambda *of: exact(*of)._replace(changed_ns=changed_ns))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now_ns.append(now_ns.pop() + round(seconds * 1e9)))
    with OpenFile.open(path) as file:
        assert file.identity.changed_ns == changed_ns
    assert now_ns[0] > changed_ns + 2 * 10**9, "a change in the same second, or FAT's two, would have the same time"


def test_a_file_that_its_file_system_has_lost_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with GGUFFile.open(path) as file:
        watch = FileWatch(file)
        watch.digest()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", lost)
            with pytest.raises(OperationError, match=r"model\.gguf: cannot be looked at: Stale file handle"):
                watch.check()
        assert watch.check(), "it may come back"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        OpenFile.open(tmp_path / "pipe")


def test_a_source_that_is_changed_while_it_is_converted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("kvstore_engine.models.convert")
    header = module._header
    monkeypatch.setattr(module, "_header", lambda *arguments: (_overwritten(path), header(*arguments))[1])
    with pytest.raises(FileChanged):
        convert(path, "q8_0")
    assert not list(path.parent.glob("*.q8_0-*.gguf"))
