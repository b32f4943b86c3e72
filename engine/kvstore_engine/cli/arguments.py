"""The command line of `kvengine`: commands, options, help texts.

The module owns options and their explanations. It takes no action, and imports nothing heavy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore_console.command_line import Commands, ListAction, Parser, seconds
from kvstore_engine.cli.serve_arguments import add_serve
from kvstore_engine.devices import CPU, DEVICE_HELP
from kvstore_engine.page_selection import SELECT_HELP
from kvstore_proto.version import VERSION

_EXAMPLES = """examples:
  kvengine info smollm2-135m-instruct
  kvengine generate --model smollm2-135m-instruct --chat --prompt "Why is the sky blue?"
  kvengine serve --model smollm2-135m-instruct:q8_0 --kvstore /run/kvstored
  kvengine serve --weights kvstore:llama --kvstore /run/kvstored

`kvengine COMMAND --help` says more about a command.
"""
_EXIT_CODES = """exit codes:
  0  done
  1  something failed: no network, a damaged download, a full disk
  2  a mistake in the request, explained in one line: no such file, a damaged or unsupported model,
     a prompt longer than the context, a missing extra
"""
_MODELS = """models:
  a path to a .gguf file, or a known name, fetched on first use: smollm2-135m-instruct (93 MB) or
  gemma-3-270m (238 MB; its terms are shown and asked for first).
  Append :q8_0, :q4_0 or :f16 to run it in that quantisation (converted once, kept in the cache):
  smollm2-135m-instruct:q4_0, ./model.gguf:q8_0
  kvstore:NAME is an object that `kvctl objects put --weights FILE.gguf NAME` stored: its weights are mapped from the
  daemon of --kvstore, or of $KVSTORED_SOCKET_DIR, and shared by all processes; kvstore:NAME@2 is its second version
"""
_LOADS = """loads (--load, one or several):
  decode      prompts of 16 tokens: decoding alone
  chat        unrelated prompts of about --prompt-tokens
  shared-50   half of each prompt is one of two system prompts
  shared-90   nine tenths of it
  multi-turn  conversations that come back after all the others have had their turn
  long-short  chats, and one in eight requests with a prompt eight times as long
  mixed       answers of very unequal lengths, for scheduling policies
"""
_BENCH_EXAMPLES = """examples:
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


def parser() -> Parser:
    """Return the argument parser of `kvengine`. In the options that it returns, `command` is the name of the chosen
    subcommand.
    """
    top = Parser(
        prog="kvengine",
        description="Run GGUF models with their KV cache kept in kvstored, on the CPU or with torch.",
        epilog=f"{_EXAMPLES}\n{_MODELS}\n{_EXIT_CODES}",
    )
    top.add_argument("--version", action="version", version=f"kvengine {VERSION}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_fetch(commands)
    _add_info(commands)
    add_serve(commands, models=_MODELS, exit_codes=_EXIT_CODES)
    _add_restorations(commands)
    _add_bench(commands)
    _add_quality(commands)
    return top


def _add_quality(commands: Commands) -> None:
    command = commands.add_parser(
        "quality",
        help="measure how much a codec of the store changes a model's answers",
        description="Compute the next tokens after a prefix of 512 tokens, once on its own K and V, and once on what a "
        "codec gives back of them; print the mean KL divergence, how often the likeliest token is the same, and how "
        "often greedy continuations are, and the bytes put for a byte stored.",
        epilog=f"""examples:
  kvengine quality --model smollm2-135m-instruct:q8_0 --codec int8
  kvengine quality --model gemma-3-270m:q8_0 --codec int4 --windows 1 --by-layer --json
  kvengine quality --model ./llama.gguf --codec int8 --text manual.txt
  kvengine quality --model ./llama.gguf --codec int4 --next-tokens 128 --profile profiles/llama.json --bound 1e-4

{_MODELS}
{_EXIT_CODES}""",
    )
    command.add_argument(
        "--model", "--weights", required=True, metavar="MODEL", help="a .gguf file or a known name (see below)"
    )
    command.add_argument("--codec", required=True, metavar="NAME", help="a codec of kvstored, such as int8")
    command.add_argument(
        "--text", action="append", type=Path, default=[], metavar="FILE",
        help="a text to measure on; again for more (default: English, licences, Python source and JSON of this "
        "installation)",
    )  # fmt: skip
    command.add_argument("--windows", type=int, default=4, metavar="N", help="of each text, at most (default 4)")
    command.add_argument("--next-tokens", type=int, default=512, metavar="N", help="after each prefix (default 512)")
    command.add_argument("--greedy-tokens", type=int, default=16, metavar="N", help="continued (default 16; 0: none)")
    command.add_argument("--by-layer", action="store_true", help="also change each layer alone, on the first windows")
    command.add_argument(
        "--profile", type=Path, metavar="FILE",
        help="also find, on the first windows, the smallest codec from NAME on that K and V of each layer bear, and "
        "write it for kvstored (daemon.codec_profiles is the directory of FILE)",
    )  # fmt: skip
    command.add_argument(
        "--bound", type=float, default=1e-5, metavar="NATS",
        help="KL that one of them alone may cost in the profile; what costs more stays exact (default 0.00001)",
    )  # fmt: skip
    command.add_argument("--threads", type=int, metavar="N", help="threads for computing")
    command.add_argument("--json", action="store_true", help="the figures as one line of JSON")


def _add_restorations(commands: Commands) -> None:
    command = commands.add_parser(
        "restorations",
        help="show the last restorations of a running server",
        description="Show what the last restorations of a `kvengine serve` planned and did, the latest first.",
        epilog=f"""examples:
  kvengine restorations
  kvengine restorations --url http://127.0.0.1:8080 --last 1 --json

{_EXIT_CODES}""",
    )
    command.add_argument(
        "--url", default="http://127.0.0.1:8080", metavar="URL", help="the server (default http://127.0.0.1:8080)"
    )
    command.add_argument("--last", type=int, default=10, metavar="N", help="how many (default 10; the server keeps 64)")
    command.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the key that the server wants, in the first line of FILE"
    )
    command.add_argument("--json", action="store_true", help="the records as a JSON list")


def _add_generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt. The text goes to stdout as it is generated, a summary to stderr.",
        epilog=f"""examples:
  kvengine generate --model smollm2-135m-instruct --chat --prompt "Why is the sky blue?"
  kvengine generate --model ./llama.gguf --prompt-file story.txt --max-tokens 200 --temperature 0.8 --seed 1
  kvengine generate --model smollm2-135m-instruct --system-file manual.txt --prompt "How do I reset it?" \\
      --kvstore /run/kvstored --json
  kvengine generate --model smollm2-135m-instruct --prompt-file manual.txt --context 8192 --select-pages 50%%

{_MODELS}
{_EXIT_CODES}""",
    )
    command.add_argument(
        "--model", "--weights", required=True, metavar="MODEL", help="a .gguf file or a known name (see below)"
    )
    prompt = command.add_argument_group("prompt")
    text = prompt.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the prompt")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from FILE ('-' for stdin)")
    prompt.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: wrap it in the model's chat template",
    )
    system = prompt.add_mutually_exclusive_group()
    system.add_argument("--system", metavar="TEXT", help="a system message; implies --chat")
    system.add_argument("--system-file", type=Path, metavar="FILE", help="read the system message from FILE")
    _add_sampling(command)
    _add_running(command)
    output = command.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="end stdout with one line of JSON: text, tokens, timings, tokens_restored, bytes_restored, …",
    )
    output.add_argument("--no-stream", action="store_true", help="print the text once it is complete")
    output.add_argument("--quiet", action="store_true", help="no summary on stderr")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    sampling = command.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="stop after N tokens (default 256)")
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 always takes the likeliest token (default)",
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens that reach P together (1: all)",
    )
    sampling.add_argument("--seed", type=int, metavar="S", help="make sampling repeatable")
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token (for measurements)"
    )


def _add_running(command: argparse.ArgumentParser) -> None:
    running = command.add_argument_group("running")
    running.add_argument("--device", default=CPU, metavar="DEVICE", help=DEVICE_HELP)
    running.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (default: 4096, or the model's limit if smaller)",
    )
    running.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads (default: one for each physical core this process may use; from four cores up "
        "one is left for the daemon)",
    )
    running.add_argument(
        "--stages",
        type=int,
        default=1,
        metavar="N",
        help="compute the layers in N stages, of which each has its own --threads (then 1 by default), and a prompt "
        "in pieces, of which each stage computes another; with --kvstore each restores and stores its own layers "
        "(default 1)",
    )
    running.add_argument("--select-pages", metavar="N|P%", help=SELECT_HELP)
    _add_store(running)
    running.add_argument(
        "--next-in",
        type=seconds,
        metavar="SECONDS",
        help="announce to kvstored that the conversation goes on in about this time",
    )
    running.add_argument(
        "--no-warm-up",
        action="store_true",
        help="let the first token pay for page faults and first-time set-up",
    )
    running.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for chrome://tracing or ui.perfetto.dev: every step, and what restored the prompt",
    )


def _add_store(running: argparse._ArgumentGroup) -> None:
    running.add_argument(
        "--kvstore",
        type=Path,
        metavar="DIR",
        help="the folder of kvstored's sockets; without it all is computed",
    )
    running.add_argument(
        "--accepts-lossy",
        action="store_true",
        help="with --kvstore: take lossy copies of blocks too, and let some be made, where the tenant allows it",
    )
    running.add_argument(
        "--whole-blocks",
        action="store_true",
        help="with --stages: restore and store blocks of all layers, which engines without stages find, too",
    )
    running.add_argument(
        "--no-hidden-states",
        action="store_true",
        help="with --stages: do not store the hidden states from which a stage computes without waiting for the one "
        "before",
    )
    running.add_argument("--no-store", action="store_true", help="restore from kvstored but store nothing in it")


def _add_fetch(commands: Commands) -> None:
    command = commands.add_parser(
        "fetch",
        help="download or convert a model and print its path",
        description="Download a known model (or convert a file), verify it, and print the path to use.",
        epilog=f"""examples:
  kvengine fetch smollm2-135m-instruct
  kvengine fetch smollm2-135m-instruct --quant q4_0
  kvengine fetch ./model-f16.gguf --quant q8_0
  kvengine fetch gemma-3-270m --accept-terms

Files are kept in $XDG_CACHE_HOME/kvstored/models (~/.cache/kvstored/models).

{_EXIT_CODES}""",
    )
    command.add_argument("model", metavar="MODEL", help="a known name or a .gguf file")
    command.add_argument("--quant", metavar="TYPE", help="q4_0, q8_0 or f16")
    command.add_argument(
        "--accept-terms", action="store_true", help="agree to the terms of a model that has some, without being asked"
    )


def _add_info(commands: Commands) -> None:
    command = commands.add_parser(
        "info",
        help="show what a model is and whether it can be run",
        description="Show a model's shape, types, tokenizer and K/V size, and whether this engine runs it.",
        epilog=f"""examples:
  kvengine info smollm2-135m-instruct
  kvengine info ./model.gguf --json

{_EXIT_CODES}""",
    )
    command.add_argument("model", metavar="MODEL", help="a known name or a .gguf file")
    command.add_argument("--device", default=CPU, metavar="DEVICE", help=DEVICE_HELP)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(commands: Commands) -> None:
    command = commands.add_parser(
        "bench",
        help="measure latency and throughput",
        description="Measure an engine in this process, or any OpenAI-style server, under a made-up load. With --out: "
        "JSON, CSV and an HTML page with plots.",
        epilog=f"{_BENCH_EXAMPLES}\n{_LOADS}\n{_AGAINST}\n{_MODELS}\n{_EXIT_CODES}",
    )
    what = command.add_argument_group("what is measured")
    what.add_argument(
        "--model", "--weights", metavar="MODEL", help="run it in this process; with --url: the name to ask for"
    )
    what.add_argument("--url", metavar="URL", help="measure the OpenAI-style server there instead")
    what.add_argument("--api-key", metavar="KEY", help="for --url")
    what.add_argument("--against", choices=("llama-server",), help="compare with llama.cpp's own server (see below)")
    what.add_argument("--llama-server", type=Path, metavar="PATH", help="that program instead of the wheel xllamacpp")
    what.add_argument("--only", choices=("server", "decode"), help="one half of --against")
    what.add_argument("--rounds", type=int, metavar="N", help="with --against: turns of each side (default 3)")
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
    load.add_argument("--requests", type=int, metavar="N", help="requests of each case (default 32)")
    load.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of an ordinary prompt (default 256)")
    load.add_argument("--generate-tokens", type=int, metavar="N", help="tokens of an ordinary answer (default 64)")
    load.add_argument("--vocabulary", type=int, metavar="N", help="ids below N (default: the model's; 32000 for --url)")
    load.add_argument("--seed", type=int, default=1, metavar="S", help="seed of prompts and arrivals (default 1)")
    load.add_argument("--quick", action="store_true", help="8 requests of 64 + 16 tokens, for a look")


def _add_engine(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine in this process")
    engine.add_argument("--device", default=CPU, metavar="DEVICE", help=DEVICE_HELP)
    engine.add_argument("--threads", type=int, metavar="N", help="compute threads (default: as `kvengine generate`)")
    engine.add_argument("--block-sizes", action=ListAction, of=int, metavar="N", help="tokens in a block (default 16)")
    engine.add_argument("--kv-dtype", default="f16", metavar="TYPE", help="type of K and V, as in serve (default f16)")
    engine.add_argument("--pool-tokens", type=int, metavar="N", help="size of the K/V pool (default: all clients fit)")
    engine.add_argument("--policy", default="fcfs", metavar="NAME", help="fcfs (default), shortest or priority")
