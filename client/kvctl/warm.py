"""kvctl warm: an engine computes recorded prompts again, and stores them: after new weights, or an empty start.

It reads a recording of the daemon with token ids (`daemon.record_tokens`), or JSON lines that are requests to an OpenAI
endpoint. Each prompt is sent once, with one token of answer, by a few threads. Nothing is stored here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final, NamedTuple

from kvctl.keep import post_json
from kvctl.output import FAILED, OK, USAGE, CommandError, Output
from kvstore_console.command_line import whole_number
from kvstore_console.units import human_count

REQUEST_S: Final = 600.0
KEY_DIGITS: Final = 16
SHOWN_EVERY: Final = 20
_WANTED: Final = (
    "give a recording of the daemon (daemon.record, with daemon.record_tokens = true) or JSON lines of requests with "
    "`prompt` or `messages`, gzip or not"
)
WARM_EXAMPLES: Final = {
    "warm": (
        "have an engine compute recorded prompts again, the most used first, so that they are stored",
        [
            "kvctl warm --from /var/tmp/today.jsonl.gz --dry-run        # how many prompts and tokens",
            "kvctl warm --from /var/tmp/today.jsonl.gz --to http://127.0.0.1:8000 --limit 500",
            "kvctl warm --from requests.jsonl --to http://127.0.0.1:8000 --model llama    # bodies of requests",
        ],
    )
}


class Prompt(NamedTuple):
    """A prompt to compute: the body of its request, how often it was used, and its tokens, 0 if not known."""

    body: dict[str, Any]
    uses: int
    tokens: int


def add_warm_options(parser: argparse.ArgumentParser) -> None:
    count = whole_number(1, 1_000_000)
    parser.add_argument("--from", dest="source", required=True, metavar="FILE", help="the recording, gzip or not")
    parser.add_argument("--to", metavar="URL", help="the engine, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="the model's name in requests (default: the engine's first)")
    parser.add_argument("--limit", type=count, metavar="N", help="at most N prompts")
    parser.add_argument("--at-once", type=whole_number(1, 256), default=4, metavar="N", help="requests at once")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")


def check_warm(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if bool(arguments.to) == arguments.dry_run:
        parser.error("warm: give --to URL, or --dry-run alone")


def warm(_: object, arguments: argparse.Namespace) -> Output:
    """Send the prompts of the recording to the engine."""
    prompts, incomplete = read_prompts(arguments.source)
    chosen = sorted(prompts, key=lambda prompt: -prompt.uses)[: arguments.limit]
    reply = {"prompts": len(chosen), "tokens": sum(prompt.tokens for prompt in chosen), "incomplete": incomplete}
    size = f"{human_count(len(chosen))} prompts of {human_count(reply['tokens'])} known tokens"
    left_out = f"; {human_count(incomplete)} more have no token ids for all of their blocks" if incomplete else ""
    if arguments.dry_run:
        return Output(f"would send {size}{left_out}", reply)
    if not chosen:
        raise CommandError(FAILED, f"{arguments.source} has no prompt that can be sent{left_out}")
    url, failures, done = arguments.to.rstrip("/"), list[str](), 0
    model = arguments.model or _first_model(url)
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for failure in threads.map(lambda prompt: _send(url, model, prompt), chosen):
            failures += [failure] if failure else []
            done += 1
            if not arguments.json and (done % SHOWN_EVERY == 0 or done == len(chosen)):
                print(f"{done} of {len(chosen)} prompts sent, {len(failures)} refused", file=sys.stderr)
            if len(failures) == done == min(arguments.at_once, len(chosen)):
                threads.shutdown(cancel_futures=True)
                raise CommandError(FAILED, f"every prompt fails: {failures[0]}")
    text = f"sent {size}{left_out}"
    text += f"; {human_count(len(failures))} were refused, the first: {failures[0]}" if failures else ""
    return Output(text, reply | {"refused": len(failures)}, FAILED if failures else OK)


def _send(url: str, model: str, prompt: Prompt) -> str:
    """Have the engine compute `prompt`; return why it did not, or ""."""
    path = "/v1/chat/completions" if "messages" in prompt.body else "/v1/completions"
    try:
        post_json(url + path, prompt.body | {"model": model, "max_tokens": 1, "stream": False}, REQUEST_S)
    except CommandError as error:
        return str(error)
    return ""


def _first_model(url: str) -> str:
    models = post_json(f"{url}/v1/models", None, REQUEST_S).get("data")
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise CommandError(FAILED, f"{url}/v1/models names no model: give --model")
    return str(first["id"])


def read_prompts(path: str) -> tuple[list[Prompt], int]:
    """Return the prompts in the file `path`, and how many more there are whose tokens are not all known. Raises
    CommandError for a file of another form."""
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if is_packed else open(path, encoding="utf-8") as lines:
            rows = _rows(lines, path)
            first = next(rows, None)
            if first is None:
                raise CommandError(USAGE, f"--from {path} has no whole line: {_WANTED}")
            if first.get("format") == "kvstored":
                return _of_recording(rows)
            return _of_requests([first, *rows], path), 0
    except UnicodeDecodeError:
        raise CommandError(USAGE, f"--from {path} is not text: {_WANTED}") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise CommandError(USAGE, f"--from {path} is damaged gzip ({error}): {_WANTED}") from None
    except OSError as error:
        raise CommandError(USAGE, f"--from {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(USAGE, f"--from {path} is no recording of a daemon with token ids: {error!r}") from None


def _rows(lines: IO[str], path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; a last line that a killed daemon cut off, or an end of gzip that is missing,
    ends them."""
    with suppress(EOFError):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number > 1 and not line.endswith("\n"):
                    return
                raise CommandError(USAGE, f"--from {path} line {number} is not JSON ({error}): {_WANTED}") from None
            if not isinstance(row, dict):
                raise CommandError(USAGE, f"--from {path} line {number} is no JSON object: {_WANTED}")
            yield row


def _of_requests(rows: list[dict[str, Any]], path: str) -> list[Prompt]:
    """Return the prompts of requests to an OpenAI endpoint; equal ones are one."""
    found: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        body = {name: row[name] for name in ("prompt", "messages", "tools") if name in row}
        if "prompt" not in body and "messages" not in body:
            raise CommandError(USAGE, f"--from {path} line {number}: neither `prompt` nor `messages`, nor a recording")
        found[json.dumps(body, sort_keys=True)] += 1
    bodies = [(json.loads(text), uses) for text, uses in found.items()]
    sizes = [len(body["prompt"]) if isinstance(body.get("prompt"), list) else 0 for body, _ in bodies]
    return [Prompt(body, uses, size) for (body, uses), size in zip(bodies, sizes, strict=True)]


def _of_recording(rows: Iterator[Mapping[str, Any]]) -> tuple[list[Prompt], int]:
    """Return a prompt for each chain of a daemon's recording that no other continues, with all of its blocks."""
    before: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    uses: Counter[str] = Counter()
    for row in rows:
        end = row.get("p", "")
        for at in range(0, len(row.get("k", "")), KEY_DIGITS):
            key = row["k"][at : at + KEY_DIGITS]
            before[key], end = end, key
        if row.get("op") in ("get", "lookup", "put"):
            uses[end] += 1
        ids, size, key = row.get("x", []), row["b"], end
        for last in range(len(ids), 0, -size):  # of the last blocks of the chain
            tokens[key] = ids[max(last - size, 0) : last]
            key = before.get(key, "")
    prompts, incomplete = list[Prompt](), 0
    for end in before.keys() - set(before.values()):
        parts, count, key = list[list[int]](), 0, end
        while key and key in tokens:
            parts.append(tokens[key])
            if len(parts) > len(before):
                raise ValueError(f"the chain of {key} has no end")
            count += uses[key]
            key = before.get(key, "")
        if key or not parts:
            incomplete += 1
        else:
            prompt = [token for part in reversed(parts) for token in part]
            prompts.append(Prompt({"prompt": prompt}, count, len(prompt)))
    return prompts, incomplete
