"""The target of a data command: a named object, or the blocks of a token prefix under a fingerprint.

The module reads token lists and fingerprints from the command line. Raises CommandError, which says what is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvctl.connection import explain_source
from kvctl.output import FAILED, USAGE, CommandError
from kvstore_client.arguments import shown
from kvstore_proto.fingerprint import MAX_FINGERPRINT_BYTES, Fingerprint, FingerprintError, parse_fingerprint
from kvstore_proto.objects import MAX_NAME_BYTES, OBJECTS
from kvstore_proto.v1.explain_pb2 import ExplainRequest

MAX_TOKEN: Final = (1 << 31) - 1
MAX_TOKENS: Final = 16_000_000
MAX_TOKENS_FILE_BYTES: Final = 256 << 20
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{8,64}")
_TOKEN: Final = re.compile(r"-?[0-9]{1,10}")
_RUN: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Target:
    """The blocks that a command is about: a named object or a token prefix. For a token prefix `name` is None. For a
    named object `tokens` is empty, and its length is only known from the head of the object.
    """

    label: str
    fingerprint: Fingerprint
    group: int
    name: str | None = None
    tokens: npt.NDArray[np.int32] | None = None

    @property
    def blocks(self) -> int:
        """The number of full blocks of the token prefix."""
        return 0 if self.tokens is None else len(self.tokens) // self.fingerprint.block_tokens


def find_target(directory: Path, arguments: argparse.Namespace) -> Target:
    """Return the object or token prefix that the command-line options name. If they give the fingerprint by its digest,
    ask the daemon, whose sockets are in `directory`, for the whole fingerprint.
    """
    if arguments.name is not None:
        if not arguments.name or len(arguments.name.encode(errors="surrogateescape")) > MAX_NAME_BYTES:
            raise CommandError(USAGE, f"a name has 1 to {MAX_NAME_BYTES} bytes")
        try:
            arguments.name.encode()
        except UnicodeEncodeError:
            raise CommandError(USAGE, "a name must be valid UTF-8") from None
        return Target(arguments.name, OBJECTS, 0, name=arguments.name)
    tokens = read_tokens(arguments)
    fingerprint = read_fingerprint(directory, arguments)
    group = fingerprint.groups[0] if arguments.group is None else fingerprint.group(arguments.group)
    if group is None:
        known = ", ".join(str(item.group_id) for item in fingerprint.groups)
        raise CommandError(USAGE, f"the fingerprint has no layer group {arguments.group}; it has: {known}")
    if len(tokens) < fingerprint.block_tokens:
        raise CommandError(
            USAGE,
            f"the prompt has {len(tokens)} tokens, shorter than one block of {fingerprint.block_tokens} under this "
            "fingerprint: nothing of it is stored",
        )
    label = f"{len(tokens)} tokens of {fingerprint.model_name}"
    return Target(label, fingerprint, group.group_id, tokens=tokens)


def read_tokens(arguments: argparse.Namespace) -> npt.NDArray[np.int32]:
    """Return the token ids of --tokens or --tokens-file. Both take numbers and ranges such as 0-63, separated by commas
    or white space.
    """
    if arguments.tokens is not None:
        return parse_tokens(arguments.tokens, "--tokens")
    path = arguments.tokens_file
    try:
        if path == "-":
            text = sys.stdin.read(MAX_TOKENS_FILE_BYTES + 1)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(MAX_TOKENS_FILE_BYTES + 1)
    except OSError as error:
        raise CommandError(USAGE, f"--tokens-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(USAGE, f"--tokens-file {path} is not text: write token ids as numbers") from None
    if len(text) > MAX_TOKENS_FILE_BYTES:
        raise CommandError(USAGE, f"--tokens-file {path} is over {MAX_TOKENS_FILE_BYTES >> 20} MiB")
    return parse_tokens(text.strip().removeprefix("[").removesuffix("]"), f"--tokens-file {path}")


def parse_tokens(text: str, where: str) -> npt.NDArray[np.int32]:
    """Return the token ids in `text`. Raises CommandError(USAGE), which names the first word that is no token id;
    `where` says what the text is from.
    """
    tokens: list[int] = []
    for word in text.replace(",", " ").split():
        run = _RUN.fullmatch(word)
        first, last = (int(run[1]), int(run[2])) if run else (_token(word, where),) * 2
        if last > MAX_TOKEN or last < first:
            raise CommandError(USAGE, f"{where}: {word!r} is no token id or run of them (0 to {MAX_TOKEN})")
        if len(tokens) + last - first >= MAX_TOKENS:
            raise CommandError(USAGE, f"{where}: more than {MAX_TOKENS} tokens")
        tokens.extend(range(first, last + 1))
    return np.array(tokens, dtype=np.int32)


def _token(word: str, where: str) -> int:
    token = int(word) if _TOKEN.fullmatch(word) else MAX_TOKEN + 1
    if not -MAX_TOKEN - 1 <= token <= MAX_TOKEN:
        raise CommandError(USAGE, f"{where}: {shown(word)} is no token id: 32-bit whole numbers, like 1,2,3 or 0-63")
    return token


def fingerprint_digits(given: str) -> str:
    """Return the hexadecimal digits in `given`, the value of a fingerprint option: DIGEST alone, or MODEL:DIGEST [for
    ACCOUNT] as listings show it.
    """
    digits = given.rpartition(":")[2].partition(" ")[0]
    if not _DIGEST.fullmatch(digits):
        raise CommandError(
            USAGE, f"--fingerprint {given}: neither a file nor a hex digest of 8 to 64 digits (`kvctl --json tenants`)"
        )
    return digits


def read_fingerprint(directory: Path, arguments: argparse.Namespace) -> Fingerprint:
    """Return the fingerprint that the options name, from a file with its canonical JSON or, for a digest, from the
    daemon's list of fingerprints.
    """
    given = arguments.fingerprint
    path = Path(given)
    if path.is_file():
        try:
            with open(path, "rb") as file:
                return parse_fingerprint(file.read(MAX_FINGERPRINT_BYTES + 1).strip())
        except OSError as error:
            raise CommandError(USAGE, f"--fingerprint {given}: {error.strerror}") from None
        except FingerprintError as error:
            raise CommandError(USAGE, f"--fingerprint {given}: {error}") from None
    given = fingerprint_digits(given)
    with explain_source(directory, arguments.timeout) as ask:
        reply = ask(ExplainRequest(fingerprint=given))
    if not reply.fingerprints or not reply.fingerprints[0].canonical:
        raise CommandError(FAILED, f"the daemon knows no fingerprint that begins with {given}; give its file instead")
    return parse_fingerprint(reply.fingerprints[0].canonical.encode())
