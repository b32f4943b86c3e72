"""The command line of `kvengine serve`.

The module owns its options and help. It takes no action, and imports nothing heavy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore_console.command_line import Commands, seconds, size, whole_number
from kvstore_engine.devices import CPU, DEVICE_HELP, KV_TYPES
from kvstore_engine.page_selection import SELECT_HELP

_port = whole_number(0, 65535)
_count = whole_number(1, 1 << 30)
_POLICIES = ("fcfs", "shortest", "priority")
MAX_SEQUENCES = 256  # the logits of a step take 4 bytes a token of the vocabulary for each, twice
_DESCRIPTION = """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models,
and /tokenize, /detokenize, /health, /metrics. Requests run in one batch; their K/V is shared
between requests of a tenant and, with --kvstore, kept in kvstored."""
_EPILOG = """examples:
  kvengine serve --model smollm2-135m-instruct:q8_0
  kvengine serve --model ./llama.gguf --kvstore /run/kvstored --context 8192 --max-sequences 8
  kvengine serve --model ./llama.gguf --context 8192 --select-pages 50%
  kvengine serve --model ./llama.gguf --host 0.0.0.0 --api-keys /etc/kvengine/keys --policy priority

  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 50}'
  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The sky is", "n": 2, "max_tokens": 20, "temperature": 0.7}'

  curl http://127.0.0.1:8080/v1/embeddings -H 'Content-Type: application/json' \\
      -d '{"input": ["a text", "another"]}'

--api-keys FILE has lines 'KEY TENANT [PRIORITY]'; '#' begins a comment. A key has 8 characters
or more. Tenants share no K/V.
Without it only this machine is served.

SIGTERM or Ctrl-C: nothing new is taken in, what runs is finished (--drain-s), exit code 0.
Ctrl-C twice ends at once.
"""


def add_serve(commands: Commands, *, models: str, exit_codes: str) -> None:
    """Add the subcommand `serve` to `commands`. `models` and `exit_codes` are help texts that are appended to its
    own.
    """
    command = commands.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description=_DESCRIPTION,
        epilog=f"{_EPILOG}\n{models}\n{exit_codes}",
    )
    command.add_argument(
        "--model", "--weights", required=True, metavar="MODEL", help="a .gguf file or a known name (see below)"
    )
    _add_http(command)
    _add_engine(command)


def _add_http(command: argparse.ArgumentParser) -> None:
    http = command.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default 127.0.0.1)")
    http.add_argument(
        "--port", type=_port, default=8080, metavar="PORT", help="port; 0 takes a free one (default 8080)"
    )
    http.add_argument(
        "--max-connections",
        type=whole_number(1, 1 << 20),
        default=1024,
        metavar="N",
        help="connections at once; over that the one that has asked for nothing for longest ends (default 1024)",
    )
    http.add_argument("--api-keys", type=Path, metavar="FILE", help="who may use the server, and as which tenant")
    http.add_argument(
        "--served-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model (default: the name in --model); may be repeated, the first is shown",
    )
    http.add_argument(
        "--pooling",
        choices=["mean", "cls", "last"],
        help="how /v1/embeddings makes a vector of a text's states (default: as the model's file says)",
    )
    http.add_argument("--no-access-log", action="store_true", help="no line on stderr for each request")
    http.add_argument(
        "--drain-s",
        type=_drain_seconds,
        default=30.0,
        metavar="S",
        help="time for requests to finish at the end (default 30)",
    )


def _add_engine(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine")
    engine.add_argument("--device", default=CPU, metavar="DEVICE", help=DEVICE_HELP)
    engine.add_argument(
        "--context",
        type=_count,
        metavar="N",
        help="tokens of one prompt and answer together (default: 4096, or the model's limit if smaller)",
    )
    engine.add_argument("--threads", type=_count, metavar="N", help="compute threads (default: as kvengine generate)")
    engine.add_argument(
        "--stages", type=_count, default=1, metavar="N", help="1: a server computes in one stage (generate: in more)"
    )
    engine.add_argument(
        "--max-sequences",
        type=_sequences,
        default=16,
        metavar="N",
        help=f"answers computed at the same time, at most {MAX_SEQUENCES} (default 16)",
    )
    engine.add_argument(
        "--max-queued", type=_count, default=256, metavar="N", help="requests that may wait (default 256)"
    )
    engine.add_argument("--policy", choices=_POLICIES, default="fcfs", help="who goes first (default fcfs)")
    engine.add_argument(
        "--kv-dtype",
        choices=KV_TYPES,
        default="f16",
        help="type of K and V in the pool (default f16); q8_0 and q4_0 on cpu, int8 and fp8 (e4m3) on the others",
    )
    engine.add_argument(
        "--pool",
        type=size,
        metavar="SIZE",
        help="memory for K/V, such as 2GiB (default: the context for every sequence, at most half of what is free)",
    )
    engine.add_argument("--select-pages", metavar="N|P%", help=SELECT_HELP)
    engine.add_argument("--swap", type=size, metavar="SIZE", help="memory for K/V of preempted answers; 0 recomputes")
    _add_store(engine)
    engine.add_argument(
        "--hung-after-s",
        type=_patience_seconds,
        default=20.0,
        metavar="S",
        help="end a ggml worker whose step takes longer than this and than 30 times the predicted time (default "
        "20); on other devices than cpu the scheduler, which is started again",
    )
    engine.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace of every step for chrome://tracing or ui.perfetto.dev; it grows as long as the server runs",
    )


def _add_store(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--kvstore", type=Path, metavar="DIR", help="the folder of kvstored's sockets; without it nothing is kept"
    )
    engine.add_argument(
        "--accepts-lossy",
        action="store_true",
        help="with --kvstore: take lossy copies of blocks too, and let some be made, where the tenant allows it",
    )
    engine.add_argument(
        "--store-rate",
        type=_rate,
        default="auto",
        metavar="RATE",
        help="bytes a second, such as 2GiB, that a GPU copies for the daemon while it decodes; auto, the default, is a "
        "quarter of what its link is seen to move, off is no limit",
    )


def _sequences(text: str) -> int:
    count = _count(text)
    if count > MAX_SEQUENCES:
        raise argparse.ArgumentTypeError(
            f"at most {MAX_SEQUENCES} answers are computed at a time, got {text}: more wait (--max-queued)"
        )
    return count


def _rate(text: str) -> str:
    from kvstore_client.link_rate import parse_rate

    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _drain_seconds(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def _patience_seconds(text: str) -> float:
    if (found := seconds(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least a second is wanted, got {text!r}")
    return found
