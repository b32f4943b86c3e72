"""kvctl's data commands before any daemon is asked: wrong usage, token lists, sizes, and what is said of a block."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl import put
from kvctl.bench import check_room
from kvctl.connection import in_words, not_read
from kvctl.data_arguments import positive_size
from kvctl.explain import reason_text, render_chain
from kvctl.main import main
from kvctl.output import DENIED, FAILED, USAGE, CommandError
from kvctl.put import _Stored, read_bytes
from kvctl.target import parse_tokens
from kvstore_console.units import human_blocks
from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.fake_admin import FakeAdmin

MIB = 1 << 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("put", "required: file"),
        ("put file", "say which blocks with one of --name NAME, --tokens LIST or --tokens-file FILE"),
        ("put --name a --tokens 1 file", "not --name and --tokens"),
        ("get", "say which blocks"),
        ("get --tokens 1,2", "--tokens needs --fingerprint FILE or DIGEST"),
        ("get --tokens-file f", "--tokens-file needs --fingerprint"),
        ("get --name a --fingerprint f", "--name takes no --fingerprint"),
        ("get --name a --group 1", "--group goes with --tokens"),
        ("get --tokens 1 --fingerprint f --group -1", "whole number from 0 to 65535"),
        ("delete", "say which blocks"),
        ("prefetch --name a --budget much", "'much' is not a size"),
        ("prefetch --name a --wait 0", "seconds must be above 0"),
        ("put --name a --block-size 1KiB f", "a block has 4KiB to 1GiB"),
        ("put --name a --durability sometimes f", "invalid choice: 'sometimes'"),
        ("explain", "one of KEY..., --name NAME, --tokens LIST, --tokens-file FILE, or --recent"),
        ("explain abcdef --recent", "not KEY and --recent"),
        ("explain --recent 0", "whole number from 1 to 4096"),
        ("explain --recent --fingerprint f", "--recent takes no --fingerprint"),
        ("explain --name a --tenant t", "--tenant goes with KEY or --recent"),
        ("bench --blocks 0", "whole number from 1 to 4096"),
        ("bench --rounds 1", "whole number from 2"),
        ("bench --block-size 2GiB", "a block has 4KiB to 1GiB"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_is_right(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == USAGE
    assert said in capsys.readouterr().err


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=50), st.sampled_from([",", " ", ", ", "\n"])
)
def test_token_lists_are_read_back(tokens: list[int], separator: str) -> None:
    assert parse_tokens(separator.join(map(str, tokens)), "").tolist() == tokens


def test_runs_of_tokens_include_both_ends() -> None:
    assert parse_tokens("5,0-3 7-7", "").tolist() == [5, 0, 1, 2, 3, 7]
    assert parse_tokens("", "").tolist() == []


@pytest.mark.parametrize("word", ["1_000", "\u0663", "+5", "9" * 5000, f"{'9' * 5000}-{'9' * 5001}", "0-\u0663"])
def test_a_token_is_written_in_plain_digits(word: str) -> None:
    with pytest.raises(CommandError, match="no token id") as refused:
        parse_tokens(f"1,{word}", "--tokens")
    assert refused.value.exit_code == USAGE and len(str(refused.value)) < 200


@given(st.text(max_size=20))
def test_no_text_is_more_than_a_mistake(text: str) -> None:
    try:
        parse_tokens(text, "--tokens")
    except CommandError as error:
        assert error.exit_code == USAGE


def test_what_has_no_size_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as /dev/zero; a file of /proc does not say its size either, and has an end."""
    assert len(read_bytes("/proc/self/status")) > 100
    monkeypatch.setattr(put, "MAX_STREAM_BYTES", 100)
    with pytest.raises(CommandError, match="/proc/self/status gives over 100 B: put a regular file instead"):
        read_bytes("/proc/self/status")


def test_sizes() -> None:
    assert [positive_size(text) for text in ("4096", "64KiB", "1.5MiB", "2GiB", "1.5TiB", "10 B")] == [
        4096,
        65536,
        3 * MIB // 2,
        2048 * MIB,
        3 << 39,
        10,
    ]
    for text in ("", "0", "-1", "1xb", "MiB", "1e9", "25%"):
        with pytest.raises(argparse.ArgumentTypeError):
            positive_size(text)


def test_one_block_is_not_blocks() -> None:
    assert (human_blocks(1), human_blocks(0), human_blocks(1234)) == ("1 block", "0 blocks", "1,234 blocks")


# What is said of a block


def missing(cause: str, **fields: object) -> pb.BlockExplanation:
    return pb.BlockExplanation(key="ab" * 16, state="missing", cause=cause, **fields)  # type: ignore[arg-type]


def stored(number: int, **fields: object) -> pb.BlockExplanation:
    block = pb.BlockStatus(key=f"{number:032x}", tiers=["host", "nvme"], durability="durable", accesses=3)
    return pb.BlockExplanation(key=block.key, state="stored", block=block, load_us=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (missing("evicted", gone_s=3.2, accesses_before=1), "evicted for want of room, 3.2 s ago, after 1 use"),
        (missing("quota", gone_s=70), "its own maximum, 1 min 10 s ago"),
        (missing("corrupt", continued=True), "to be computed again; stored blocks still continue it"),
        (missing("a cause of the future"), "a cause of the future"),
        (pb.BlockExplanation(state="filling"), "it is being written"),
        (stored(1, missing_ancestor="cd" * 16), "not reached: cdcdcdcdcdcd before it is missing"),
        (stored(1), ""),
    ],
)
def test_the_reason_in_one_sentence(block: pb.BlockExplanation, said: str) -> None:
    assert reason_text(block).endswith(said)


def test_each_cause_of_the_daemon_has_its_sentence() -> None:
    from kvstored.lifecycle import Cause

    for cause in Cause:
        assert reason_text(missing(cause.name.lower())) != cause.name.lower(), f"no sentence for {cause.name}"


def test_a_run_of_missing_blocks_is_one_line_and_stored_ones_are_not() -> None:
    blocks = [stored(0), stored(1), *(missing("never_stored") for _ in range(5)), stored(9, missing_ancestor="ab" * 16)]
    lines = render_chain("x", blocks, 2, 1, []).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2-6", "7"]
    assert lines[0].startswith("x: a get finds 2 of 8 blocks, in DRAM; block 2: never stored")


# What bench asks before it stores anything


@pytest.fixture
def bench_arguments() -> argparse.Namespace:
    return argparse.Namespace(blocks=64, block_size=MIB, timeout=5.0, force=False)


def host(free_bytes: int) -> pb.TiersReply:
    """A host tier of 1 GiB; half of the free bytes is in arenas that exist already."""
    half = free_bytes // 2
    used_by = {"free": half, "blocks": 1024 * MIB - free_bytes}
    return pb.TiersReply(
        tiers=[pb.TierStatus(name="host", capacity_bytes=1024 * MIB, used_bytes=sum(used_by.values()), used_by=used_by)]
    )


def test_bench_needs_room_or_force(tmp_path: Path, bench_arguments: argparse.Namespace) -> None:
    with FakeAdmin(tmp_path) as admin:
        admin.replies["Tiers"] = host(65 * MIB)
        assert check_room(tmp_path, bench_arguments) == []
        admin.replies["Tiers"] = host(63 * MIB)
        with pytest.raises(CommandError, match="other blocks would be evicted") as refused:
            check_room(tmp_path, bench_arguments)
        assert refused.value.exit_code == FAILED
        bench_arguments.force = True
        assert "other blocks were evicted" in check_room(tmp_path, bench_arguments)[0]


def test_bench_without_an_operators_rights_is_small_or_forced(
    tmp_path: Path, bench_arguments: argparse.Namespace
) -> None:
    with FakeAdmin(tmp_path) as admin:
        admin.failure = (grpc.StatusCode.PERMISSION_DENIED, "not you")
        assert "only an operator may ask" in check_room(tmp_path, bench_arguments)[0]
        bench_arguments.blocks = 2000
        with pytest.raises(CommandError, match="--force") as refused:
            check_room(tmp_path, bench_arguments)
        assert refused.value.exit_code == DENIED


def test_json_needs_a_file_for_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket-dir", str(tmp_path), "get", "--name", "x", "--json"]) == USAGE
    assert json.loads(capsys.readouterr().out)["exit_code"] == USAGE


@pytest.mark.parametrize("reason", ["verify_failed", "arena_not_mapped", "throttled", "late"])
def test_what_is_stored_and_cannot_be_read_is_not_said_to_be_missing(reason: str) -> None:
    assert not_read("weights", reason) == "weights cannot be read" and " " in in_words(reason)
    assert not_read("weights", "evicted") == "weights is not stored"


def test_a_put_whose_first_blocks_leave_before_its_last_come_says_why() -> None:
    arguments = argparse.Namespace(durability="batch", timeout=1.0, replace=False, block_size=100)
    receipt = SimpleNamespace(
        stored_blocks=0, visible_blocks=0, durability=[], statuses=["throttled"], reason="put it from that one on"
    )
    session: Any = SimpleNamespace(
        put=lambda *tokens, **options: receipt, fingerprint=SimpleNamespace(block_tokens=8),
        lookup=lambda tokens, group: SimpleNamespace(blocks=len(tokens) // 16, reason="evicted"),
    )  # fmt: skip
    progress: Any = SimpleNamespace(say=lambda text: None)
    said = _Stored(progress, arguments).add(session, list(range(64)), [b""], 4, 0, 100)
    assert said == "what was stored of it first is gone (evicted for want of room): see kvctl status"
