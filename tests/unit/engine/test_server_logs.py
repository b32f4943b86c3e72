"""What `kvengine serve` says of the daemon and of each request."""

from __future__ import annotations

import logging

import pytest

from kvstore_engine.server.middleware import log_access
from kvstore_engine.server.sessions import StoreWatch


class Pinged:
    """A session whose daemon answers or not, as set."""

    answers = True

    def ping(self) -> float | None:
        return 0.001 if self.answers else None


def test_the_store_goes_and_returns_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    session = Pinged()
    watch = StoreWatch(lambda: [session])
    with caplog.at_level(logging.INFO, "kvstore_engine.server.sessions"):
        for answers in (True, True, False, True, False, False, False, False, True, True):
            session.answers = answers
            watch.look()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "kvstored does not answer", "kvstored answers again"
    ]  # fmt: skip
    assert watch.answers


def test_without_a_session_nothing_is_known() -> None:
    watch = StoreWatch(list)
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
