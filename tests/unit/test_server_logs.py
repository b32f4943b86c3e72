"""What `kvengine serve` says of the daemon and of each request."""

from __future__ import annotations

import logging
import time

import pytest

from kvstore_engine.server.access_log import log_access
from kvstore_engine.server.exchange import Exchange
from kvstore_engine.server.store_watch import StoreWatch


class Pinged:
    """A session whose daemon answers or not, as told."""

    answers = True

    def ping(self) -> float | None:
        return 0.001 if self.answers else None


def test_the_store_goes_and_returns_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    session = Pinged()
    watch = StoreWatch(lambda: [session])
    with caplog.at_level(logging.INFO, "kvstore_engine.server.store_watch"):
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


def test_a_request_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def nothing(*_: object) -> None:
        return None

    exchange = Exchange({"method": "POST", "path": "/v1/completions\x1b[2J", "headers": []}, nothing, nothing)  # type: ignore[arg-type]
    exchange.status, exchange.usage = 200, {"prompt_tokens": 12, "completion_tokens": 34}
    with caplog.at_level(logging.INFO, "kvengine.access"):
        log_access(exchange, time.perf_counter())
        exchange.status, exchange.usage = 0, {}
        log_access(exchange, time.perf_counter())
    first, second = (record.message for record in caplog.records)
    assert first.startswith("POST /v1/completions\\x1b[2J: 200 in ") and first.endswith("ms, 12 + 34 tokens")
    assert ": 499 in " in second
