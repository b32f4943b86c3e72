"""The files of a running model are the loaded ones, and unchanged: by mappings, names and times."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from kvstore_connectors.weight_files import Mapping, WeightFiles, mappings_now, process_began, why_unknown

LONG_AGO, SOON = 0.0, 4e9  # when the process began


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 4096)
    return path


def mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)


def write_in_place(path: Path) -> None:
    with open(path, "r+b") as opened:
        opened.write(b"W")


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (write_in_place, True),
        (lambda path: os.truncate(path, 100), True),
        (lambda path: path.write_bytes(b"weights" * 4096), True),
        (replace, False),
        (os.unlink, False),
        (lambda path: os.rename(path, path.with_suffix(".old")), False),
        (lambda path: os.chmod(path, 0o600), False),
        (lambda path: os.link(path, path.with_suffix(".too")), False),
    ],
    ids=["written", "cut", "written anew", "replaced", "deleted", "renamed", "permissions", "linked"],
)
def test_a_change_of_content_is_seen_and_one_of_names_is_not(file: Path, change: object, is_seen: bool) -> None:
    files = WeightFiles([file])
    assert files.changed() == ""
    assert callable(change)
    change(file)
    assert files.changed() == (str(file) if is_seen else "")


def test_a_write_right_behind_the_last_one_is_seen(file: Path) -> None:
    for _ in range(20):
        write_in_place(file)
        files = WeightFiles([file])
        write_in_place(file)
        assert files.changed(), "times of files move in steps"
        files.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_write_whose_time_was_set_back_is_seen_by_its_content(file: Path, is_written: bool) -> None:
    files = WeightFiles([file])
    files.digest()
    state = os.stat(file)
    if is_written:
        write_in_place(file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert bool(files.changed()) == is_written


def test_all_parts_are_digested_in_order_and_a_file_that_is_missing_leaves_none_open(
    file: Path, tmp_path: Path
) -> None:
    second, both = tmp_path / "second", tmp_path / "both"
    second.write_bytes(b"2" * 10)
    both.write_bytes(file.read_bytes() + second.read_bytes())
    assert WeightFiles([file, second]).digest() == WeightFiles([both]).digest()
    assert WeightFiles([second, file]).digest() != WeightFiles([both]).digest()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        WeightFiles([file, tmp_path / "none"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mapped_file_is_the_one_that_was_loaded(file: Path) -> None:
    with mapped(file):
        assert why_unknown(WeightFiles([file]), mappings_now(), LONG_AGO) == ""
        replace(file)
        assert "was replaced after it was loaded" in why_unknown(WeightFiles([file]), mappings_now(), SOON)


@pytest.mark.parametrize("is_young", [False, True])
def test_a_file_that_is_not_mapped_is_known_by_its_age(file: Path, is_young: bool) -> None:
    why = why_unknown(WeightFiles([file]), mappings_now(), LONG_AGO if is_young else SOON)
    assert bool(why) == is_young
    assert not is_young or "younger than this process" in why


def test_a_link_that_was_turned_to_an_older_file_is_young(file: Path, tmp_path: Path) -> None:
    folder, link = tmp_path / "v1", tmp_path / "current"
    folder.mkdir()
    old = folder / "model.gguf"
    old.write_bytes(b"old")
    began = os.stat(old).st_ctime + 0.001
    time.sleep(0.02)
    link.symlink_to(folder)
    assert why_unknown(WeightFiles([old]), [], began) == ""
    assert "younger" in why_unknown(WeightFiles([link / "model.gguf"]), [], began)


def test_on_file_systems_whose_mappings_name_another_device_the_path_decides(file: Path) -> None:
    state = os.stat(file)
    elsewhere = Mapping(0, 4096, state.st_dev + 1, state.st_ino + 1, str(file))
    assert why_unknown(WeightFiles([file]), [elsewhere], LONG_AGO) == ""


def test_this_process_began_before_now() -> None:
    assert time.time() - 24 * 3600 < process_began() < time.time()
