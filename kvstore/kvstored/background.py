"""Tasks that run until the daemon stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


def run_until_closed(name: str, run: Callable[[], Awaitable[None]], stack: contextlib.AsyncExitStack) -> None:
    """Start a task, which `stack` cancels. One that fails is logged; the daemon goes on without it."""

    async def runs() -> None:
        try:
            await run()
        except Exception:
            log.exception("%s ended", name)

    async def cancel() -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    task = asyncio.create_task(runs(), name=name)
    stack.push_async_callback(cancel)
