"""The arguments of `kvengine bench`.

Owns what can be asked and how it is explained. It never acts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore_console.command_line import Commands, ListAction
from kvstore_engine.devices import CPU, DEVICE_HELP

_LOADS = """loads (--load, one or several):
  decode      prompts of 16 tokens: decoding alone
  chat        unrelated prompts of about --prompt-tokens
  shared-50   half of each prompt is one of two system prompts
  shared-90   nine tenths of it
  multi-turn  conversations that come back after all the others have had their turn
  long-short  chats, and one in eight requests with a prompt eight times as long
  mixed       answers of very unequal lengths, for scheduling policies
"""
_EXAMPLES = """examples:
  kvengine bench --model smollm2-135m-instruct:q4_0
  kvengine bench --model smollm2-135m-instruct:q4_0 --load shared-90 multi-turn --concurrency 1 4 16 --out ./report
  kvengine bench --model ./llama.gguf --load mixed --rate 2 --policy shortest --trace trace.json
  kvengine bench --model ./llama.gguf --load decode --block-sizes 8 16 32 64
  kvengine bench --url http://127.0.0.1:8080 --load chat --concurrency 16 --json
  kvengine bench --model smollm2-135m-instruct:q8_0 --against llama-server --json
"""
_AGAINST = """--against llama-server:
  Runs the stock server in turns with ours: at its default, and at its best setting for CPUs (-fa off -no-kvu -np N
  -c ...). By default it is the server in the wheel `xllamacpp`, whose ggml our engine uses as well; with
  --llama-server PATH it is that program, and $KVENGINE_GGML has to name its libggml. A ratio is ours over theirs; where
  the two sides did not run the same ggml build all ratios are null. First the servers over HTTP with streaming
  clients (`rows`), then decoding alone, without HTTP on either side (`decode_rows`).
"""


def add_bench(commands: Commands, *, models: str, exit_codes: str) -> None:
    """Add `bench` to the commands; `models` and `exit_codes` are the paragraphs that all commands share."""
    command = commands.add_parser(
        "bench",
        help="measure latency and throughput",
        description="Measure an engine in this process, or any OpenAI-style server, under a made-up load. With --out: "
        "JSON, CSV and an HTML page with plots.",
        epilog=f"{_EXAMPLES}\n{_LOADS}\n{_AGAINST}\n{models}\n{exit_codes}",
    )
    what = command.add_argument_group("what is measured")
    what.add_argument("--model", metavar="MODEL", help="run it in this process; with --url: the name to ask for")
    what.add_argument("--url", metavar="URL", help="measure the OpenAI-style server there instead")
    what.add_argument("--api-key", metavar="KEY", help="for --url")
    what.add_argument("--against", choices=("llama-server",), help="compare with llama.cpp's own server (see below)")
    what.add_argument("--llama-server", type=Path, metavar="PATH", help="that program instead of the wheel xllamacpp")
    what.add_argument("--only", choices=("server", "decode"), help="one half of --against")
    what.add_argument("--rounds", type=int, metavar="N", help="of --against: turns of each side (default 3)")
    _add_load(command)
    _add_engine(command)
    output = command.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="write bench.json, bench.csv and bench.html there")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev (not with --url)")
    output.add_argument("--json", action="store_true", help="end stdout with one line of JSON")
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_load(command: argparse.ArgumentParser) -> None:
    load = command.add_argument_group("load")
    load.add_argument("--load", action=ListAction, default=["chat"], metavar="NAME", help="see below (default: chat)")
    way = load.add_mutually_exclusive_group()
    way.add_argument(
        "--concurrency",
        action=ListAction,
        of=int,
        metavar="N",
        help="clients that each wait for their answer: closed loop (default: 1 4 8 16)",
    )
    way.add_argument(
        "--rate",
        action=ListAction,
        of=float,
        metavar="R",
        help="requests a second at random times (Poisson): open loop",
    )
    load.add_argument("--requests", type=int, metavar="N", help="of each case (default 32)")
    load.add_argument("--prompt-tokens", type=int, metavar="N", help="of an ordinary request (default 256)")
    load.add_argument("--generate-tokens", type=int, metavar="N", help="of an ordinary request (default 64)")
    load.add_argument("--vocabulary", type=int, metavar="N", help="ids below N (default: the model's; 32000 for --url)")
    load.add_argument("--seed", type=int, default=1, metavar="S", help="of prompts and arrivals (default 1)")
    load.add_argument("--quick", action="store_true", help="8 requests of 64 + 16 tokens, for a look")


def _add_engine(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine in this process")
    engine.add_argument("--device", default=CPU, metavar="DEVICE", help=DEVICE_HELP)
    engine.add_argument("--threads", type=int, metavar="N", help="compute threads (default: as `kvengine generate`)")
    engine.add_argument("--block-sizes", action=ListAction, of=int, metavar="N", help="tokens in a block (default 16)")
    engine.add_argument("--kv-dtype", default="f16", metavar="TYPE", help="of K and V, as for serve (default f16)")
    engine.add_argument("--pool-tokens", type=int, metavar="N", help="size of the K/V pool (default: all clients fit)")
    engine.add_argument("--policy", default="fcfs", metavar="NAME", help="fcfs (default), shortest or priority")
