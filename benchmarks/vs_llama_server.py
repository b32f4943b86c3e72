"""Conversations that come back: our engine with kvstored against llama.cpp's server with its own prompt cache.

Both run the same GGUF on the same ggml build (the `xllamacpp` wheel) with the same threads; our kernels run
for AVX2 only, which is what that build uses. Six conversations of some 2,000 tokens are asked one after the
other, twice, so that each comes back after five others; then the engine process is started anew (after an upgrade or a
crash) and each comes back once more. llama.cpp's server has one slot, its host-memory prompt cache (`--cache-ram`,
8 GiB, its default) and no unified K/V; the better of flash attention off and on counts. Time to first token is wall
time from the text in hand to the first token's text, without HTTP on either side. The sides take turns.

    python benchmarks/vs_llama_server.py [--json] [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_server import llama_rows
from support.daemon import bench_daemon
from support.engine import MODEL, quantisations
from support.report import AT_LEAST, Row, main, median, progress
from ttft_restore import QUESTIONS, prompt_text

CHILD = "answer"
THREADS = 2
CONTEXT_TOKENS = 4096
CACHE_MIB = 8192
CONVERSATIONS = 6
OURS, PLAIN, FLASH = "kvstored", "llama-plain", "llama-flash"


def measure(quick: bool) -> list[Row]:
    count = 3 if quick else CONVERSATIONS
    prompts = [f"{prompt_text(200 + number)}\n\n{QUESTIONS[number % len(QUESTIONS)]}" for number in range(count)]
    times: dict[str, dict[str, list[float]]] = {}
    with bench_daemon("host.capacity=2GiB") as daemon:
        for name in (PLAIN, OURS, FLASH):
            found: dict[str, list[float]] = {"cold": [], "returning": [], "restarted": []}
            with _engine(name, daemon.socket_dir) as engine:
                found["cold"] = [_ask(engine, prompt) for prompt in prompts]
                found["returning"] = [_ask(engine, prompt) for prompt in prompts]
            with _engine(name, daemon.socket_dir) as engine:
                found["restarted"] = [_ask(engine, prompt) for prompt in prompts]
            times[name] = found
            seen = ", ".join(f"{what} {median(seconds) * 1e3:.0f} ms" for what, seconds in found.items())
            progress(f"{name}: {seen}")
    rows = [_row(times, what) for what in ("cold", "returning", "restarted")]
    return rows + llama_rows(quantisations(quick=True)[0], quick)


def _row(times: dict[str, dict[str, list[float]]], what: str) -> Row:
    """Return how many times longer llama.cpp's server takes, at its better setting."""
    theirs = min((median(times[name][what]), name) for name in (PLAIN, FLASH))
    ours = median(times[OURS][what])
    return Row(f"ttft_{what}_over_ours", theirs[0] * 1e3, "ms", ours * 1e3, f"ms ours ({theirs[1]})", AT_LEAST)


@contextmanager
def _engine(name: str, socket_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine process that answers prompts, one JSON line each way; it has loaded the model and warmed up."""
    command = [sys.executable, __file__, CHILD, name, str(socket_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None and engine.stdin is not None
        if engine.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{name} did not start")
        try:
            yield engine
        finally:
            engine.stdin.close()
            engine.wait(60)


def _ask(engine: subprocess.Popen[str], prompt: str) -> float:
    """Seconds to the first token."""
    assert engine.stdout is not None and engine.stdin is not None
    print(json.dumps(prompt), file=engine.stdin, flush=True)
    return float(json.loads(engine.stdout.readline()))


def _answer(name: str, socket_dir: Path) -> None:
    """The child: answers prompts from standard input until it ends."""
    respond = _ours(socket_dir) if name == OURS else _llama(flash=name == FLASH)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(respond(json.loads(line))), flush=True)


def _ours(socket_dir: Path) -> Any:
    import contextlib

    from kvstore_engine.batching.request import RequestSettings
    from kvstore_engine.generation import Prompt
    from kvstore_engine.kernels.selection import ISA_VARIABLE
    from kvstore_engine.loaded_model import LoadOptions, open_model
    from kvstore_engine.models.locate import locate

    os.environ[ISA_VARIABLE] = "avx2"  # what the other side has
    options = LoadOptions(context=CONTEXT_TOKENS, threads=THREADS, kvstore=socket_dir)
    stack = contextlib.ExitStack()
    loaded = stack.enter_context(open_model(locate(f"{MODEL}:q8_0"), options))

    def respond(prompt: str, keep: object = stack) -> float:
        answer = loaded.generator.generate(Prompt(prompt), RequestSettings(max_tokens=1))
        return answer.timings.ttft_s

    return respond


def _llama(*, flash: bool) -> Any:
    import time

    import xllamacpp

    from kvstore_engine.models.locate import locate

    settings = xllamacpp.CommonParams()
    settings.model.path = str(locate(f"{MODEL}:q8_0"))
    settings.n_ctx, settings.n_parallel, settings.kv_unified = CONTEXT_TOKENS, 1, False
    settings.cache_ram_mib = CACHE_MIB
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = THREADS
    kinds = xllamacpp.llama_flash_attn_type
    settings.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)

    def respond(prompt: str) -> float:
        first: list[float] = []

        def on_chunk(chunk: Any) -> bool:
            first.append(time.perf_counter())
            return False  # go on

        request = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_prompt": True, "stream": True}
        begin = time.perf_counter()
        server.handle_completions(request, on_chunk)
        return first[0] - begin

    return respond


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _answer(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(measure, __doc__))
