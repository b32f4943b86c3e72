"""`check` names every damage done to a directory, `--repair` repairs it, and nothing wrong is served afterwards."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_tiers.base import OutcomeKind, Slot
from kvstore_tiers.nvme import DirectoryInUse, NvmeTier
from kvstore_tiers.nvme.check import FindingKind, Severity, check_directory
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock, read_superblock
from kvstore_tiers.nvme.repair import repair_directory
from kvstore_tiers.testing.transfers import block, finish, get, put
from kvstored.cli import EXIT_DAMAGE, EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from tests.reference.examples import examples
from tests.reference.stored_blocks import store_numbers

CAPACITY_BYTES = 3 << 20
PAYLOAD_BYTES = 10_000
LARGE_BYTES = 60_000
NUMBERS = range(1, 41)
LARGE_NUMBERS = range(101, 106)


def fill(directory: Path) -> None:
    """Blocks of two sizes in several slabs, some slots reused, one in quarantine; closed cleanly."""
    with closing(NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=2)) as tier:
        slots = {number: put(tier, *block(number, PAYLOAD_BYTES)) for number in NUMBERS}
        assert all(slots.values()) and finish(tier.sync).ok
        for number in (3, 4, 9):
            tier.free(slots[number])  # type: ignore[arg-type]
            assert put(tier, *block(number, PAYLOAD_BYTES))
        store_numbers(tier, LARGE_NUMBERS, LARGE_BYTES)
        tier.quarantine(slots[20], "to see it survive")  # type: ignore[arg-type]
        assert finish(tier.sync).ok


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filled") / "d"
    fill(directory)
    return directory


@pytest.fixture
def directory(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "d"))


def slabs(directory: Path) -> list[Path]:
    return sorted((directory / "slabs").glob("*.slab"))


def superblock_of(slab: Path) -> Superblock:
    found = read_superblock(slab.read_bytes()[:SUPERBLOCK_BYTES])
    assert isinstance(found, Superblock)
    return found


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ mask]), offset)


def payload_of(number: int) -> int:
    return LARGE_BYTES if number in LARGE_NUMBERS else PAYLOAD_BYTES


def served(directory: Path) -> set[int]:
    """Return the blocks that a tier on this directory serves; each one that it serves is right."""
    good = set()
    with closing(NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=2)) as tier:
        blocks: dict[int, Slot] = {int.from_bytes(header.key, "big"): slot for slot, header in tier.recover()}
        for number, slot in blocks.items():
            header, payload = block(number, payload_of(number))
            outcome, copy = get(tier, slot, header.key, payload_of(number))
            if outcome.ok:
                assert np.array_equal(copy, payload)
                good.add(number)
            else:
                assert outcome.kind is OutcomeKind.CORRUPT, outcome
        assert tier.statistics().used_bytes <= CAPACITY_BYTES
    return good


ALL = set(NUMBERS) - {20} | set(LARGE_NUMBERS)


def repaired(directory: Path) -> set[int]:
    """Repair, and hold it to its promises: a second check is clean but for what it named, a second repair idle."""
    report = repair_directory(directory, verify_payloads=True)
    left = check_directory(directory, verify_payloads=True)
    assert left == [finding for finding, _ in report.left]
    assert {finding.kind for finding in left} <= {FindingKind.PUT_ASIDE}
    again = repair_directory(directory, verify_payloads=True)
    assert again.done == [] and again.found == left
    return served(directory)


def test_a_sound_directory_has_only_notes(directory: Path) -> None:
    assert check_directory(directory, capacity_bytes=CAPACITY_BYTES, verify_payloads=True) == []
    (directory / "shopping list").write_text("milk")
    notes = check_directory(directory, notes=True)
    assert {(note.severity, note.kind) for note in notes} == {
        (Severity.NOTE, FindingKind.STRAY),
        (Severity.NOTE, FindingKind.QUARANTINED),
        (Severity.NOTE, FindingKind.ORPHANS),  # block 21 continues the one in quarantine, 101 one that never was
    }
    (orphans,) = [note for note in notes if note.kind is FindingKind.ORPHANS]
    assert orphans.what.startswith(f"{20 + len(LARGE_NUMBERS)} blocks cannot be reached")
    (quarantined,) = [note for note in notes if note.kind is FindingKind.QUARANTINED]
    assert (quarantined.slab, quarantined.slot) == (2, 4)
    report = repair_directory(directory, verify_payloads=True)
    assert (report.found, report.done, report.left) == ([], [], [])
    assert (directory / "shopping list").exists()
    assert served(directory) == ALL


def damage_record(directory: Path) -> None:
    flip(slabs(directory)[0], SUPERBLOCK_BYTES + 4 * RECORD_BYTES + 30)


def damage_payload(directory: Path) -> None:
    flip(slabs(directory)[0], superblock_of(slabs(directory)[0]).slot_offset(4) + 5000)


def damage_header(directory: Path) -> None:
    flip(slabs(directory)[0], superblock_of(slabs(directory)[0]).slot_offset(4) + 100)


def swap_slots(directory: Path) -> None:
    slab = slabs(directory)[0]
    superblock, raw = superblock_of(slab), bytearray(slab.read_bytes())
    first, second, end = (superblock.slot_offset(index) for index in (5, 6, 7))
    raw[first:end] = raw[second:end] + raw[first:second]
    slab.write_bytes(raw)


def truncate(directory: Path) -> None:
    os.truncate(slabs(directory)[0], superblock_of(slabs(directory)[0]).slot_offset(2) + 1000)


def lengthen(directory: Path) -> None:
    with open(slabs(directory)[0], "ab") as file:
        file.write(b"x" * 9000)


def lose_front_superblock(directory: Path) -> None:
    flip(slabs(directory)[0], 20)


def lose_both_superblocks(directory: Path) -> None:
    flip(slabs(directory)[0], 20)
    flip(slabs(directory)[0], slabs(directory)[0].stat().st_size - SUPERBLOCK_BYTES + 20)


def rename_slab(directory: Path) -> None:
    slabs(directory)[0].rename(directory / "slabs" / "00000077.slab")


def copy_slab(directory: Path) -> None:
    shutil.copy(slabs(directory)[0], directory / "slabs" / "00000077.slab")


def lose_format(directory: Path) -> None:
    (directory / "format").unlink()


def leave_temporaries(directory: Path) -> None:
    (directory / "slabs" / "00000050.new").write_bytes(bytes(4096))
    (directory / "seal.new").write_text("{")
    (directory / "format.new").write_text("")


DAMAGES: dict[Callable[[Path], None], set[FindingKind]] = {
    damage_record: {FindingKind.RECORD},
    damage_payload: {FindingKind.PAYLOAD},
    damage_header: {FindingKind.HEADER},
    swap_slots: {FindingKind.HEADER},
    truncate: {FindingKind.TRUNCATED, FindingKind.HEADER},
    lengthen: {FindingKind.TOO_LONG},
    lose_front_superblock: {FindingKind.SUPERBLOCK_COPY},
    lose_both_superblocks: {FindingKind.SUPERBLOCK},
    rename_slab: {FindingKind.WRONG_NUMBER},
    copy_slab: {FindingKind.WRONG_NUMBER},
    lose_format: {FindingKind.FORMAT_MISSING},
    leave_temporaries: {FindingKind.UNFINISHED_SLAB, FindingKind.TEMPORARY},
}
KEEPS_ALL = {
    lengthen,
    lose_front_superblock,
    rename_slab,
    copy_slab,
    lose_format,
    leave_temporaries,
}


@pytest.mark.parametrize("spoil", DAMAGES, ids=lambda spoil: spoil.__name__)
def test_each_damage_is_named_and_repaired(directory: Path, spoil: Callable[[Path], None]) -> None:
    spoil(directory)
    found = check_directory(directory, verify_payloads=True)
    assert {finding.kind for finding in found} >= DAMAGES[spoil], found
    before = served_before_repair(directory)
    after = repaired(directory)
    assert after >= before, "a block that verifies is never given up"
    if spoil in KEEPS_ALL:
        assert after == ALL


def served_before_repair(directory: Path) -> set[int]:
    """Return the blocks that a daemon would serve of the directory as it is: on a copy, since an open repairs."""
    with tempfile.TemporaryDirectory() as copy:
        return served(Path(shutil.copytree(directory, Path(copy) / "d")))


@st.composite
def wounds(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["flip", "zero", "truncate", "swap", "delete", "flip-seal"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 1 << 30), st.integers(1, 1 << 20)), min_size=1, max_size=6))


def inflict(directory: Path, kind: str, where: int, amount: int) -> None:
    found = slabs(directory)
    if kind == "flip-seal":
        path = directory / "seal"
        if path.exists():
            flip(path, where % path.stat().st_size, 1 << amount % 8)
        return
    if not found:
        return
    slab = found[where % len(found)]
    size = slab.stat().st_size
    if not size:
        return
    if kind == "delete":
        slab.unlink()
    elif kind == "truncate":
        os.truncate(slab, where % size)
    elif kind == "flip":
        # half of the flips hit what is small and matters: superblock and records
        flip(slab, where % (min(size, 16384) if amount % 2 else size), 1 << amount % 8)
    elif kind == "zero":
        with open(slab, "r+b") as file:
            file.seek(where % size)
            file.write(bytes(min(amount, size - where % size)))
    elif kind == "swap":
        raw = bytearray(slab.read_bytes())
        pages = len(raw) // 4096
        if pages >= 2:
            a, b = where % pages * 4096, amount % pages * 4096
            raw[a : a + 4096], raw[b : b + 4096] = raw[b : b + 4096], raw[a : a + 4096]
            slab.write_bytes(raw)


@settings(max_examples=examples(40))
@given(wounds())
def test_any_damage_is_repaired(filled: Path, inflicted: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvr-") as temporary:
        directory = Path(shutil.copytree(filled, Path(temporary) / "d"))
        for wound in inflicted:
            inflict(directory, *wound)
        before = served_before_repair(directory)
        assert repaired(directory) >= before


def test_a_dry_run_changes_nothing_and_says_what_a_run_does(directory: Path) -> None:
    damage_record(directory)
    damage_payload(directory)
    leave_temporaries(directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}
    planned = repair_directory(directory, verify_payloads=True, dry_run=True)
    assert {path: path.read_bytes() for path in before} == before
    done = repair_directory(directory, verify_payloads=True)
    would = {line.replace(": would ", ": did ") for line in planned.done}
    assert would <= set(done.done) and would


def test_a_smaller_capacity_is_held_by_repair(directory: Path) -> None:
    smaller = 1 << 20
    assert FindingKind.CAPACITY in {finding.kind for finding in check_directory(directory, capacity_bytes=smaller)}
    report = repair_directory(directory, capacity_bytes=smaller)
    assert report.left == [] and any("until the rest fits" in line for line in report.done)
    assert check_directory(directory, capacity_bytes=smaller, verify_payloads=True) == []


def test_a_directory_in_use_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_payload(directory)
    with closing(NvmeTier.open(directory, CAPACITY_BYTES)):
        with pytest.raises(DirectoryInUse):
            repair_directory(directory)
        assert main(["check", str(directory), "--repair"]) == EXIT_FAILED
        assert f"in use by process {os.getpid()}" in capsys.readouterr().err


def test_the_command_says_what_it_did(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_payload(directory)
    assert main(["check", str(directory)]) == EXIT_OK
    assert capsys.readouterr().out == "no damage found\n"
    assert main(["check", str(directory), "--payloads", "--json"]) == EXIT_DAMAGE
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["slab"], finding["slot"]) == ("payload", 1, 4)
    assert main(["check", str(directory), "--payloads", "--repair", "--dry-run"]) == EXIT_DAMAGE
    assert "would quarantine the slot" in capsys.readouterr().out
    assert main(["check", str(directory), "--payloads", "--repair"]) == EXIT_OK
    output = capsys.readouterr().out
    assert "did quarantine the slot" in output and "kept for inspection" in output and output.endswith("repaired\n")
    assert main(["check", str(directory), "--payloads", "--repair", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["done"] == []
    lose_both_superblocks(directory)
    assert main(["check", str(directory), "--repair"]) == EXIT_DAMAGE
    output = capsys.readouterr().out
    assert "put the file aside" in output and "left: damage" in output and "delete it by hand" in output


def test_mistakes_are_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(directory / "nowhere")]) == EXIT_USAGE
    assert main(["check", str(directory), "--dry-run"]) == EXIT_USAGE
    assert main(["check", str(directory), "--capacity", "lots"]) == EXIT_USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("kvstored: ") for line in lines)


@pytest.mark.parametrize("options", [(), ("--repair",)])
def test_what_is_no_tiers_directory_is_not_called_sound(
    directory: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    state_dir = directory.parent
    directory.rename(state_dir / "nvme")
    assert main(["check", str(state_dir), *options]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith(f"it has no slabs; did you mean {state_dir / 'nvme'}?\n")
    assert [path.name for path in state_dir.iterdir()] == ["nvme"], "nothing is made there"
    shutil.rmtree(state_dir / "nvme" / "slabs")
    assert main(["check", str(state_dir / "nvme"), *options]) != EXIT_USAGE, "a tier that lost its slabs is looked at"
