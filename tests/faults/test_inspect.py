"""`kvstored inspect` shows slots, blocks and keys as they are stored; it changes nothing and shows no tokens."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES, Superblock, read_superblock
from kvstore_tiers.testing.transfers import block, finish, put
from kvstored.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main

CAPACITY_BYTES = 3 << 20
PAYLOAD_BYTES = 10_000


def key(number: int) -> str:
    return block(number, 1)[0].key.hex()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Blocks 1 to 6, of which 3 was freed and 5 is in quarantine."""
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)) as tier:
        slots = {number: put(tier, *block(number, PAYLOAD_BYTES, tokens=17)) for number in range(1, 7)}
        assert finish(tier.sync).ok
        tier.free(slots[3])  # type: ignore[arg-type]
        tier.quarantine(slots[5], "a flipped bit")  # type: ignore[arg-type]
        assert finish(tier.sync).ok
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["inspect", *map(str, arguments), "--json"]) == EXIT_OK
    return json.loads(capsys.readouterr().out)


def test_a_block_is_shown_with_its_neighbours(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(capsys, directory, "block", key(2))
    assert (output["key"], output["parent"], output["parent_stored"]) == (key(2), key(1), True)
    assert output["children"] == [], "3 was freed"
    (slot,) = output["slots"]
    header, _ = block(2, PAYLOAD_BYTES, tokens=17)
    assert (slot["slab"], slot["slot"], slot["state"]) == (1, 1, "live")
    superblock = read_superblock((directory / "slabs" / "00000001.slab").read_bytes()[:SUPERBLOCK_BYTES])
    assert isinstance(superblock, Superblock) and slot["generation"] == superblock.first_generations()[1]
    assert (slot["depth"], slot["payload_bytes"], slot["tokens"]) == (header.depth, PAYLOAD_BYTES, 17)
    assert slot["verified"] == "header and payload hold"
    assert shown(capsys, directory, "block", key(1))["children"] == [key(2)]
    assert shown(capsys, directory, "block", key(4))["parent_stored"] is False
    assert main(["inspect", str(directory), "block", key(3)]) == EXIT_FAILED
    assert "is not stored here" in capsys.readouterr().err


def test_a_damaged_block_is_shown_as_one(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slot,) = shown(capsys, directory, "block", key(2))["slots"]
    with open(slot["file"], "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"spoilt", slot["file_offset"] + 5000)
    (slot,) = shown(capsys, directory, "block", key(2))["slots"]
    assert slot["verified"] == "FAILED: the payload's checksum does not hold"


def test_a_slot_is_shown_in_every_state(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (live,) = shown(capsys, directory, "slot", "1:0")["slots"]
    assert (live["state"], live["key"]) == ("live", key(1))
    (free,) = shown(capsys, directory, "slot", "1:2")["slots"]
    assert free["state"] == "free" and key(3) in free["slot_holds"], "freed, its bytes are still there"
    (quarantined,) = shown(capsys, directory, "slot", "1:4")["slots"]
    assert (quarantined["state"], quarantined["key"]) == ("quarantined", key(5))
    assert "reason" not in quarantined, "only a daemon knows"
    (unused,) = shown(capsys, directory, "slot", "1:9")["slots"]
    assert unused["state"] == "free: never used"


def test_a_key_is_followed_through_records_and_old_bytes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(capsys, directory, "key", key(5))
    assert (output["stored"], [slot["state"] for slot in output["slots"]]) == (False, ["quarantined"])
    assert shown(capsys, directory, "key", key(3))["slots"] == []
    (old,) = shown(capsys, directory, "key", key(3), "--every-slot")["slots"]
    assert old["state"].startswith("old bytes")
    output = shown(capsys, directory, "key", key(6))
    assert output["stored"] and (output["slots"][0]["slab"], output["slots"][0]["slot"]) == (1, 5)


def test_a_directory_in_use_is_read_beside_its_daemon(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(NvmeTier.open(directory, CAPACITY_BYTES, io_threads=1)) as tier:
        output = shown(capsys, directory, "block", key(2))
        assert f"in use by process {os.getpid()}" in output["state"] and "torn" in output["state"]
        assert output["slots"][0]["verified"] == "header and payload hold"
        (quarantined,) = shown(capsys, directory, "slot", "1:4")["slots"]
        assert quarantined["reason"] == "ask the daemon: kvctl quarantine list"
        assert put(tier, *block(9, PAYLOAD_BYTES))
    assert shown(capsys, directory, "block", key(9))["state"] == "in use by no daemon"


def test_nothing_is_changed_and_no_token_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}
    for name in (("block", key(2)), ("slot", "1:0"), ("key", key(5))):
        assert main(["inspect", str(directory), *name]) == EXIT_OK
        output = capsys.readouterr().out
        assert "tokens" in output and "17" in output
        assert "[" not in output and "2, 3, 4" not in output  # token ids of block 2 are 2, 3, 4, ...
    assert {path: path.read_bytes() for path in before} == before


def test_mistakes_are_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory / "slabs"), "slot", "1:1"]) == EXIT_USAGE
    assert main(["inspect", str(directory), "slot", "one"]) == EXIT_USAGE
    assert main(["inspect", str(directory), "slot", "1:9999"]) == EXIT_FAILED
    assert main(["inspect", str(directory), "slot", "7:0"]) == EXIT_FAILED
    assert main(["inspect", str(directory), "block", "xyz"]) == EXIT_USAGE
    assert main(["inspect", str(directory), "block", "000000"]) == EXIT_FAILED
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 6 and "Traceback" not in captured.err
