"""Readers of trace files, one for each format: a line at a time, gzip or not, with the bytes read so far for a progress
bar.

A line that does not fit the format raises TraceError with its number; it is never reinterpreted.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore_simulator.trace import Op, RecordedHint, Trace, TraceBuilder, TraceError
from kvstored.clients.codes import known_step

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
MOONCAKE_BLOCK_TOKENS = 512
CLAUDE_BLOCK_TOKENS = 64
RECORDED_VERSIONS = (1, 2)
ID_DIGITS = 16
_IDS_MAX = 1 << 22  # of one request: 268 million tokens
_TOKENS_MAX = 1 << 20  # of a block
_TENANTS_MAX = 1 << 16
_REQUEST_FACTS = 6
_SHOWN_MAX = 40  # characters of what is wrong
Progress = Callable[[int, int], None]
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what reading a wrong line raises


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options for reading a trace. `seed`, `window_s` and `sessions` are for a format whose sessions have no start
    time. `group_tokens` is the number of tokens of a block, made of smaller blocks. `as_recorded`, for the project's
    own format, keeps reads as reads, which store nothing.
    """

    seed: int = 0
    window_s: float = 3600.0
    sessions: int | None = None
    group_tokens: int = 512
    as_recorded: bool = False


def read_trace(path: Path, format_name: str, options: ReadOptions, progress: Progress) -> Trace:
    """Read the trace in the file `path`, of the format `format_name`, and return it. `progress(bytes read, bytes in
    all)` is called now and then. Raises OSError and TraceError.
    """
    return FORMATS[format_name](path, options, progress)


def lines_of(path: Path, progress: Progress, *, cut: Callable[[int], None] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number and the JSON value of each line of `path`, which may be a pipe. Empty lines are left out. If
    `cut` is given, a file whose writer was killed ends with its last whole line, and `cut` is called with that
    line's number. Otherwise TraceError is raised.
    """
    total = path.stat().st_size
    with path.open("rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        lines = iter(gzip.GzipFile(fileobj=raw) if is_packed else raw)
        for number in itertools.count(1):
            try:
                line = next(lines, b"")
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if cut is not None and number > 1 and isinstance(error, EOFError):
                    cut(number - 1)
                    break
                raise TraceError(f"{path} is damaged or cut off after line {number - 1}: {error}") from None
            if not line:
                break
            if number % 256 == 1 and raw.seekable():
                progress(min(raw.tell(), total), total)
            try:
                if line.strip():
                    yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # JSON and UTF-8; brackets in brackets in brackets
                if cut is not None and number > 1 and not line.endswith(b"\n"):
                    cut(number - 1)
                    break
                what = "bytes that are no text" if isinstance(error, UnicodeDecodeError) else f"not JSON: {error}"
                raise TraceError(f"{path}, line {number}: {what}; a trace is JSON lines, gzip or not") from None
    progress(total, total)


def read_mooncake(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """Read a trace of the Mooncake format (FAST 2025) and return it. Each line is a request: timestamp (ms),
    input_length, output_length, hash_ids; an id stands for a whole prefix. A request continues a session if it
    reuses more than the first block.
    """
    builder = TraceBuilder(path.name, "mooncake", MOONCAKE_BLOCK_TOKENS)
    seen: set[int] = set()
    for number, row in lines_of(path, progress):
        with _reading(path, number, "a Mooncake request"):
            ids = _object(row)["hash_ids"]
            if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
                raise TraceError("hash_ids is no list of numbers")
            builder.add(
                _time_ns(row["timestamp"], "timestamp", NS_PER_MS), ids, continued=len(ids) > 1 and ids[1] in seen,
                input_tokens=_tokens(row["input_length"], "input_length"),
                output_tokens=_tokens(row["output_length"], "output_length"),
            )  # fmt: skip
            seen.update(ids)
    return builder.build()


def read_claude_code(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """Read a trace of Claude Code sessions (kv-cache-tester) and return it. Each line is a session, with times from its
    own start. The starts are drawn evenly over the window of `options`, by its seed; if only some sessions are wanted,
    they are drawn too. Blocks of 64 tokens are combined to larger ones; an incomplete last one is left out. No two
    sessions share a block.
    """
    group, rest = divmod(options.group_tokens, CLAUDE_BLOCK_TOKENS)
    if rest or group < 1:
        raise TraceError(f"--group-tokens {options.group_tokens}: must be a multiple of {CLAUDE_BLOCK_TOKENS}")
    chance = random.Random(options.seed)
    sessions = list(lines_of(path, progress))
    if options.sessions is not None:
        if not 1 <= options.sessions <= len(sessions):
            raise TraceError(f"--sessions {options.sessions}: {path.name} has {len(sessions)}, of which at least 1")
        sessions = chance.sample(sessions, options.sessions)
    builder = TraceBuilder(path.name, "claude-code", options.group_tokens)
    for space, (number, session) in enumerate(sessions):
        start_s = chance.uniform(0.0, options.window_s)
        with _reading(path, number, "a Claude Code session"):
            for turn, request in enumerate(_object(session)["reqs"]):
                if not isinstance(request, list) or len(request) != _REQUEST_FACTS:
                    raise TraceError(f"request {turn}: a list of {_REQUEST_FACTS}: time, tokens in and out, type, ...")
                at_s, input_tokens, output_tokens, kind, _, runs = request
                ids: list[int] = []
                if not isinstance(runs, list) or not set(map(type, runs)) <= {int}:
                    raise TraceError(f"request {turn}: runs are a list of whole numbers")
                if len(runs) % 2:
                    raise TraceError(f"request {turn}: runs are pairs of start and length, got {len(runs)} numbers")
                for first, length in zip(runs[::2], runs[1::2], strict=True):
                    if not 0 <= length <= _IDS_MAX - len(ids):
                        raise TraceError(
                            f"request {turn}: a run of {length} blocks; a request has {_IDS_MAX:,} at most"
                        )
                    ids.extend(range(first, first + length))
                builder.add(
                    round(start_s * NS_PER_S) + _time_ns(at_s, f"request {turn}: its time", NS_PER_S),
                    ids[group - 1 :: group], kind=str(kind), continued=turn > 0,
                    input_tokens=_tokens(input_tokens, f"request {turn}: tokens in"),
                    output_tokens=_tokens(output_tokens, f"request {turn}: tokens out"), space=space,
                )  # fmt: skip
    return builder.build()


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TraceError("a line is an object in braces")
    return row


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TraceError(f"{name} is {_shown(value)}, no number")
    return value


def _time_ns(value: Any, name: str, unit_ns: int) -> int:
    return round(_number(value, name) * unit_ns)


def _tokens(value: Any, name: str) -> int:
    if _number(value, name) != int(value):
        raise TraceError(f"{name} is {_shown(value)}, no whole number")
    return int(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


@contextmanager
def _reading(path: Path, number: int, wanted: str) -> Iterator[None]:
    """Turn an error about a line into a TraceError with the line's number."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None
    except _MISFITS as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}, line {number}: not {wanted} ({what})") from None


def read_kvstored(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """Read a recording of `kvstored serve --record` (docs/traces.md) and return it as a trace. A lookup or get becomes
    a request that also stores its missing blocks, as an engine does. A put therefore counts only if it stores more
    blocks than were requested before it, as for an answer. A get of blocks that the client has just looked up is no new
    request. With `as_recorded`, gets only read, and all puts count.
    """
    builder: TraceBuilder | None = None
    parents: dict[str, str] = {}
    asked: dict[int, list[str]] = {}  # by client: the chain it has just looked up
    ever_asked: set[tuple[int, str]] = set()  # by tenant
    cut_after: list[int] = []
    read_op = Op.GET if options.as_recorded else Op.REQUEST
    for number, row in lines_of(path, progress, cut=cut_after.append):
        if number == 1:
            header = row if isinstance(row, dict) else {}
            if header.get("format") != "kvstored" or header.get("version") not in RECORDED_VERSIONS:
                known = " or ".join(map(str, RECORDED_VERSIONS))
                raise TraceError(f"{path} was not written by kvstored serve --record, version {known}")
            continue
        with _reading(path, number, "a recorded request"):
            op, tokens, time_ns = _object(row)["op"], row["b"], _time_ns(row["t"], "t", NS_PER_S)
            client, tenant = _whole(row["c"], "c, the client's number", 1 << 62), _whole(row["n"], "n", _TENANTS_MAX)
            if not isinstance(tokens, int) or not 1 <= tokens <= _TOKENS_MAX:
                raise TraceError(f"b, the tokens of a block, is {tokens!r}")
            builder = builder or TraceBuilder(path.name, "kvstored", tokens)
            chain = _recorded_chain(parents, row.get("p", ""), row.get("k", ""), learns=op != "hint")
            if op == "put":
                asked.pop(client, None)
                if options.as_recorded or (chain and (tenant, chain[-1]) not in ever_asked):
                    builder.add(time_ns, chain, tenant=tenant, kind="put", op=Op.PUT, space=tenant)
            elif op in ("get", "lookup", "peek"):
                before = asked.pop(client, [])
                if op != "get":
                    asked[client] = chain
                if before[: len(chain)] == chain:
                    continue
                for key in reversed(chain):
                    if (tenant, key) in ever_asked:  # and so were all before it
                        break
                    ever_asked.add((tenant, key))
                builder.add(
                    time_ns, chain, tenant=tenant, kind="request", continued=row["f"] > 1,
                    input_tokens=_tokens(row.get("i", 0), "i"), op=read_op, space=tenant,
                )  # fmt: skip
            elif op == "hint":
                builder.add_hint(_recorded_hint(row, len(builder), time_ns, tenant), chain, space=tenant)
            else:
                raise TraceError(f"operation {op!r} is unknown")
    if builder is None:
        raise TraceError(f"{path} has no request in it")
    return replace(builder.build(), cut_after=cut_after[0] if cut_after else None)


def _recorded_hint(row: dict[str, Any], before: int, time_ns: int, tenant: int) -> RecordedHint:
    """Return a recorded hint, without its block, which is not known yet."""
    chance = row.get("w")
    if chance is not None and not 0.0 <= _number(chance, "w") <= 1.0:
        raise TraceError(f"w, the chance that a chain goes on, is {_shown(chance)}")
    step, tokens = (_whole(row.get(name, 0), name, 1 << 32) for name in ("s", "a"))
    due_in_ns = _whole(row["d"], "d", 1 << 32) * NS_PER_MS if "d" in row else None
    return RecordedHint(before, time_ns, tenant, -1, chance, known_step(step), tokens, due_in_ns)


def _whole(value: Any, name: str, below: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise TraceError(f"{name} is {_shown(value)}, no whole number from 0 to {below - 1:,}")
    return value


def _recorded_chain(parents: dict[str, str], before: str, packed: str, *, learns: bool) -> list[str]:
    """Return the whole chain of a line: the known ancestors of `before`, then its own keys. A key without recorded
    ancestors begins a chain. Without `learns`, the line's ancestors are not recorded, since they may be incomplete.
    """
    if not (isinstance(before, str) and isinstance(packed, str)):
        raise TraceError("p and k are keys in hex digits")
    if len(packed) % ID_DIGITS:
        raise TraceError(f"keys are {ID_DIGITS} digits each, got {len(packed)}")
    chain: list[str] = []
    above = before
    while above:
        chain.append(above)
        above = parents.setdefault(above, "") if learns else parents.get(above, "")
    chain.reverse()
    for at in range(0, len(packed), ID_DIGITS):
        key = packed[at : at + ID_DIGITS]
        if learns:
            parents.setdefault(key, before)
        chain.append(key)
        before = key
    return chain


FORMATS: dict[str, Callable[[Path, ReadOptions, Progress], Trace]] = {
    "mooncake": read_mooncake,
    "claude-code": read_claude_code,
    "kvstored": read_kvstored,
}
