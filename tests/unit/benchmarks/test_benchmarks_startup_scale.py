"""benchmarks/support/sparse_slabs.py makes slab files of full length without their slots' space, which a tier takes."""

import importlib
import os
import uuid
from pathlib import Path

import pytest

from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import Superblock, slots_that_fit
from kvstore_tiers.nvme.slab_file import SlabFile

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
_FILE_BYTES, _SLOT_BYTES = 16 << 20, 8192


def test_a_slab_file_has_length_and_no_space_and_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    for name in ("fstat", "posix_fallocate"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    importlib.import_module("support.sparse_slabs").without_space()
    directory = TierDirectory(tmp_path)
    slots = slots_that_fit(_FILE_BYTES, _SLOT_BYTES)
    superblock = Superblock(uuid.uuid4().bytes, 1, 1, _SLOT_BYTES, slots, 1, _FILE_BYTES, 1)
    file = SlabFile.create(directory, superblock)
    try:
        found = file.path.stat()
        assert found.st_size == _FILE_BYTES
        assert found.st_blocks * 512 < _FILE_BYTES // 16
        assert file.is_whole
        file.restore_length()
        assert file.path.stat().st_blocks == found.st_blocks
        assert os.fstat(file.slot_fd).st_mtime_ns == file.path.stat().st_mtime_ns
    finally:
        file.close()
        directory.close()
