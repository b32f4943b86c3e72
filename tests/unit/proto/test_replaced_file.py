"""Files that several processes may replace at the same moment; for files of one owner see test_unsaved.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_proto.replaced_file import replaced_file, usual_mode


def test_writers_at_the_same_moment_each_end_with_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    with replaced_file(path, mode=0o640, is_shared=True) as first, replaced_file(path, is_shared=True) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_whole_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replaced_file(tmp_path / "a", is_shared=True) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="missing/a'"), replaced_file(tmp_path / "missing" / "a", is_shared=True):
        pass


def test_a_new_file_has_the_mode_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    assert usual_mode() == (tmp_path / "made").stat().st_mode & 0o777
