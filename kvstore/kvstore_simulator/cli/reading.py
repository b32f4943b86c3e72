"""`kvstored simulate`: the choice of a trace, its format, and the part to replay."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import one_of

if TYPE_CHECKING:
    from kvstore_simulator.trace import Trace

_SECONDS_MAX = 1e9
_FORMAT_OF = {
    "window_s": "claude-code", "sessions": "claude-code", "group_tokens": "claude-code", "as_recorded": "kvstored",
}  # fmt: skip


def add_options(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument(
        "--part", default="all", metavar="PART",
        help="first-half, second-half (by time), or FROM:TO as fractions of the time, such as 0.5:1",
    )  # fmt: skip
    simulate.add_argument(
        "--warm", action="store_true",
        help="with --part: replay what comes before it too, uncounted; without, the part starts with an empty tier",
    )  # fmt: skip
    simulate.add_argument(
        "--seed", type=int, default=0, help="seed of random numbers: session starts (claude-code), made-up hints"
    )
    simulate.add_argument("--window-s", type=float, help="sessions start within it (claude-code; default 3600)")
    simulate.add_argument("--sessions", type=int, help="replay N sessions, drawn at random (claude-code; default: all)")
    simulate.add_argument(
        "--as-recorded", action="store_true",
        help="a recorded get only reads; without, it stores what it missed, as an engine does (kvstored)",
    )  # fmt: skip
    simulate.add_argument("--group-tokens", type=int, help="tokens of a block (claude-code; default 512)")


def read(arguments: argparse.Namespace, progress: Any) -> tuple[Trace, int]:
    """Read the part of a trace that `arguments` choose. Return that part, and the number of the first request to count
    in results. The options that choose the part and `--model` are checked. Raises OSError, or ValueError (TraceError)
    with one line.
    """
    from kvstore_console.units import human_bytes
    from kvstore_simulator.hit_value import models
    from kvstore_simulator.readers import FORMATS, ReadOptions, read_trace
    from kvstored.config.parse import MAX_BLOCK_BYTES

    format_name = one_of("--format", arguments.format, FORMATS)
    one_of("--model", arguments.model, models())
    given = {option.name: getattr(arguments, option.name) for option in fields(ReadOptions)}
    options = ReadOptions(**{name: value for name, value in given.items() if value is not None})
    if not all(0 <= seconds <= _SECONDS_MAX for seconds in (arguments.ttl_s, options.window_s)):
        raise ValueError(f"--ttl-s and --window-s cannot be negative, nor above {_SECONDS_MAX:.0e} seconds")
    if arguments.seed < 0:
        raise ValueError(f"--seed {arguments.seed}: 0 or more")
    if arguments.warm and arguments.part == "all":
        raise ValueError("--warm replays what comes before a --part; name the part too")
    for option, its_format in _FORMAT_OF.items():
        if getattr(arguments, option) not in (None, False) and format_name != its_format:
            print(f"--{option.replace('_', '-')} changes nothing in format {format_name}", file=sys.stderr)
    source = Path("/dev/stdin") if str(arguments.trace) == "-" else arguments.trace
    trace = read_trace(source, format_name, options, progress)
    block_bytes = models()[arguments.model].kv_bytes_per_token * trace.block_tokens
    if block_bytes > MAX_BLOCK_BYTES:
        raise ValueError(
            f"a block of this trace and model is {human_bytes(block_bytes)}, over {human_bytes(MAX_BLOCK_BYTES)}"
        )
    return _part(trace, arguments)


def _part(trace: Trace, arguments: argparse.Namespace) -> tuple[Trace, int]:
    """Return the part to replay, and the number of the first request that counts."""
    import numpy as np

    words = {"all": "0:1", "first-half": "0:0.5", "second-half": "0.5:1"}
    first, colon, last = words.get(arguments.part, arguments.part).partition(":")
    try:
        begin, end = float(first), float(last)
    except ValueError:
        begin = end = -1.0
    if not (colon and 0 <= begin < end <= 1):
        raise ValueError(f"--part {arguments.part}: first-half, second-half, or FROM:TO such as 0.25:0.75")
    if (begin, end) == (0.0, 1.0):
        return trace, 0
    span_ns = int(trace.times_ns[-1] - trace.times_ns[0])
    at = [int(np.searchsorted(trace.times_ns - trace.times_ns[0], round(share * span_ns))) for share in (begin, end)]
    if end == 1:
        at[1] = trace.requests
    if at[0] >= at[1]:
        raise ValueError(f"--part {arguments.part}: no request falls into it")
    return (trace.part(0, at[1]), at[0]) if arguments.warm else (trace.part(at[0], at[1]), 0)
