"""Golden directories of the NVMe tier, one of each format: a later version reads one, or names it and leaves it alone."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvstore_tiers.nvme import FormatUnsupported, NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.layout import FORMAT_VERSION
from kvstore_tiers.nvme.slab_file import discard_older
from kvstore_tiers.testing.made_up_codec import MadeUpCodec, allow_made_up_codec
from kvstore_tiers.testing.transfers import block, block_with_pattern, finish, get, put

GOLDEN = {int(path.name.rpartition("-")[2]): path for path in Path(__file__).parent.glob("nvme-format-*")}
CAPACITY_BYTES = 256 << 10
BLOCKS = [block(1, 5000), block(2, 4096), block_with_pattern(5, 20_000)]  # the last one by the codec of tests


def _copy(number: int, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN[number], tmp_path / "nvme"))


def _contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_this_format_has_a_golden_directory() -> None:
    assert FORMAT_VERSION in GOLDEN, "make one, with a block as it is, one of a codec, and one in quarantine"


def test_a_directory_of_this_format_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORED_TESTING_CODECS", "")
    allow_made_up_codec()
    with closing(NvmeTier.open(_copy(FORMAT_VERSION, tmp_path), CAPACITY_BYTES)) as tier:
        found = {header.key: (slot, header) for slot, header in tier.recover()}
        assert found.keys() == {header.key for header, _ in BLOCKS} and len(tier.quarantined()) == 1
        for header, payload in BLOCKS:
            slot, named = found[header.key]
            outcome, back = get(tier, slot, header.key, payload.nbytes)
            assert outcome.ok and np.array_equal(back, payload), outcome
            assert outcome.header is not None and outcome.header.tokens == header.tokens
            assert (named.parent, named.depth, named.created_ns) == (header.parent, header.depth, header.created_ns)
        assert found[BLOCKS[2][0].key][1].codec == MadeUpCodec.number


@pytest.mark.parametrize("number", sorted(set(GOLDEN) - {FORMAT_VERSION}))
@pytest.mark.parametrize("lost", [None, "format"])
def test_a_directory_of_another_format_is_named_and_left_alone(number: int, lost: str | None, tmp_path: Path) -> None:
    """Also where the file that says the format is lost: each slab says its own."""
    directory = _copy(number, tmp_path)
    if lost is not None:
        (directory / lost).unlink()
    before = _contents(directory)
    for start in (lambda: NvmeTier.open(directory, CAPACITY_BYTES), lambda: check_directory(directory)):
        with pytest.raises(FormatUnsupported) as refused:
            start()
        said = str(refused.value)
        assert (
            said.startswith(f"{directory}: ")
            and f"format {number}, this kvstored reads format {FORMAT_VERSION}" in said
        )
        assert ("--discard-old" in said) == (number < FORMAT_VERSION) and "\n" not in said
    assert _contents(directory) == before


def test_an_older_directory_is_discarded_when_asked_and_no_other(tmp_path: Path) -> None:
    directory = _copy(1, tmp_path)
    (directory / "identity.json").write_text("{}")
    (directory / "slabs/notes").mkdir()  # of others
    (directory / "slabs/notes/1").write_text("mine")
    (directory / "slabs/00000009.damaged").write_text("")
    assert discard_older(directory)
    assert _contents(directory) == {"identity.json": b"{}", "slabs/notes/1": b"mine"}
    with closing(NvmeTier.open(directory, CAPACITY_BYTES)) as tier:
        assert put(tier, *BLOCKS[0]) is not None and finish(tier.sync).ok
    before = _contents(directory)
    assert not discard_older(directory) and not discard_older(tmp_path / "nothing") and _contents(directory) == before
    (directory / "format").write_text(f"format_version: {FORMAT_VERSION + 1}\n")
    with pytest.raises(FormatUnsupported):
        discard_older(directory)
