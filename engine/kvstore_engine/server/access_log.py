"""One log line for each HTTP request: who, what, how it ended, how long it took, and its tokens."""

from __future__ import annotations

import logging
import time

from kvstore_console.printable import printable
from kvstore_engine.server.exchange import Exchange

log = logging.getLogger("kvengine.access")
MAX_PATH_CHARACTERS = 200


def log_access(exchange: Exchange, began_s: float) -> None:
    """`began_s` is from time.perf_counter(). Status 499: the client left before the answer began."""
    tokens = exchange.usage
    spent = f", {tokens['prompt_tokens']} + {tokens['completion_tokens']} tokens" if tokens else ""
    tenant = f" of {exchange.caller.tenant}" if exchange.caller.tenant else ""
    log.info(
        "%s %s%s: %d in %.0f ms%s",
        exchange.method, printable(exchange.path[:MAX_PATH_CHARACTERS]), tenant, exchange.status or 499,
        (time.perf_counter() - began_s) * 1e3, spent,
    )  # fmt: skip
