"""Windowed layers and a real daemon: conversations resume at their ends, shared prompts where they part, after a
restart, from NVMe, and when blocks of windows have been evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.v1 import admin_pb2
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool

_WINDOW = 130
_FULL = LayerGroup(0, layers=(0,), bytes_per_token_per_layer=32)
_SLIDING = LayerGroup(1, "sliding", _WINDOW, layers=(1,), bytes_per_token_per_layer=32)
_MODEL = Fingerprint(model_name="twin", weights_digest="twin", groups=(_FULL, _SLIDING))
_PROMPT: list[int] = np.random.default_rng(1).integers(0, 64, 1000).tolist()


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


def _engine(session: Session, *, blocks: int = 200, window_blocks: int = 100, sharing: bool = True) -> BatchEngine:
    compute = TwinCompute(twin_pool(blocks, window=(_WINDOW, window_blocks)), on_step=StepClock().step)
    return BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(max_queue_s=1e9, prefix_sharing=sharing),
        sessions=lambda tenant: session,
        costs=assume(LearnedCosts()),  # computing looks slow: restore all that is stored
    )


def _answer(session: Session, prompt: list[int], count: int = 40) -> int:
    """Answer in an engine that has computed nothing yet, check the answer, and return the restored tokens."""
    engine, outcome = _engine(session), Outcome()
    engine.add(request("a", prompt, count))
    run(engine, outcome)
    engine.close()
    assert outcome.tokens["a", 0] == answer_alone(prompt, count)
    return outcome.finished["a", 0].usage.daemon_tokens


def _restored(session: Session, prompt: list[int]) -> int:
    """Return the restored tokens; a lookup that a busy machine answers too late is a miss, and asked again."""
    return next((found for _ in range(20) if (found := _answer(session, prompt))), 0)


def _keep_windows(session: Session, prompt: list[int], first: int) -> None:
    """Leave of the windowed layers' blocks those from number `first` on, as a store does that is short of room."""
    tokens = np.array(prompt[: len(prompt) // 64 * 64], np.int32)
    with session.get(tokens, group=1, first_block=first, deadline_s=20.0) as lease:
        kept = [np.array(lease.payload(place)) for place in range(len(lease))]
    assert len(kept) == len(tokens) // 64 - first
    session.delete(tokens, group=1, deadline_s=20.0)
    assert session.put(tokens, payloads=kept, first_block=first, group=1).stored_blocks == len(kept)


def test_a_conversation_resumes_at_its_end_and_a_shared_prompt_where_it_parts(daemon: RunningDaemon) -> None:
    with daemon.connect(_MODEL) as session:
        assert _answer(session, _PROMPT) == 0
        assert session.resume_point(np.array(_PROMPT, np.int32)).blocks == 15
        turn = [*_PROMPT, *answer_alone(_PROMPT, 40), 5, 6, 7]
        assert _restored(session, turn) == len(turn) // 64 * 64
        for shared in (64, 130, 500, 999):
            assert _restored(session, [*_PROMPT[:shared], 1, *_PROMPT[:100]]) >= shared // 64 * 64


@pytest.mark.slow
def test_it_resumes_after_a_kill_and_from_nvme(daemon: RunningDaemon) -> None:
    with daemon.connect(_MODEL) as session:
        assert _answer(session, _PROMPT) == 0
        assert session.state == "connected"
        daemon.ask("Flush", admin_pb2.FlushRequest())
    daemon.kill9()
    daemon.restart()
    with daemon.connect(_MODEL) as session:
        daemon.drop("host")
        assert eventually(lambda: session.resume_point(np.array(_PROMPT, np.int32)).blocks == 15)
        assert _restored(session, [*_PROMPT, 3]) == 960
        daemon.drop("host")
        assert _restored(session, [*_PROMPT[:500], 3]) == 448


def test_what_was_evicted_in_the_middle_is_computed_and_the_end_still_resumes(daemon: RunningDaemon) -> None:
    with daemon.connect(_MODEL) as session:
        assert _answer(session, _PROMPT, 4) == 0  # no block behind the prompt's
        _keep_windows(session, _PROMPT, 12)
        point = session.resume_point(np.array(_PROMPT[:500], np.int32))
        assert (point.blocks, point.ended_by) == (0, 1)
        assert _restored(session, [*_PROMPT, 3]) == 960
        assert _answer(session, [*_PROMPT[:500], 3]) == 0  # and stores its own window there
        assert _restored(session, [*_PROMPT[:500], 4]) == 448


def test_a_prompt_that_does_not_fit_the_windows_is_stored_while_it_is_computed(daemon: RunningDaemon) -> None:
    prompt: list[int] = np.random.default_rng(2).integers(0, 64, 3000).tolist()
    with daemon.connect(_MODEL) as session:
        engine = _engine(session, sharing=False, blocks=192, window_blocks=40)
        engine.add(request("a", prompt, 4))
        run(engine, each_step=lambda each: each.storer.wait(5.0))  # a store that keeps up
        engine.close()
        counts = engine.storer.counts
        assert counts["stored"] == counts["window_stored"] == 46
        assert _restored(session, [*prompt[:1000], 3]) == 960


def test_requests_that_share_a_prompt_share_its_windows_in_the_pool(daemon: RunningDaemon) -> None:
    with daemon.connect(_MODEL) as session:
        engine, outcome = _engine(session), Outcome()
        prompts = {"first": _PROMPT[:600], "second": [*_PROMPT[:600], 1, 2], "third": [*_PROMPT[:300], 3]}
        for name, prompt in prompts.items():
            engine.add(request(name, prompt, 30, n=2))
        run(engine, outcome)
        engine.add(request("later", [*_PROMPT[:600], 9], 30))
        run(engine, outcome)
        engine.close()
        for name, prompt in {**prompts, "later": [*_PROMPT[:600], 9]}.items():
            assert outcome.tokens[name, 0] == answer_alone(prompt, 30)
        assert outcome.finished["later", 0].usage.local_tokens == 592
