"""Our engine beside llama.cpp on any model: both servers over HTTP, then decoding alone; one line of JSON.

The stock server runs at its default and at its best setting on CPUs, `-fa off -no-kvu -np N -c ...`, with a slot for
each client. Without --llama-server it is the server in the wheel `xllamacpp`, whose ggml our engine uses too; with it,
$KVENGINE_GGML has to name the folder of that program's ggml libraries. What the fields say: docs/engine.md.

    python benchmarks/engine_beside_llama.py --model smollm2-135m-instruct:q4_0
    python benchmarks/engine_beside_llama.py --model ./model.gguf --llama-server ./llama-server --only server
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llama.against import Comparison, compare
from support.report import progress

from kvstore_console.command_line import ListAction
from kvstore_engine.bench.workload import LOADS, LoadSettings
from kvstore_engine.cli.bench import load_settings, vocabulary_of
from kvstore_engine.models.locate import locate
from kvstore_engine.threads import default_threads


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="MODEL", help="as of `kvengine bench`")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="that program instead of the wheel xllamacpp")
    parser.add_argument("--only", choices=("server", "decode"), help="one half")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each side (default 3; --quick: 1)")
    parser.add_argument("--threads", type=int, default=default_threads(), metavar="N")
    parser.add_argument("--load", choices=sorted(LOADS), default="chat")
    parser.add_argument("--concurrency", action=ListAction, of=int, metavar="N", help="(default: 1 4 8 16)")
    for name in LoadSettings.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="as of `kvengine bench`")
    parser.add_argument("--quick", action="store_true", help="1 and 4 clients, small requests")
    given = parser.parse_args(arguments)
    given.seed = 1 if given.seed is None else given.seed
    if given.llama_server is not None and not given.llama_server.is_file():
        parser.error(f"--llama-server {given.llama_server}: no such file")
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"there must be at least 1 round, not {given.rounds}")
    path, few = locate(given.model), given.quick
    rounds = given.rounds or (1 if few else 3)
    wanted = Comparison(
        path,
        given.threads,
        tuple(given.concurrency or ((1, 4) if few else (1, 4, 8, 16))),
        rounds,
        load_settings(given, vocabulary_of(path)),
        given.load,
        decode_steps=16 if few else 48,
        program=given.llama_server,
    )
    result = compare(wanted, progress, server=given.only != "decode", decode=given.only != "server")
    print(json.dumps({"model": path.name, "threads": wanted.threads, "rounds": rounds, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
