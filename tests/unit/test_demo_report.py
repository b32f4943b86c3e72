"""The demo prints a conversation's predicted turn, and gives it to machines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from demo.first_light import Answer, Result
from demo.next_turn import Turn
from demo.report import as_json, as_text


def answer(name: str, ttft_s: float) -> Answer:
    return Answer(name, "text", [1, 2], 2053, ttft_s, ttft_s, 2048, 5, 47_200_000, 0)


def turn(used_blocks: int, needed_blocks: int = 16, demanded_blocks: int = 0) -> Turn:
    return Turn(
        pause_s=21.0, first_ttft_s=0.9, ttft_s=0.03, blocks=16, demoted_blocks=16, needed_blocks=needed_blocks,
        used_blocks=used_blocks, late_blocks=0, wasted_blocks=16 - used_blocks, restored_tokens=1024,
        computed_tokens=19, host_bytes=23_600_000, nvme_bytes=0, demanded_blocks=demanded_blocks,
    )  # fmt: skip


@pytest.fixture
def result() -> Result:
    found = Result("a model", ready_s=0.5, restart_ready_s=0.4)
    found.answers += [answer(name, ttft_s) for name, ttft_s in (("cold", 1.8), ("dram", 0.04), ("nvme", 0.06))]
    found.answers += [answer("restart", 0.03), answer("damaged", 1.4)]
    return found


def test_the_predicted_turn_is_said_in_a_line(result: Result) -> None:
    (line,) = [line for line in as_text(result, turn(16)).splitlines() if line.startswith("predicted turn: ")]
    assert "30 ms (900 ms at the first turn), 23.6 MB from DRAM, 0.0 MB waited for" in line
    assert "16 of 16 blocks had left DRAM and were back in time, 0 late, 0 wasted" in line


def test_machines_get_all_of_it(result: Result) -> None:
    found = json.loads(json.dumps(as_json(result, turn(16))))["next_turn"]
    assert (found["used_blocks"], found["blocks"], found["nvme_bytes"], found["ttft_s"]) == (16, 16, 0, 0.03)


def test_a_turn_that_was_not_predicted_is_no_success() -> None:
    assert turn(16).good and not turn(0).good


def test_a_turn_whose_windows_need_nothing_that_left_dram_says_so(result: Result) -> None:
    assert turn(0, needed_blocks=0).good and not turn(0, needed_blocks=0, demanded_blocks=1).good
    assert not replace(turn(0, needed_blocks=0), restored_tokens=0).good
    assert "none of the 16 blocks that had left DRAM was needed, 0 late" in as_text(result, turn(0, needed_blocks=0))
