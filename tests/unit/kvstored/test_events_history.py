"""The numbers of KV events grow from process to process, whatever the wall clock and the state directory do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstored.events.history import EPOCH_BITS, FILE, MAX_EPOCH, MAX_TOPICS, PublishedBefore


class WallClock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


def test_numbers_grow_over_a_clock_that_steps_back(tmp_path: Path, clock: WallClock) -> None:
    daemon = PublishedBefore(tmp_path, clock)
    numbers = [daemon.next_first_number()]
    clock.now_s -= 3600
    numbers.append(daemon.next_first_number())  # the publisher alone was started again
    clock.now_s = 5.0
    numbers.append(PublishedBefore(tmp_path, clock).next_first_number())
    clock.now_s = 2_000_000.0
    numbers.append(PublishedBefore(tmp_path, clock).next_first_number())
    assert numbers == [epoch << EPOCH_BITS for epoch in (1_000_000, 1_000_001, 1_000_002, 2_000_000)]


def test_topics_outlive_the_daemon_and_are_bounded(tmp_path: Path, clock: WallClock) -> None:
    before = PublishedBefore(tmp_path, clock)
    for number in range(MAX_TOPICS + 1):
        before.note(f"kv@n.t@{number}")
        before.note(f"kv@n.t@{number}")
    after = PublishedBefore(tmp_path, clock)
    assert after.topics == [f"kv@n.t@{number}" for number in range(1, MAX_TOPICS + 1)]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600, "it names tenants and models"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"epoch": "7", "topics": []}', '{"epoch": 1e30, "topics": []}', '{"epoch": -1, "topics": []}'],
)
def test_a_file_that_cannot_be_read_is_named_and_the_clock_counts(
    tmp_path: Path, clock: WallClock, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(text)
    assert PublishedBefore(tmp_path, clock).next_first_number() == 1_000_000 << EPOCH_BITS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(tmp_path / FILE) in record.message


def test_where_nothing_can_be_written_numbers_grow_as_long_as_the_daemon_lives(
    tmp_path: Path, clock: WallClock, caplog: pytest.LogCaptureFixture
) -> None:
    before = PublishedBefore(tmp_path / "missing", clock)
    first = before.next_first_number()
    clock.now_s -= 10
    assert before.next_first_number() > first
    assert len(caplog.records) == 1, "it is said once"


def test_a_clock_far_in_the_future_stays_within_63_bits(tmp_path: Path, clock: WallClock) -> None:
    clock.now_s = 1e12
    assert PublishedBefore(tmp_path, clock).next_first_number() == MAX_EPOCH << EPOCH_BITS < 1 << 63
