"""Hints of engines and orchestrators bring the blocks of a chain to DRAM before its next request, in a live daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_connectors.vllm.answers import AnswerReporter, EndedAnswer
from kvstore_connectors.vllm.kv_hints import PAUSE, PREFETCH, VERSION
from kvstore_connectors.vllm.orders import RequestPrefix
from kvstore_proto.identity import pack_tokens
from kvstore_proto.v1 import admin_pb2
from tests.reference.conversations import found_blocks, model, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 8


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    settings = ("prefetch.enabled=true", "prefetch.predictor=on-hint", "prefetch.min_probability=0.1")
    with running_daemon(*settings) as running:
        yield running


def leave_dram(daemon: RunningDaemon) -> None:
    assert eventually(lambda: daemon.status().leases == 0)
    daemon.drop("host")
    assert daemon.tiers()["host"].blocks == 0


def brought(daemon: RunningDaemon) -> int:
    return int(daemon.ask("Predictor", admin_pb2.PredictorRequest()).all.prefetched_blocks)


@pytest.mark.parametrize(
    ("kind", "payload"), [(PAUSE, {"next_step": "tool_call", "returns_in_s": 1.0}), (PREFETCH, {"in_s": 1.0})]
)
def test_what_an_orchestrator_says_through_vllm_brings_the_chain(
    daemon: RunningDaemon, kind: str, payload: dict[str, Any]
) -> None:
    action = SimpleNamespace(action_type=kind, action_version=VERSION, payload=payload)
    with daemon.connect(MODEL) as session:
        put_conversation(session, 1, BLOCKS, durability="always")
        leave_dram(daemon)
        reporter = AnswerReporter([session], say=print)
        prefix = RequestPrefix(pack_tokens(tokens_of(1, BLOCKS)))
        reporter.ended(EndedAnswer(prefix, BLOCKS, 5, SimpleNamespace(actions=[action])))
        assert eventually(lambda: daemon.tiers()["host"].blocks == BLOCKS), "before any request"
        assert eventually(lambda: brought(daemon) == (BLOCKS if kind == PAUSE else 0)), "the other one moves at once"
        reporter.close()
        assert found_blocks(session, 1, BLOCKS) == BLOCKS


@pytest.mark.slow
def test_a_tool_call_brings_the_chain_once_the_pauses_after_such_calls_are_known(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for _ in range(4):
            put_conversation(session, 2, BLOCKS, durability="always")
            session.hint(tokens_of(2, BLOCKS), next_step="tool_call")
            time.sleep(1.5)  # the tool
            assert found_blocks(session, 2, BLOCKS) == BLOCKS
        leave_dram(daemon)
        assert brought(daemon) == 0

        def is_brought_after_a_call() -> bool:
            session.hint(tokens_of(2, BLOCKS), next_step="tool_call")
            return eventually(lambda: brought(daemon) == BLOCKS, 1.0)

        assert eventually(is_brought_after_a_call)
