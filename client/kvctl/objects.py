"""kvctl objects puts, lists, writes out, keeps, verifies, prefetches and removes objects of the caller's tenant."""

from __future__ import annotations

import argparse
import json
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from kvctl.connection import open_session
from kvctl.get import whole_file
from kvctl.keep import ttl_seconds
from kvctl.output import FAILED, MISS, USAGE, CommandError, Output
from kvctl.put import read_bytes
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.objects.sources import BytesSource, Source, weights_source
from kvstore_client.objects.store import STAGING_BYTES, ObjectStore, label
from kvstore_client.objects.tables import array_source
from kvstore_console.command_line import seconds
from kvstore_console.progress import Progress
from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_count, human_seconds, plural
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1.kvstore_pb2 import ObjectVersion

PART_S: Final = 60.0  # for one part; a whole object may take as many of them as it has parts
_COLUMNS = ("OBJECT", "KIND", ">SIZE", ">PARTS", ">AGE", ">EXPIRES IN", "PINNED", "DIGEST")
_DIGEST_DIGITS = 12
OBJECTS_EXAMPLES: Final = {
    "objects": (
        "put, list and keep objects: weights, tables and other bytes that processes of a tenant map together",
        [
            "kvctl objects put --weights models/llama llama --pin   # a directory or file: safetensors, GGUF",
            "kvctl objects put --table rows.npy users --ttl 86400   # a NumPy array, for lookups",
            "kvctl objects put --file tokenizer.json tokenizer      # any bytes; - is standard input",
            "kvctl objects list                                     # all; NAME: its versions, and where the parts are",
            "kvctl objects get llama@2 -o llama.safetensors         # of tensors; other bytes as they were put",
            "kvctl objects pin llama; kvctl objects unpin llama",
            "kvctl objects ttl users 3600",
            "kvctl objects verify llama                             # read every part, and compare digests",
            "kvctl objects prefetch llama --wait 30                 # bring it to DRAM before it is asked for",
            "kvctl objects rm llama@1",
            "kvctl --json objects list | jq '.objects[].digest'",
        ],
    )
}
_FROM: Final = ("weights", "table", "file")


def add_objects_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(_ACTIONS), help="what to do")
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="the object, or NAME@VERSION")
    parser.add_argument("seconds", nargs="?", metavar="S", help="ttl: seconds from now; 0 is for ever")
    put = parser.add_mutually_exclusive_group()
    put.add_argument("--weights", metavar="PATH", help="put: a file of weights, or the directory of a model")
    put.add_argument("--table", metavar="FILE", help="put: a NumPy array, as np.save wrote it")
    put.add_argument("--file", metavar="FILE", help="put: any bytes")
    parser.add_argument("--pin", action="store_true", help="put: no part is evicted until it is unpinned")
    parser.add_argument("--ttl", type=ttl_seconds, metavar="S", help="put: it expires after S seconds; 0 is never")
    parser.add_argument(
        "--durability", choices=("default", "none", "batch", "always"), default="always",
        help="put: none: DRAM only; always: on NVMe before the command ends (default: always)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="get: where to (default: standard output)")
    parser.add_argument("--tensor", default="", metavar="TENSOR", help="get: the bytes of this tensor alone")
    parser.add_argument("--wait", type=seconds, default=0.0, metavar="S", help="prefetch: wait until it is there")


def check_objects(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    action, sources = arguments.action, [name for name in _FROM if getattr(arguments, name) is not None]
    if (action == "put") != bool(sources) or (action == "put" and arguments.seconds is not None):
        parser.error("objects: put, and it alone, takes a name and --weights PATH, --table FILE or --file FILE")
    if action != "list" and not arguments.name:
        parser.error(f"objects {action}: name the object")
    if (action == "ttl") != (arguments.seconds is not None):
        parser.error("objects: ttl takes a name and seconds, every other action a name alone")
    try:
        arguments.seconds = None if action != "ttl" else ttl_seconds(arguments.seconds)
    except argparse.ArgumentTypeError as error:
        parser.error(f"objects ttl: S {error}")
    if (arguments.pin or arguments.ttl is not None) and action != "put":
        parser.error("objects: --pin and --ttl go with put; later: objects pin NAME, objects ttl NAME S")


def objects(directory: Path, arguments: argparse.Namespace) -> Output:
    """Do what `arguments` ask of an object. Raises CommandError."""
    staging_bytes = STAGING_BYTES if arguments.action == "put" else 0
    with (
        Progress("kvctl objects") as progress,
        open_session(directory, OBJECTS, arguments.timeout, staging_bytes=staging_bytes) as session,
        _errors(),
    ):
        store = ObjectStore(session, deadline_s=max(arguments.timeout, PART_S))
        output: Output = _ACTIONS[arguments.action](store, arguments, progress)
        return output


@contextmanager
def _errors() -> Iterator[None]:
    """Give what the store's objects raise the exit codes of kvctl."""
    try:
        yield
    except DaemonUnavailable:
        raise
    except KVStoreError as error:
        code = {ErrorKind.NOT_FOUND: MISS, ErrorKind.UNAVAILABLE: MISS, ErrorKind.INVALID: USAGE}
        raise CommandError(code.get(error.kind, FAILED), error.message) from None


def _facts(entry: ObjectVersion) -> dict[str, Any]:
    return {
        "name": entry.name, "version": entry.version, "digest": entry.digest.hex(), "kind": entry.kind,
        "bytes": entry.nbytes, "parts": entry.parts, "created_s": entry.created_s, "expires_s": entry.expires_s,
        "pinned": entry.pinned,
    }  # fmt: skip


def _said(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.say(f"{human_bytes(done)} of {human_bytes(total)}")


def _put(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    began = time.monotonic()
    try:
        with _source(arguments) as source:
            put = store.put(
                arguments.name, source, pin=arguments.pin, ttl=arguments.ttl, durability=arguments.durability,
                progress=_said(progress),
            )  # fmt: skip
    except OSError as error:
        raise CommandError(USAGE, f"cannot read {error.filename or 'the source'}: {error.strerror or error}") from None
    taken_s, entry, filled = time.monotonic() - began, put.version, put.filled
    durable = "durable" if filled.durable_parts == len(filled.parts) else f"{filled.durable_parts} durable"
    if durable != "durable" and arguments.durability == "always":
        durable += " (the others are in DRAM alone: NVMe is full, too small or shed)"
    text = (
        f"{label(entry)}: {human_bytes(entry.nbytes)} in {plural(len(filled.parts), 'part')}, {durable}; "
        f"{human_bytes(filled.new_bytes)} were new; {human_seconds(taken_s)}"
    )
    facts = {"new_bytes": filled.new_bytes, "durable_parts": filled.durable_parts, "seconds": taken_s}
    return Output(text, _facts(entry) | facts)


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[Source]:
    if arguments.weights is not None:
        with weights_source(Path(arguments.weights)) as source:
            yield source
    elif arguments.table is not None:
        try:
            array = np.load(arguments.table, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):
            array = None
        if not isinstance(array, np.ndarray):
            raise CommandError(USAGE, f"{arguments.table} is no array, or not a whole one, that np.save wrote")
        yield array_source(array)
    else:
        yield BytesSource(read_bytes(arguments.file))


def _list(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    catalogue = store.catalogue(arguments.name)
    found = catalogue.objects
    if arguments.name and not found:
        raise CommandError(MISS, f"{arguments.name}: no object of this name is listed")
    now_s = time.time()
    rows = [
        [
            label(each), each.kind, human_bytes(each.nbytes), human_count(each.parts),
            human_seconds(max(now_s - each.created_s, 0)),
            human_seconds(each.expires_s - now_s) if each.expires_s else "-",
            "yes" if each.pinned else "-", each.digest.hex()[:_DIGEST_DIGITS],
        ]
        for each in found
    ]  # fmt: skip
    reply: dict[str, Any] = {"objects": [_facts(each) for each in found], "limbo_bytes": catalogue.limbo_bytes}
    text = render_table(_COLUMNS, rows, empty="no object is listed")
    if catalogue.limbo_bytes:
        text += f"\n{human_bytes(catalogue.limbo_bytes)} more of DRAM: removed, but mapped or read until now"
    if arguments.name:
        keys, where = store.located(found[-1])
        tiers = Counter(tier if tier != "absent" else "nowhere" for tier in where.tiers)
        text += "\nparts of the newest: " + ", ".join(
            f"{human_count(count)} in {tier}" for tier, count in tiers.items()
        )
        reply["parts"] = [{"key": key.hex(), "tier": tier} for key, tier in zip(keys, where.tiers, strict=False)]
    return Output(text, reply)


def _get(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    if arguments.json and arguments.output == "-":
        raise CommandError(USAGE, "objects get --json says on standard output what it did: name a file by -o")
    with store.map(arguments.name) as mapped, whole_file(arguments.output) as file:
        if arguments.tensor:
            if arguments.tensor not in mapped:
                raise CommandError(MISS, f"{label(mapped.version)} has no tensor {arguments.tensor}")
            pieces = iter([mapped.raw(arguments.tensor)])
        elif mapped.manifest.tensors:
            pieces = iter([_safetensors_header(mapped), *(mapped.raw(name) for name in mapped)])
        else:
            pieces = iter([mapped.content])
        nbytes = _write(file, pieces)
        if not mapped.valid:
            raise CommandError(FAILED, "the daemon ended the lease while its bytes were read; try again")
        facts = _facts(mapped.version) | {"written_bytes": nbytes, "file": arguments.output}
        text = f"{label(mapped.version)}: wrote {human_bytes(nbytes)}"
    return Output(text, facts, aside=arguments.output == "-")


def _safetensors_header(mapped: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    header: dict[str, Any] = {"__metadata__": dict(mapped.manifest.metadata)}
    at = 0
    for each in mapped.manifest.tensors:
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _write(file: IO[bytes], pieces: Iterator[Any]) -> int:
    return sum(file.write(piece.data) for piece in pieces)


def _keep(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    if arguments.action == "pin":
        entry, done = store.pin(arguments.name), "no part is evicted"
    elif arguments.action == "unpin":
        entry, done = store.unpin(arguments.name), "may be evicted"
    else:
        entry = store.expire(arguments.name, arguments.seconds)
        done = f"expires in {human_seconds(arguments.seconds)}" if arguments.seconds else "never expires"
    return Output(f"{label(entry)}: {done}", _facts(entry))


def _rm(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    removed = store.take_away(arguments.name)
    text = f"removed {', '.join(map(label, removed.versions))}; parts that other objects have are kept"
    if removed.mapped_parts:
        text += f"; still mapped, and in DRAM until released: {plural(removed.mapped_parts, 'part')}"
    facts = {"removed": [_facts(each) for each in removed.versions], "mapped_parts": removed.mapped_parts}
    return Output(text, facts)


def _verify(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    entry = store.find(arguments.name)
    wrong = store.verify(label(entry), _said(progress))
    text = f"{label(entry)}: {plural(entry.parts - len(wrong), 'part')} of {entry.parts} as they were put"
    text += "".join(f"\npart {number}: {why}" for number, why in wrong.items())
    reply = _facts(entry) | {"wrong": {str(number): why for number, why in wrong.items()}}
    return Output(text, reply, FAILED if wrong else 0)


def _prefetch(store: ObjectStore, arguments: argparse.Namespace, progress: Progress) -> Output:
    found = store.prefetch(arguments.name, wait_s=arguments.wait)
    there = found.tiers.count("host")
    text = f"{arguments.name}: {human_count(there)} of {plural(len(found.tiers), 'part')} in DRAM"
    reply = {"parts": len(found.tiers), "host_parts": there, "stored_parts": found.blocks}
    return Output(text, reply, FAILED if arguments.wait and there < len(found.tiers) else 0)


_ACTIONS: Final[dict[str, Callable[[ObjectStore, argparse.Namespace, Progress], Output]]] = {
    "put": _put, "get": _get, "list": _list, "pin": _keep, "unpin": _keep, "ttl": _keep, "rm": _rm, "verify": _verify,
    "prefetch": _prefetch,
}  # fmt: skip
