"""The shipped conformance suite of connectors on the engines we ship, and on connectors with mistakes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from kvstore_client.testing import ConnectorContract, DaemonProcess, EngineFailed, EngineProcess, EngineSetting
from tests.reference.skips import skip_without_ggml

FLAWED = "tests.reference.flawed_engines"


class TestMockEngine(ConnectorContract):
    engine = "kvstore_client.testing.mock_engine:open_mock_engine"

    @pytest.mark.slow
    def test_a_stopped_daemon_never_makes_an_engine_hang(self) -> None:
        super().test_a_stopped_daemon_never_makes_an_engine_hang()


@pytest.mark.slow
class TestOwnEngine(ConnectorContract):
    engine = "tests.reference.own_engine:open_own_engine"
    fills_gaps = True

    @pytest.fixture(autouse=True)
    def ggml(self) -> None:
        skip_without_ggml()


@pytest.mark.slow
class TestKindsEngine(ConnectorContract):
    """Layer groups of every kind."""

    engine = "kvstore_client.testing.mock_kinds:open_kinds_engine"


def _slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("trusts_ended_leases", "a_lease_that_expires_while_its_blocks_are_copied_is_not_trusted"),
        ("takes_the_last_token", "a_prompt_of_whole_blocks_leaves_its_last_token_to_compute"),
        ("one_fingerprint_for_all", "another_model_gets_nothing"),
        _slow("trusts_ended_leases", "a_daemon_that_dies_while_blocks_are_copied_costs_nothing_but_time"),
        _slow("stores_too_early", "a_prompt_that_parts_from_a_stored_one_restores_what_they_share"),
        _slow("fails_with_the_store", "a_store_without_room_costs_nothing_but_hits"),
        _slow("requires_the_store", "without_a_daemon_the_engine_works_and_finds_it_when_it_comes"),
        _slow("half_an_answer", "equal_blocks_are_stored_once"),
        _slow("takes_what_one_group_has", "a_block_that_one_layer_group_lacks_ends_the_hit_where_that_group_does"),
        _slow("loads_a_shorter_window", "a_second_engine_restores_what_the_first_stored"),
        _slow("mixes_the_widths", "a_second_engine_restores_what_the_first_stored"),
        _slow("takes_an_earlier_state", "a_second_engine_restores_what_the_first_stored"),
        _slow("needs_all_windows", "a_block_that_one_layer_group_lacks_ends_the_hit_where_that_group_does"),
        _slow("keeps_leases", "a_second_engine_restores_what_the_first_stored"),
        _slow("restores_nothing", "a_second_engine_restores_what_the_first_stored"),
    ],
)
def test_the_suite_finds_a_mistake(mistake: str, case: str) -> None:
    class Suite(ConnectorContract):
        engine = f"{FLAWED}:{mistake}"

    with pytest.raises(AssertionError) as caught:
        getattr(Suite(), f"test_{case}")()
    if isinstance(caught.value, EngineFailed):
        assert mistake in {"fails_with_the_store", "requires_the_store"}, "it failed for another reason"


def test_a_deadline_that_passes_on_a_busy_machine_is_no_mistake() -> None:
    class Suite(ConnectorContract):
        engine = f"{FLAWED}:misses_every_other"

    Suite().test_an_engine_that_dies_with_a_lease_leaves_nothing_behind()


def test_an_engine_that_hangs_or_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = EngineSetting(None)
    hangs = EngineProcess(TestMockEngine.engine, setting)
    os.kill(hangs.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, hangs.pid, os.WSTOPPED)
    with monkeypatch.context() as patch, pytest.raises(EngineFailed, match="hangs"):
        patch.setattr("kvstore_client.testing.process.PATIENCE_S", 0.1)
        hangs.restore([1, 2, 3])
    dies = EngineProcess(TestMockEngine.engine, setting)
    os.kill(dies.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="ended by itself"):
        dies.restore([1, 2, 3])
    with pytest.raises(EngineFailed, match="no_such_function"):
        EngineProcess("kvstore_client.testing.mock_engine:no_such_function", setting)


def test_a_suite_without_an_engine_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match="must name `engine`"):
        ConnectorContract().open_engine(EngineSetting(None))


def test_a_daemon_that_cannot_start_is_reported_with_its_log() -> None:
    with pytest.raises(AssertionError, match="no_such_setting"), DaemonProcess("no_such_setting=1"):
        raise RuntimeError("it started")
