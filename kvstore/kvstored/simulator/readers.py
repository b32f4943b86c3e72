"""Traces from files: by format, a line at a time, gzip or not, with the bytes read so far for a progress bar.

Never interprets what is wrong as something right: a line that does not fit raises TraceError with its number.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstored.simulator.trace import Op, Told, Trace, TraceBuilder, TraceError

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
MOONCAKE_BLOCK_TOKENS = 512
CLAUDE_BLOCK_TOKENS = 64
RECORDED_VERSIONS = (1, 2)
ID_DIGITS = 16
_IDS_MAX = 1 << 22  # of one request: 268 million tokens
_TOKENS_MAX = 1 << 20  # of a block
Progress = Callable[[int, int], None]
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what reading a wrong line raises


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`seed`, `window_s` and `sessions` are for formats whose sessions have no start of their own. `group_tokens`: make
    blocks of so many tokens out of smaller ones. `as_recorded`, for our own format: what was read is only read.
    """

    seed: int = 0
    window_s: float = 3600.0
    sessions: int | None = None
    group_tokens: int = 512
    as_recorded: bool = False


def read_trace(path: Path, format_name: str, options: ReadOptions, progress: Progress) -> Trace:
    """The whole trace. `progress(bytes read, bytes in all)` is called now and then. Raises TraceError; OSError."""
    return FORMATS[format_name](path, options, progress)


def lines_of(path: Path, progress: Progress, *, may_be_cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Each line's number and its JSON value. Empty lines are left out. `may_be_cut`: a file whose writer was killed
    ends with its last whole line. A pipe does as well as a file; nothing is known of its length.
    """
    total = path.stat().st_size
    with path.open("rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        lines = iter(gzip.GzipFile(fileobj=raw) if is_packed else raw)
        for number in itertools.count(1):
            try:
                line = next(lines, b"")
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if may_be_cut and number > 1 and isinstance(error, EOFError):
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
                if may_be_cut and number > 1 and not line.endswith(b"\n"):
                    break
                raise TraceError(f"{path}, line {number}: not JSON: {error}") from None
    progress(total, total)


def read_mooncake(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """One request a line: timestamp (ms), input_length, output_length, hash_ids; an id stands for a whole prefix
    (Mooncake, FAST 2025). A request continues a session when it reuses more than the first block.
    """
    builder = TraceBuilder(path.name, "mooncake", MOONCAKE_BLOCK_TOKENS)
    seen: set[int] = set()
    for number, row in lines_of(path, progress):
        with _reading(path, number, "a Mooncake request"):
            ids = row["hash_ids"]
            if not isinstance(ids, list):
                raise TraceError("hash_ids is no list")
            builder.add(
                round(row["timestamp"] * NS_PER_MS), ids, continued=len(ids) > 1 and ids[1] in seen,
                input_tokens=int(row["input_length"]), output_tokens=int(row["output_length"]),
            )  # fmt: skip
            seen.update(ids)
    return builder.build()


def read_claude_code(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """One session a line, times from its own start: starts are drawn evenly over the window with a seed, sessions kept
    (when only some are wanted) by a draw as well. Blocks of 64 tokens are grouped; a last group that is not full is no
    block. Each session is its own world of ids (kv-cache-tester).
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
            for turn, (at_s, input_tokens, output_tokens, kind, _, runs) in enumerate(session["reqs"]):
                ids: list[int] = []
                if len(runs) % 2:
                    raise TraceError(f"request {turn}: runs are pairs of start and length, got {len(runs)} numbers")
                for first, length in zip(runs[::2], runs[1::2], strict=True):
                    if not 0 <= length <= _IDS_MAX - len(ids):
                        raise TraceError(
                            f"request {turn}: a run of {length} blocks; a request has {_IDS_MAX:,} at most"
                        )
                    ids.extend(range(first, first + length))
                builder.add(
                    round((start_s + at_s) * NS_PER_S), ids[group - 1 :: group], kind=str(kind), continued=turn > 0,
                    input_tokens=int(input_tokens), output_tokens=int(output_tokens), space=space,
                )  # fmt: skip
    return builder.build()


@contextmanager
def _reading(path: Path, number: int, wanted: str) -> Iterator[None]:
    """What is wrong with a line is said together with its number."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None
    except _MISFITS as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}, line {number}: not {wanted} ({what})") from None


def read_kvstored(path: Path, options: ReadOptions, progress: Progress) -> Trace:
    """What `kvstored serve --record` wrote (docs/traces.md). A lookup or get becomes a request that stores what it
    missed, as an engine does; a put stores its blocks. A get of what the client has just looked up is no other request.
    """
    builder: TraceBuilder | None = None
    parents: dict[str, str] = {}
    asked: dict[int, list[str]] = {}  # by client: the chain it has just looked up
    read_op = Op.GET if options.as_recorded else Op.REQUEST
    for number, row in lines_of(path, progress, may_be_cut=True):
        if number == 1:
            header = row if isinstance(row, dict) else {}
            if header.get("format") != "kvstored" or header.get("version") not in RECORDED_VERSIONS:
                known = " or ".join(map(str, RECORDED_VERSIONS))
                raise TraceError(f"{path} was not written by kvstored serve --record, version {known}")
            continue
        with _reading(path, number, "a recorded request"):
            chain = _recorded_chain(parents, row.get("p", ""), row.get("k", ""))
            op, client, tokens = row["op"], row["c"], row["b"]
            if not isinstance(tokens, int) or not 1 <= tokens <= _TOKENS_MAX:
                raise TraceError(f"b, the tokens of a block, is {tokens!r}")
            builder = builder or TraceBuilder(path.name, "kvstored", tokens)
            if op == "put":
                asked.pop(client, None)
                builder.add(round(row["t"] * NS_PER_S), chain, tenant=row["n"], kind="put", op=Op.PUT, space=row["n"])
            elif op in ("get", "lookup", "peek"):
                before = asked.pop(client, [])
                if op != "get":
                    asked[client] = chain
                if before[: len(chain)] == chain:
                    continue
                builder.add(
                    round(row["t"] * NS_PER_S), chain, tenant=row["n"], kind="request", continued=row["f"] > 1,
                    input_tokens=int(row.get("i", 0 if options.as_recorded else len(chain) * tokens)), op=read_op,
                    space=row["n"],
                )  # fmt: skip
            elif op == "hint":
                builder.tell(_told(row, len(builder)), chain, space=row["n"])
            else:
                raise TraceError(f"operation {op!r} is unknown")
    if builder is None:
        raise TraceError(f"{path} has no request in it")
    return builder.build()


def _told(row: dict[str, Any], before: int) -> Told:
    """A recorded hint; of which block is not known yet."""
    chance, due_in_ms = row.get("w"), row.get("d")
    if chance is not None and not 0.0 <= chance <= 1.0:
        raise TraceError(f"w, the chance that a chain goes on, is {chance!r}")
    step, tokens = int(row.get("s") or 0), int(row.get("a") or 0)
    if min(step, tokens, due_in_ms or 0) < 0:
        raise TraceError("s, a or d of a hint is below 0")
    due_in_ns = None if due_in_ms is None else round(due_in_ms * NS_PER_MS)
    return Told(before, round(row["t"] * NS_PER_S), row["n"], -1, chance, step, tokens, due_in_ns)


def _recorded_chain(parents: dict[str, str], before: str, packed: str) -> list[str]:
    """The whole chain of a line: the known ancestors of `before`, then its own keys. A key that nobody recorded the
    ancestors of begins a chain.
    """
    if len(packed) % ID_DIGITS:
        raise TraceError(f"keys are {ID_DIGITS} digits each, got {len(packed)}")
    chain: list[str] = []
    above = before
    while above:
        chain.append(above)
        above = parents.setdefault(above, "")
    chain.reverse()
    for at in range(0, len(packed), ID_DIGITS):
        key = packed[at : at + ID_DIGITS]
        parents.setdefault(key, before)
        chain.append(key)
        before = key
    return chain


FORMATS: dict[str, Callable[[Path, ReadOptions, Progress], Trace]] = {
    "mooncake": read_mooncake,
    "claude-code": read_claude_code,
    "kvstored": read_kvstored,
}
