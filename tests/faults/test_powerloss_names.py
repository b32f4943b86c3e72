"""Power loss and the small things around the blocks: directories, format and version files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_proto.version import VERSION
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.directory_files import FormatUnsupported
from kvstore_tiers.testing.powerloss import Recording
from kvstore_tiers.testing.powerloss.crashes import Kept
from kvstore_tiers.testing.powerloss.log import read_log
from kvstore_tiers.testing.powerloss.medium import Medium, Tree
from tests.reference.skips import skip_without_compiler

NOTHING = Kept("", lambda change: 0.0, lambda change: 0)
CAPACITY_BYTES = 1 << 20


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    skip_without_compiler()
    (tmp_path / "root").mkdir()
    return Recording(tmp_path / "root", tmp_path / "log")


def run(recording: Recording, program: str) -> Tree:
    """Run a program on the recorded directory, cut the power at its end; what is certainly there."""
    command = [sys.executable, "-c", program, str(recording.root)]
    environment = {**recording.environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, env=environment, check=True)
    medium = Medium(read_log(recording.log))
    medium.advance(10**12)
    return medium.tree(NOTHING)


def test_an_opened_tier_is_there_with_all_directories_above_it(recording: Recording) -> None:
    program = (
        "import os, sys\n"
        "from kvstore_tiers.nvme import NvmeTier\n"
        f"NvmeTier.open(sys.argv[1] + '/a/b/nvme', {CAPACITY_BYTES})\n"
        "os._exit(0)\n"
    )
    tree = run(recording, program)
    assert "a/b/nvme/slabs" in tree
    assert tree["a/b/nvme/format"].startswith(b"format_version: 2\n")


def test_names_that_a_killed_process_did_not_sync_are_synced_by_the_next(recording: Recording) -> None:
    """A slab that was renamed but not synced serves the next process from the page cache: it must not stay so."""
    program = (
        "import os, sys\n"
        "for name in ('nvme', 'nvme/slabs'): os.mkdir(sys.argv[1] + '/' + name)\n"
        "open(sys.argv[1] + '/nvme/slabs/name-of-none-of-ours', 'w').close()\n"
        "from kvstore_tiers.nvme import NvmeTier\n"
        f"NvmeTier.open(sys.argv[1] + '/nvme', {CAPACITY_BYTES})\n"
        "os._exit(0)\n"
    )
    assert "nvme/slabs/name-of-none-of-ours" in run(recording, program)


@pytest.mark.parametrize("left", [b"", b"\0\0"])
def test_a_version_file_whose_bytes_were_lost_is_written_again(tmp_path: Path, left: bytes) -> None:
    NvmeTier.open(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "format").write_bytes(left)
    NvmeTier.open(tmp_path, CAPACITY_BYTES).close()
    assert (tmp_path / "format").read_text() == f"format_version: 2\nwritten_by: {VERSION}\n"


def test_a_newer_version_is_refused_as_before(tmp_path: Path) -> None:
    NvmeTier.open(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "format").write_text("format_version: 3\n")
    with pytest.raises(FormatUnsupported):
        NvmeTier.open(tmp_path, CAPACITY_BYTES)
