"""Completions: each posted one runs once, on the loop, in order, even when one of them breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.completions import LATER_S, CompletionQueue

DONE = Outcome(OutcomeKind.DONE)


def test_many_threads_many_completions_each_once_and_in_order_of_a_thread() -> None:
    async def run() -> None:
        queue = CompletionQueue(asyncio.get_running_loop())
        home = threading.get_ident()
        seen: list[tuple[int, int]] = []

        def handler(thread: int, number: int) -> Any:
            def run(_: Outcome) -> None:
                assert threading.get_ident() == home
                seen.append((thread, number))

            return run

        posts = [[queue.to_loop(handler(thread, number)) for number in range(200)] for thread in range(4)]
        assert queue.outstanding == 800

        def work(mine: list[Any]) -> None:
            for post in mine:
                post(DONE)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in posts]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(queue.drained(), 60)
        for thread in threads:
            thread.join()
        assert queue.outstanding == 0
        assert sorted(seen) == [(thread, number) for thread in range(4) for number in range(200)]
        for number in range(4):
            assert [n for thread, n in seen if thread == number] == list(range(200))

    asyncio.run(run())


def test_a_handler_that_raises_does_not_take_those_behind_it_along() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        reported: list[object] = []
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        queue = CompletionQueue(loop)
        ran: list[str] = []

        def broken(_: Outcome) -> None:
            ran.append("broken")
            raise RuntimeError("a broken invariant")

        posts = [queue.to_loop(broken), queue.to_loop(lambda _: ran.append("whole"))]
        for post in posts:
            post(DONE)
        await asyncio.wait_for(queue.drained(), 60)
        assert ran == ["broken", "whole"]
        assert [str(error) for error in reported] == ["a broken invariant"]

    asyncio.run(run())


def test_a_completion_may_start_another_and_drained_waits_for_it_too() -> None:
    async def run() -> None:
        queue = CompletionQueue(asyncio.get_running_loop())
        ran: list[int] = []

        def next_one(number: int) -> None:
            ran.append(number)
            if number < 5:
                queue.to_loop(lambda _: next_one(number + 1))(DONE)

        queue.to_loop(lambda _: next_one(0))(DONE)
        await asyncio.wait_for(queue.drained(), 60)
        assert ran == [0, 1, 2, 3, 4, 5]

    asyncio.run(run())


def test_a_post_after_the_loops_end_is_nobodys_concern() -> None:
    loop = asyncio.new_event_loop()
    queue = CompletionQueue(loop)
    post = queue.to_loop(lambda _: None)
    loop.close()
    post(DONE)
    queue.later(lambda: None)


def test_later_work_runs_in_order_and_takes_along_what_it_adds() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        reported: list[object] = []
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        queue, ran, turns = CompletionQueue(loop), list[tuple[str, int]](), 0

        def broken() -> None:
            raise RuntimeError("a broken invariant")

        def noted(name: str) -> Callable[[], None]:
            return lambda: ran.append((name, turns))

        queue.later(broken)
        queue.later(lambda: queue.later(noted("added")))
        queue.later(noted("last"))
        assert not ran and not reported, "not at once"
        while len(ran) < 2:
            turns += 1
            await asyncio.sleep(0)
        assert ran == [("last", 1), ("added", 1)] and len(reported) == 1
        queue.hold_later()
        queue.later(noted("held"))
        await asyncio.sleep(0)
        assert len(ran) == 2
        queue.do_later()
        assert ran[-1] == ("held", 1)

    asyncio.run(run())


def test_later_work_that_takes_long_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        queue, ran, now_s = CompletionQueue(loop), list[str](), loop.time()
        monkeypatch.setattr(loop, "time", lambda: now_s)

        def slow() -> None:
            nonlocal now_s
            now_s += LATER_S
            ran.append("slow")

        queue.later(slow)
        queue.later(slow)
        loop.call_soon(ran.append, "another")
        while len(ran) < 3:
            await asyncio.sleep(0)
        assert ran == ["slow", "another", "slow"]

    asyncio.run(run())
