"""Commands that say how long stored blocks are kept: pin, unpin and ttl of chosen blocks, versions of weights.

Blocks of a prompt are the calling user's own: a session of the command turns the prompt into keys and touches them.
Blocks by key, model or tenant are chosen by the daemon, for operators.
"""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvctl.connection import AdminSocket, open_session
from kvctl.output import FAILED, MISS, UNREACHABLE, USAGE, CommandError, Output
from kvctl.target import find_target
from kvstore_console.command_line import whole_number
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_count
from kvstore_proto.terms import TTL_MAX_S
from kvstore_proto.v1 import admin_pb2 as wire
from kvstore_proto.v1.kvstore_pb2 import Terms

TOKENIZE_S: Final = 30.0
WAIT_S: Final = 60.0  # for work over a whole tenant
ttl_seconds, _version = whole_number(0, TTL_MAX_S), whole_number(1, (1 << 53) - 1)
_COLUMNS: Final = ("TENANT", "WEIGHTS", ">VERSION", ">CLIENTS", ">BLOCKS", ">OF OLDER VERSIONS")
KEEP_EXAMPLES: Final = {
    "pin": (
        "keep blocks from eviction, for an owner",
        [
            "kvctl pin nightly --tokens-file system.ids --fingerprint 3fa9c0de --for 86400",
            "kvctl pin nightly --text system.txt --tokenize http://127.0.0.1:8000 --fingerprint 3fa9c0de",
            "kvctl pin ops --tenant chat --key 051e43b1d68c     # it and the blocks before it",
        ],
    ),
    "unpin": (
        "end an owner's pins",
        ["kvctl unpin nightly --tenant chat --all", "kvctl unpin nightly --tokens 0-2047 --fingerprint 3fa9c0de"],
    ),
    "ttl": (
        "let blocks expire so many seconds from now; 0: never",
        [
            "kvctl ttl 3600 --tenant chat --model llama",
            "kvctl ttl 60 --tenant chat --key 051e43b1d68c --below     # it and all that continue it",
            "kvctl ttl 0 --tokens-file system.ids --fingerprint 3fa9c0de",
        ],
    ),
    "versions": (
        "versions of weights that a trainer changes in place; bump: a new one, and blocks of older ones go",
        ["kvctl versions", "kvctl versions bump policy --tenant rl", "kvctl versions bump policy --tenant rl --to 118"],
    ),
}


def add_keep_options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    for name in ("pin", "unpin"):
        made[name].add_argument("owner", help="whose pin, a name of your choice")
    made["pin"].add_argument(
        "--for", dest="for_s", type=ttl_seconds, metavar="S", help="all pins of this owner end after so many seconds"
    )
    made["ttl"].add_argument("ttl", type=ttl_seconds, metavar="SECONDS", help="from now; 0 is never")
    for name in ("pin", "unpin", "ttl"):
        _selection(made[name])
    made["versions"].add_argument("action", nargs="?", choices=["list", "bump"], default="list", help="what to do")
    made["versions"].add_argument("weights", nargs="?", default="", help="bump: the fingerprint's field of this name")
    made["versions"].add_argument("--tenant", default="", help="whose")
    made["versions"].add_argument("--to", type=_version, default=0, metavar="N", help="the new version (default: next)")


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", metavar="LIST", help="a prompt by its token ids, like 1,2,3 or 0-127")
    parser.add_argument("--tokens-file", metavar="FILE", help="the same, read from a file (- is standard input)")
    parser.add_argument("--text", metavar="FILE", help="a prompt as text; needs --tokenize")
    parser.add_argument("--tokenize", metavar="URL", help="the engine whose /tokenize makes tokens of --text")
    parser.add_argument("--fingerprint", metavar="FILE|DIGEST", help="what the prompt's K/V depends on")
    parser.add_argument("--group", type=whole_number(0, 65535), metavar="N", help="only this layer group of the prompt")
    parser.add_argument("--tenant", default="", help="whose blocks, with --key, --model or --all")
    parser.add_argument(
        "--key", default="", help="a block by its key's first 6 hex digits or more, and those before it"
    )
    parser.add_argument("--below", action="store_true", help="with --key: it and all blocks that continue it instead")
    parser.add_argument("--model", default="", help="all blocks of a model: part of its name, or of a digest")
    parser.add_argument("--all", action="store_true", help="all blocks of the tenant")


def check_keep(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program with a one-line error if options of these commands do not go together."""
    command = arguments.command
    if command == "versions":
        if (arguments.action == "bump") != bool(arguments.weights) or (arguments.to and arguments.action == "list"):
            parser.error("versions: bump takes a name of weights, and --to; list takes neither")
        if arguments.action == "bump" and not arguments.tenant:
            parser.error("versions bump: name the --tenant whose weights have changed")
        return
    if command in ("pin", "unpin") and not arguments.owner:
        parser.error(f"{command}: name the owner of the pins, not ''")
    by_prompt = [arguments.tokens is not None, arguments.tokens_file is not None, arguments.text is not None]
    by_daemon = [bool(arguments.key), bool(arguments.model), arguments.all]
    if sum(by_prompt) + sum(by_daemon) != 1:
        parser.error(f"{command}: say which blocks by one of --tokens, --tokens-file, --text, --key, --model or --all")
    if any(by_prompt) and (arguments.tenant or not arguments.fingerprint):
        parser.error(f"{command}: a prompt needs --fingerprint, and is of your own tenant: leave --tenant out")
    if any(by_daemon) and (not arguments.tenant or arguments.fingerprint or arguments.group is not None):
        parser.error(f"{command}: --key, --model and --all need --tenant, and take no --fingerprint or --group")
    if (arguments.text is None) != (arguments.tokenize is None):
        parser.error(f"{command}: --text and --tokenize belong together")
    if arguments.below and not arguments.key:
        parser.error(f"{command}: --below goes with --key")


def keep(directory: Path, arguments: argparse.Namespace) -> Output:
    """Pin, unpin or set the time to live of the chosen blocks."""
    terms, done = _terms(arguments)
    if arguments.key or arguments.model or arguments.all:
        chosen = {"key_prefix": arguments.key.lower(), "below": arguments.below, "model": arguments.model}
        request = wire.KeepRequest(terms=Terms(**terms), tenant=arguments.tenant, all=arguments.all, **chosen)
        with AdminSocket(directory, arguments.timeout) as admin:
            reply = admin.call("Keep", request, wire.KeepReply, longer_s=WAIT_S)
        return Output(f"{done} {human_blocks(reply.blocks, reply.bytes)} of {arguments.tenant}", reply)
    if arguments.text is not None:
        arguments.tokens = _tokens_of_text(arguments.text, arguments.tokenize)
    arguments.name = None
    target, touched = find_target(directory, arguments), 0
    groups = [group.group_id for group in target.fingerprint.groups] if arguments.group is None else [target.group]
    options: dict[str, Any] = {"ttl": terms.get("ttl_s"), "pin_ttl": terms.get("pin_ttl_s")}
    options |= {name: terms.get(name, "") for name in ("pin", "unpin")}
    with open_session(directory, target.fingerprint, arguments.timeout) as session:
        for group in groups:
            touched += session.touch(target.tokens, group=group, **options)
    wanted = target.blocks * len(groups)
    text = f"{target.label}: {done} {human_count(touched)} of {human_blocks(wanted)}"
    text += "" if touched == wanted else "; the others are not stored"
    return Output(text, {"blocks": touched, "missing_blocks": wanted - touched}, 0 if touched else MISS)


def _terms(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the terms that a command sets, by their names on the wire, and what to say of that."""
    if arguments.command == "ttl":
        return {"ttl_s": arguments.ttl}, f"expire in {arguments.ttl} s:" if arguments.ttl else "never expire:"
    if arguments.command == "unpin":
        return {"unpin": arguments.owner}, f"{arguments.owner} pins none of"
    end = {} if arguments.for_s is None else {"pin_ttl_s": arguments.for_s}
    return {"pin": arguments.owner, **end}, f"{arguments.owner} pins"


def _tokens_of_text(path: str, url: str) -> str:
    """Return the token ids of the text in the file `path`, as --tokens takes them, from the engine at `url`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(USAGE, f"--text {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    found = post_json(f"{url.rstrip('/')}/tokenize", {"prompt": text}, TOKENIZE_S)
    tokens = found.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise CommandError(FAILED, f"{url}/tokenize gave no list of token ids in `tokens`")
    return ",".join(map(str, tokens))


def post_json(url: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """Send `body` to `url` by POST, or ask by GET for None, and return the JSON object that comes back. Raises
    CommandError."""
    data = None if body is None else json.dumps(body).encode()
    try:
        if not url.startswith(("http://", "https://")):
            raise http.client.InvalidURL("it begins with neither http:// nor https://")
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(500).decode(errors="replace").split())
        raise CommandError(FAILED, f"{url} refused: {error.code} {error.reason} {said}") from None
    except http.client.InvalidURL as error:
        raise CommandError(USAGE, f"{url} is no address ({error}): write one such as http://127.0.0.1:8000") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise CommandError(UNREACHABLE, f"{url} does not answer: {why}") from None
    return found if isinstance(found, dict) else {}


def versions(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    """List namespaces of weights, or make a new version of one the newest."""
    request = wire.VersionsRequest(tenant=arguments.tenant, weights=arguments.weights, version=arguments.to)
    reply = admin.call("Versions", request, wire.VersionsReply, longer_s=WAIT_S)
    rows = [
        [
            each.tenant,
            each.weights,
            str(each.version),
            *map(human_count, (each.clients, each.blocks, each.older_blocks)),
        ]
        for each in reply.versions
    ]
    table = render_table(_COLUMNS, rows, empty="no client has named weights with a version")
    if arguments.action == "list":
        return Output(table, reply)
    clients = f"{human_count(reply.clients)} sessions of older versions ended"
    return Output(f"{clients}; removed {human_blocks(reply.blocks, reply.bytes)}\n{table}", reply)
