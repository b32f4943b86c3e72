"""Waiting for what other stores have: a request that is cancelled ends, also when the answer comes at that moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstored.store.operations.discovery import Question
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import small_store


@pytest.mark.parametrize("turns", range(4))
def test_a_request_that_is_cancelled_as_the_answer_comes_does_not_go_on(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        async with small_store(tmp_path) as small:
            driven = DrivenStore(small)
            question = Question(driven.client, keys_of(1, 2), 0, 0, 0)
            request = asyncio.create_task(driven.operations.discovery.wait(question, 60_000))
            for _ in range(3):
                await asyncio.sleep(0)
            question.entered.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            if request.cancel():
                await asyncio.wait([request])
                assert request.cancelled()

    asyncio.run(main())
