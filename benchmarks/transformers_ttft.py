"""How much sooner does Transformers give the first token of a restored prompt, and what does the hook cost otherwise?

SmolLM2-135M in f32, prompts of 1,000 and 2,000 tokens, each kind of request in a process of its own, the kinds taking
turns: without any store; with a KVStoreCache that finds nothing; with one that finds the prompt; with no daemon; with a
daemon stopped by SIGSTOP just before. Time to first token is that of `generate(..., max_new_tokens=1)`, the making of
the cache included; model, session and one short answer come before the clock. Storing happens after it. The first
token of every kind must be the one without a store.

The prompts are asked again unchanged. Blocks have 8 tokens, of which both lengths are multiples: all but the last token
are restored. With blocks of 16 tokens, 1,000 tokens left 8 to compute: 120 ms instead of 70.

Expected: the pass over one token reads all weights and all K/V once (some 60 ms); the copy of 92 MB takes 20 to 30 ms,
the question to the daemon 1 ms. Eight tokens instead of one take 40 ms more, for with a mask Transformers repeats K and
V for each group of heads: that is why blocks are small and the last one is used in part. Adjacent stored blocks are
copied in one call, for all layers: with one call for each layer and block, the calls take longer than the bytes.
Huge pages for the destination did not help. The question to a stopped daemon costs its deadline of 25 ms.
All of it needs idle cores: beside other work torch's threads wait for each other, and no ratio means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from support.daemon import BenchDaemon, bench_daemon
from support.report import AT_LEAST, Row, main, progress
from support.stopped import stopped
from support.timing import median

LENGTHS = (1_000, 2_000)
TARGETS = {1_000: 17.0, 2_000: 25.0}
PLAIN, MISS, WARM, ABSENT, STOPPED = "plain", "miss", "warm", "absent", "stopped"
KINDS = (PLAIN, MISS, WARM, ABSENT, STOPPED)
MODEL = "smollm2-135m-instruct"

Times = dict[tuple[str, int], list[float]]


def measure(quick: bool) -> list[Row]:
    directory = saved_model()
    times: Times = defaultdict(list)
    restores: dict[int, list[float]] = defaultdict(list)
    with bench_daemon("host.capacity=2GiB") as daemon:
        for round_number in range(1 if quick else 5):
            first_tokens: dict[str, dict[str, int]] = {}
            for kind in KINDS:
                answers = _child(kind, directory, daemon, round_number)
                first_tokens[kind] = {length: answer["token"] for length, answer in answers.items()}
                if first_tokens[kind] != first_tokens[PLAIN]:
                    raise RuntimeError(f"{kind}: other first tokens than without a store")
                for length in LENGTHS:
                    answer = answers[str(length)]
                    if (answer["restored"] > 0) != (kind == WARM):
                        raise RuntimeError(f"{kind}: {answer['restored']} tokens restored ({answer['reason']})")
                    times[kind, length].append(answer["ttft_s"] * 1e3)
                    if kind == WARM:
                        restores[length].append((answer["lookup_s"] + answer["restore_s"]) * 1e3)
            progress(f"round {round_number}: " + ", ".join(_latest(times, length) for length in LENGTHS))
    return [row for length in LENGTHS for row in _rows(times, restores, length)]


def _rows(times: Times, restores: dict[int, list[float]], length: int) -> list[Row]:
    plain, warm = median(times[PLAIN, length]), median(times[WARM, length])
    rows = [
        Row(f"ttft_cold_over_warm_{length}", plain, "ms", warm, "ms warm", AT_LEAST, TARGETS[length]),
        Row(f"restore_{length}", median(restores[length]), "ms", warm, "ms warm TTFT"),
    ]
    for kind, what in ((MISS, "nothing stored"), (ABSENT, "no daemon"), (STOPPED, "daemon stopped")):
        name = f"ttft_{what.replace(' ', '_')}_{length}"
        rows.append(Row(name, median(times[kind, length]), "ms", plain, "ms without a cache", target=1.05))
    return rows


def _latest(times: Times, length: int) -> str:
    return f"{length} tokens " + " ".join(f"{kind} {times[kind, length][-1]:.0f}" for kind in KINDS) + " ms"


def _child(kind: str, directory: Path, daemon: BenchDaemon, round_number: int) -> dict[str, Any]:
    command = [
        sys.executable, __file__, "ask", "--kind", kind, "--model", str(directory), "--socket-dir",
        str(daemon.socket_dir), "--daemon-pid", str(daemon.pid), "--seed", str(round_number),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{kind} failed: {done.stderr.strip()}")
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def saved_model() -> Path:
    """The model in f32 as safetensors, in the model cache: made from the GGUF once, it loads in a second."""
    from kvstore_engine.models import locate
    from kvstore_engine.models.cache import exclusive, models_directory

    target = models_directory() / f"{MODEL}-f32"
    if target.is_dir():
        return target
    with exclusive(target):
        if not target.is_dir():
            progress(f"saving {MODEL} in f32 to {target}")
            source = Path(locate(MODEL))
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as folder:
                _save(source, Path(folder) / "model")
                shutil.move(str(Path(folder) / "model"), target)
    return target


def _save(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    # What was loaded is dense by now, but still called quantised, and that cannot be saved.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(target)


def _ask(arguments: list[str]) -> None:
    """The child: one kind of request for each length, as JSON on standard output."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvstore_connectors.transformers import KVStoreCache, kvstore_session

    parser = argparse.ArgumentParser()
    for name in ("kind", "model", "socket-dir", "daemon-pid", "seed"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    socket_dir = f"{options.socket_dir}-absent" if options.kind == ABSENT else options.socket_dir
    asked = {"max_new_tokens": 1, "do_sample": False}
    answers = {}
    with kvstore_session(model, socket_dir) as session:
        model.generate(_prompt(64, 10_000), **asked)
        for length in LENGTHS:
            ids = _prompt(length, length + int(options.seed))
            pause = stopped(int(options.daemon_pid)) if options.kind == STOPPED else nullcontext()
            with pause:
                begin = time.perf_counter()
                cache = None if options.kind == PLAIN else KVStoreCache(session, model)
                answer = model.generate(ids, past_key_values=cache, **asked)
                ttft_s = time.perf_counter() - begin
            report = {} if cache is None else cache.report
            answers[length] = {
                "ttft_s": ttft_s,
                "token": int(answer[0, -1]),
                "restored": getattr(report, "restored_tokens", 0),
                "lookup_s": getattr(report, "lookup_s", 0.0),
                "restore_s": getattr(report, "restore_s", 0.0),
                "reason": getattr(report, "reason", ""),
            }
            session.ping(5.0)
            if cache is not None:
                cache.flush()
    print(json.dumps(answers))


def _prompt(length: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (1, length), generator=generator)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        _ask(sys.argv[2:])
    else:
        sys.exit(main(measure, __doc__))
