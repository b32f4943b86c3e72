"""kvctl's command line: commands, options, examples. This module only parses and checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvctl.act import ACTIONS, OF_RECORDINGS
from kvctl.blocks import TIERS, add_block_options, check_block_arguments, positive_count
from kvctl.data_arguments import DATA_EXAMPLES, add_data_options, check_data_arguments
from kvctl.keep import KEEP_EXAMPLES, add_keep_options, check_keep
from kvctl.objects import OBJECTS_EXAMPLES, add_objects_options, check_objects
from kvctl.output import MEANINGS
from kvctl.state import EXAMPLES as STATE_EXAMPLES
from kvctl.state import add_state_options, check_state
from kvctl.warm import WARM_EXAMPLES, add_warm_options, check_warm
from kvstore_client.paths import DEFAULT_DIRECTORY, ENVIRONMENT_VARIABLE
from kvstore_console import command_line
from kvstore_console.command_line import Commands, Parser, WrongUsage, seconds, whole_number
from kvstore_proto.version import VERSION

DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_WAIT_S: Final = 30.0

_EXAMPLES: Final = DATA_EXAMPLES | {
    "status": ("what the daemon is doing", ["kvctl status", "kvctl --json status | jq .rss_bytes"]),
    "tiers": ("occupancy and traffic of each tier", ["kvctl tiers"]),
    "tenants": (
        "who stores what; set: a tenant's share of a tier and terms of its new blocks, for good; reset: as the "
        "configuration says; rename: give what is stored under a name that is out of use to a listed tenant; drop: "
        "remove all that is stored of a tenant, and its key",
        [
            "kvctl tenants",
            "kvctl --json tenants | jq '.tenants[].fingerprints'",
            "kvctl tenants set chat --min 4GiB --max 50% --weight 3     # of DRAM; what is above minima goes by weight",
            "kvctl tenants set chat --tier nvme --max default --ttl 3600",
            "kvctl tenants reset chat",
            "kvctl tenants rename uid-1000 alice     # alice lists uid 1000 by now",
            "kvctl tenants rename ml research        # [[tenant]] ml is called research by now",
            "kvctl tenants drop alice --yes          # clients of alice have to connect again",
        ],
    ),
    "blocks": (
        "list stored blocks, or sum them up",
        [
            "kvctl blocks --tier nvme --limit 20",
            "kvctl blocks --tenant uid-1000 --prefix 3fa9",
            "kvctl blocks --model llama --sort uses          # the most used of one model",
            "kvctl blocks --tier host --class cold --sort idle",
            "kvctl blocks --by model                         # how much each model holds",
            "kvctl blocks --by prefix --prefix-blocks 8      # ... each beginning of 8 blocks",
            "kvctl blocks --by tree --tenant uid-1000        # ... each beginning up to where chains part",
        ],
    ),
    "drop": (
        "remove blocks from one tier, or everything",
        [
            "kvctl drop --tier host              # written to NVMe first, nothing is lost",
            "kvctl drop --tier nvme              # only what DRAM has too: nothing is lost",
            "kvctl drop --tier nvme --discard    # also what no other tier has: lost",
            "kvctl drop --all --yes",
            "kvctl drop --pins --tenant chat    # pins alone: the blocks stay, and may be evicted again",
        ],
    ),
    "flush": ("write blocks that are only in DRAM to NVMe", ["kvctl flush --wait 60"]),
    "drain": ("take no new work, wait for clients to leave", ["kvctl drain --wait 120", "kvctl drain --undo"]),
    "config": (
        "the settings in use, and where each comes from",
        [
            "kvctl config",
            "kvctl config nvme host.policy      # a section, a setting",
            "kvctl config --changed             # what is not at its default",
            "kvctl config --toml > new.toml     # a file that says the same",
        ],
    ),
    "reload": (
        "read the configuration file again; what cannot be used changes nothing",
        ["kvctl reload            # the same as SIGHUP and systemctl reload"],
    ),
    "shutdown": ("stop the daemon", ["kvctl shutdown          # drains and flushes first", "kvctl shutdown --now"]),
    "invalidate": ("remove all blocks of a model fingerprint", ["kvctl invalidate 3fa9c0de --tenant uid-1000"]),
    "quarantine": (
        "list slots that failed verification, or release them",
        [
            "kvctl quarantine list",
            "kvctl quarantine release 3:4227072     # SLAB:OFFSET, as the list shows it",
            "kvctl quarantine release --all",
        ],
    ),
    "predictor": (
        "what prefetch by prediction was good for, and its switch",
        [
            "kvctl predictor status",
            "kvctl predictor off     # until the daemon starts again; prefetch.enabled is for good",
            "kvctl --json predictor | jq .all.precision",
            "kvctl predictor train day1.jsonl.gz --out return.npz         # as kvstored predictor; no daemon is asked",
            "kvctl predictor evaluate day2.jsonl.gz --model return.npz    # so too",
        ],
    ),
    "state": STATE_EXAMPLES,
    **KEEP_EXAMPLES,
    **WARM_EXAMPLES,
    **OBJECTS_EXAMPLES,
    "events": (
        "whether KV events are published for routers, and the events as they happen",
        [
            "kvctl events                             # where, and how many so far",
            "kvctl events --follow --tenant uid-1000",
            "kvctl --json events --follow | jq -c '[.type, .medium]'",
        ],
    ),
    "ping": ("time the way that an engine takes", ["kvctl ping --count 100"]),
    "top": (
        "watch the daemon live: occupancy, hits, lanes, latency",
        ["kvctl top                # q quits", "kvctl top --once", "kvctl --json top --once | jq .history.misses"],
    ),
    "report": (
        "write one HTML page with plots of the last minutes and hours, or serve one that keeps itself up to date",
        [
            "kvctl report -o kvstored.html",
            "kvctl report --serve               # prints an address for this user's browser; Ctrl-C ends it",
            "kvctl report --serve --port 8081   # from elsewhere: ssh -L 8081:127.0.0.1:8081 NODE",
        ],
    ),
    "doctor": (
        "check sockets, limits, memory, disk and versions, and say how to repair what is wrong",
        [
            "kvctl doctor",
            "kvctl doctor --state-dir /var/lib/kvstored    # also where the socket files are gone",
            "kvctl doctor --config /etc/kvstored/kvstored.toml --no-disk-test",
            "kvctl --json doctor",
        ],
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse kvctl's command line. On wrong usage, exit with status 2 and a one-line error and, with --json, also a
    document on standard output.
    """
    parser = build_parser()

    def check(arguments: argparse.Namespace) -> None:
        _check_text(parser, arguments)
        if arguments.command in _CHECKS:
            _CHECKS[arguments.command](parser, arguments)
        check_data_arguments(parser, arguments)

    return command_line.parse(parser, argv, check)


def words_for_kvstored(argv: Sequence[str]) -> list[str]:
    """Return the arguments with which to run kvstored if the command line `argv` concerns recordings, otherwise []. Of
    kvctl's options before the action only --json is passed on, because kvstored has no use for the others.
    """
    if not any(action in argv for action in OF_RECORDINGS):  # nearly always: no parser is made for nothing
        return []
    parser = Parser(add_help=False)
    _common_options(parser, first=True)
    parser.add_argument("command", choices=["predictor"])
    parser.add_argument("action", choices=OF_RECORDINGS)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    try:
        found = parser.parse_args(argv)
    except WrongUsage:
        return []
    return [found.command, found.action, *(["--json"] if found.json else []), *found.words]


def build_parser() -> Parser:
    parser = Parser(
        prog="kvctl", description="Look at and steer a live kvstored over its admin socket.", epilog=_epilog()
    )
    _common_options(parser, first=True)
    parser.add_argument("--version", action="version", version=f"kvctl {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {name: _command(commands, name) for name in _EXAMPLES}
    add_data_options(made)
    _tenants_options(made["tenants"])
    add_block_options(made["blocks"])
    _drop_options(made["drop"])
    for name in ("drop", "flush", "drain", "tenants"):
        made[name].add_argument(
            "--wait",
            type=seconds,
            default=DEFAULT_WAIT_S,
            metavar="S",
            help="time for the work itself (default: %(default)g s)",
        )
    made["drain"].add_argument("--undo", action="store_true", help="take clients again")
    made["config"].add_argument("names", nargs="*", metavar="NAME", help="only these: SECTION or SECTION.KEY")
    made["config"].add_argument("--changed", action="store_true", help="only settings that are not at their defaults")
    made["config"].add_argument("--toml", action="store_true", help="as a configuration file")
    made["shutdown"].add_argument("--now", action="store_true", help="do not drain first")
    made["invalidate"].add_argument("fingerprint", help="hex digest, or its first 8 digits or more")
    made["invalidate"].add_argument("--tenant", default="", help="only this tenant's blocks")
    _quarantine_options(made["quarantine"])
    made["predictor"].add_argument(
        "action", nargs="?", choices=ACTIONS, default="status", help="what to do (default: %(default)s)"
    )
    add_state_options(made["state"])
    add_keep_options(made)
    add_warm_options(made["warm"])
    add_objects_options(made["objects"])
    _events_options(made["events"])
    _top_options(made["top"])
    _doctor_options(made["doctor"])
    _report_options(made["report"])
    made["ping"].add_argument(
        "--count", type=positive_count, default=10, metavar="N", help="messages (default: %(default)s)"
    )
    return parser


def _command(commands: Commands, name: str) -> argparse.ArgumentParser:
    summary, examples = _EXAMPLES[name]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
    )
    _common_options(parser, first=False)
    return parser


def _common_options(parser: argparse.ArgumentParser, *, first: bool) -> None:
    """Add the options that are accepted before and after the command. An option after the command that is absent keeps
    the value given before.
    """
    parser.add_argument(
        "--socket-dir",
        metavar="DIR",
        default=None if first else argparse.SUPPRESS,
        help=f"the daemon's socket directory (default: ${ENVIRONMENT_VARIABLE}, else {DEFAULT_DIRECTORY})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=False if first else argparse.SUPPRESS,
        help="one JSON document on standard output",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        default=DEFAULT_TIMEOUT_S if first else argparse.SUPPRESS,
        help=f"wait this long for an answer (default: {DEFAULT_TIMEOUT_S:g} s)",
    )


def _tenants_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["list", "set", "reset", "rename", "drop"], default="list",
        help="default: %(default)s",
    )  # fmt: skip
    names = "set, reset, drop: of whom; rename: OLD NEW"
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=names)
    parser.add_argument("--yes", action="store_true", help="drop: I mean it")
    parser.add_argument("--tier", default="host", metavar="TIER", help="set: of which tier (default: %(default)s)")
    parser.add_argument("--min", metavar="SIZE", help="set: bytes, or a share like 10%%, that others cannot take")
    parser.add_argument("--max", metavar="SIZE", help="set: the most that it may have; 0 is no limit")
    parser.add_argument("--weight", metavar="N", help="set: its part of what is above the minima; 0 is none")
    parser.add_argument("--ttl", metavar="S", help="set: seconds that new blocks live; 0 is for ever")
    parser.add_argument("--priority", metavar="N", help="set: of new blocks, -8 to 7. `default` unsets any of these")
    parser.add_argument(
        "--replace", action="store_true", help="rename: drop what NEW has stored of its own; else it is refused"
    )


def _check_tenants(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.action == "rename" and len(arguments.names) != 2:
        parser.error("tenants rename: give two names, the former one and the new one")
    if arguments.action == "drop" and (len(arguments.names) != 1 or not arguments.yes):
        parser.error("tenants drop: give one name, and --yes: nothing of that tenant can be read afterwards")
    if arguments.action == "list" and (arguments.names or arguments.replace):
        parser.error("tenants list shows all of them and takes nothing further")
    settings = [getattr(arguments, name) for name in ("min", "max", "weight", "ttl", "priority")]
    if arguments.action in ("set", "reset") and len(arguments.names) != 1:
        parser.error(f"tenants {arguments.action}: give one name of a tenant")
    if (arguments.action == "set") != any(value is not None for value in settings):
        parser.error("tenants: --min, --max, --weight, --ttl and --priority go with set, which takes one or more")


def _drop_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=TIERS, default="", help="the tier to drop from")
    parser.add_argument("--tenant", default="", help="only this tenant's blocks")
    parser.add_argument("--all", action="store_true", help="all blocks of all tiers; needs --yes")
    parser.add_argument("--discard", action="store_true", help="also blocks that no other tier has: they are lost")
    parser.add_argument("--yes", action="store_true", help="I mean it")
    parser.add_argument("--pins", action="store_true", help="end pins of --tenant instead; no block is removed")
    parser.add_argument("--owner", default="", help="with --pins: only pins of this owner (see: kvctl blocks)")


def _quarantine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "release"], help="what to do")
    parser.add_argument(
        "places", nargs="*", default=[], metavar="SLAB:OFFSET", help="release: which; the list shows them"
    )
    parser.add_argument("--all", action="store_true", help="release: every slot in quarantine")


def _check_quarantine(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.action == "list" and (arguments.places or arguments.all):
        parser.error("quarantine list shows all of it and takes nothing further")
    if arguments.action == "release" and arguments.all == bool(arguments.places):
        parser.error("quarantine release: give either places, as `kvctl quarantine list` shows them, or --all")


def _events_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="print each event as it happens, until interrupted")
    parser.add_argument("--tenant", default="", help="follow: only events of this tenant's topics")
    parser.add_argument("--count", type=positive_count, metavar="N", help="follow: end after N events")


def _check_events(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if (arguments.tenant or arguments.count) and not arguments.follow:
        parser.error("events: --tenant and --count belong to --follow")


def _top_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="one frame, as plain text, and end")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="time between frames (default: %(default)g s)"
    )


def _report_options(parser: argparse.ArgumentParser) -> None:
    where = "where to; - is standard output (default: kvstored-report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", help=where)
    parser.add_argument("--serve", action="store_true", help="serve a live page on 127.0.0.1 until interrupted")
    parser.add_argument(
        "--port", type=whole_number(0, 65535), metavar="N", help="with --serve: the port (default: any free one)"
    )


def _check_report(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.serve and (arguments.output or arguments.json):
        parser.error("report: --serve writes no file and no JSON: leave -o and --json out")
    if arguments.port is not None and not arguments.serve:
        parser.error("report: --port belongs to --serve")
    arguments.output, arguments.port = arguments.output or "kvstored-report.html", arguments.port or 0


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the daemon's configuration, for when it does not answer")
    parser.add_argument("--state-dir", metavar="DIR", help="its state directory, for when it does not answer")
    parser.add_argument("--no-disk-test", action="store_true", help="do not write and read a temporary file")


def _check_text(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse words for the daemon that are not UTF-8; a path may be any bytes."""
    words = [getattr(arguments, "tenant", ""), *getattr(arguments, "keys", []), *getattr(arguments, "places", [])]
    words += getattr(arguments, "names", [])
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            parser.error(f"{arguments.command}: {word!r} is not valid UTF-8")


def _check_drop(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.pins:
        if not arguments.tenant or arguments.tier or arguments.all or arguments.discard:
            parser.error("drop --pins takes --tenant TENANT, perhaps --owner OWNER, and nothing else")
        return
    if arguments.owner:
        parser.error("drop: --owner belongs to --pins")
    if arguments.all == bool(arguments.tier):
        parser.error("drop: give either --tier TIER or --all")
    if arguments.all and not arguments.yes:
        parser.error("drop --all removes every stored block for good; add --yes if you mean it")


def _epilog() -> str:
    codes = "\n".join(f"  {code}  {meaning}" for code, meaning in MEANINGS.items())
    return (
        f"exit codes:\n{codes}\n\nexamples:\n  kvctl status\n  kvctl --json tiers\n"
        "  kvctl --socket-dir /tmp/kv blocks --tier nvme\n\n`kvctl COMMAND --help` says more about a command."
    )


_CHECKS: Final[Mapping[str, Callable[[argparse.ArgumentParser, argparse.Namespace], None]]] = {
    "blocks": check_block_arguments, "drop": _check_drop, "events": _check_events, "quarantine": _check_quarantine,
    "report": _check_report, "state": check_state, "tenants": _check_tenants,
    **dict.fromkeys(KEEP_EXAMPLES, check_keep), "warm": check_warm, "objects": check_objects,
}  # fmt: skip
