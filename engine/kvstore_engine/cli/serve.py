"""`kvengine serve`: makes a running server from options.

The module owns the names that a model is served under.
"""

from __future__ import annotations

import argparse

from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.models.locate import locate
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.server.options import EngineOptions, ServerOptions
from kvstore_engine.server.server_process import run_server as run_server


def run(options: argparse.Namespace) -> int:
    """Run `kvengine serve` with `options` until a signal ends it, and return its exit code. Raises UsageError for
    options that do not go together.
    """
    if options.stages > 1:
        raise UsageError(
            f"--stages {options.stages}: a server computes in one stage, since its ggml runs in a process of its own "
            "with one executor; `kvengine generate` has stages"
        )
    device = DeviceName.parse(options.device)
    device.check_kv_dtype(options.kv_dtype)
    if options.select_pages is not None:
        PageSelection.parse(options.select_pages)  # a mistake must not wait for a process to start
    path = locate(options.model, sockets=options.kvstore)
    engine = EngineOptions(
        model=str(path),
        context=options.context,
        threads=options.threads,
        max_sequences=options.max_sequences,
        policy=options.policy,
        kv_dtype=options.kv_dtype,
        pool_bytes=options.pool,
        swap_bytes=options.swap,
        max_queued=options.max_queued,
        kvstore=str(options.kvstore) if options.kvstore else None,
        hung_after_s=options.hung_after_s,
        trace=str(options.trace) if options.trace else None,
        has_tenants=options.api_keys is not None,
        device=device.name,
        store_rate=options.store_rate,
        accepts_lossy=options.accepts_lossy,
        select_pages=options.select_pages,
    )
    known = path.stem if options.model == str(path) else options.model
    names: list[str] = [*options.served_name, known]
    return run_server(
        ServerOptions(
            engine=engine,
            model_name=names[0],
            aliases=tuple(names),
            host=options.host,
            port=options.port,
            api_keys=str(options.api_keys) if options.api_keys else None,
            drain_s=options.drain_s,
            max_connections=options.max_connections,
            access_log=not options.no_access_log,
            pooling=options.pooling,
        )
    )
