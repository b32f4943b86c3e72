"""`kvengine serve` logs its state of the daemon and each request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.server.assembly import TenantSessions
from kvstore_engine.server.middleware import log_access
from kvstore_proto.fingerprint import Fingerprint


class Pinged:
    """A session whose daemon answers or not, as set."""

    answers = True

    def ping(self) -> float | None:
        return 0.001 if self.answers else None

    def close(self) -> None:
        pass


def _sessions(session: Any) -> TenantSessions:
    return TenantSessions(Path("/nowhere"), Fingerprint("m", "digest"), lambda folder, **options: session)


def test_the_store_goes_and_returns_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    session = Pinged()
    watch = _sessions(session)
    watch("")
    with caplog.at_level(logging.INFO, "kvstore_engine.server.assembly"):
        for answers in (True, True, False, True, False, False, False, False, True, True):
            session.answers = answers
            watch.look()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "kvstored does not answer", "kvstored answers again"
    ]  # fmt: skip
    assert watch.answers


def test_without_a_session_nothing_is_known() -> None:
    watch = _sessions(None)
    watch.look()
    assert watch.answers is None
    watch.close()


class _Answers:
    def total_usage(self) -> dict[str, int]:
        return {"prompt_tokens": 12, "completion_tokens": 34}


def test_a_request_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"method": "POST", "path": "/v1/completions\x1b[2J", "state": {"answers": _Answers()}}
    with caplog.at_level(logging.INFO, "kvengine.access"):
        log_access(scope, 200, 0.5)
        log_access({**scope, "state": {}}, 499, 0.5)
    first, second = (record.message for record in caplog.records)
    assert first == "POST /v1/completions\\x1b[2J: 200 in 500 ms, 12 + 34 tokens"
    assert second.endswith(": 499 in 500 ms")
