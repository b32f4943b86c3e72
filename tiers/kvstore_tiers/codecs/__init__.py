"""Codecs: other forms of a payload, smaller where bytes are scarce or slow. The contract, and the list of them.

A codec has a file of this package and an entry in `CODECS`. Its number is in the header and the record of each block
that it made, so a number is never given to another codec, nor to another form of the same one. A codec never sees
slots, headers on the medium or checksums: `images.py` writes and verifies those, so what a codec gives back is served
only if it is the payload that was put.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import ClassVar, NamedTuple

from kvstore_proto.arena import BlockHeader

NONE = "none"
TESTING_ENVIRONMENT = "KVSTORED_TESTING_CODECS"  # set: there is a codec more, which proves the seam and saves little


class Undecodable(ValueError):
    """The stored bytes are none that the codec makes. The message says in what way."""


class Codec(ABC):
    """One form of payloads. Both calls are made from several threads at once, and release the GIL for long work."""

    name: ClassVar[str]
    number: ClassVar[int]  # 1 to 255; 255 is kept for tests

    @abstractmethod
    def bound(self, payload_bytes: int) -> int:
        """Return the most bytes that `encode` writes for a payload of that size; asked before there is memory."""

    @abstractmethod
    def encode(self, header: BlockHeader, payload: memoryview, target: memoryview) -> int:
        """Write the other form of `payload` to the front of `target`, which has `bound` bytes; return its length.
        `header` says whose the payload is, and the fingerprint that its shape follows from. A length that is no less
        than the payload's has the payload stored as it is."""

    @abstractmethod
    def decode(self, header: BlockHeader, stored: memoryview, payload: memoryview) -> None:
        """Fill `payload`, `header.payload_bytes` long, from `stored`; take no more memory than that follows from its
        length. Raises Undecodable for bytes that `encode` does not make."""


class Entry(NamedTuple):
    """One codec: loaded by name, when a tier is opened that has it or a block is read that it made."""

    number: int
    module: str
    kind: str


CODECS: dict[str, Entry] = {}
MADE_UP, _OF_TESTS = "made-up", Entry(255, "kvstore_tiers.testing.made_up_codec", "MadeUpCodec")


def codec_names() -> tuple[str, ...]:
    """Return the names that a setting may have."""
    return (NONE, *_known())


def codec_named(name: str) -> Codec | None:
    """Return the codec of a setting; None for "none". Raises KeyError for a name that is not in `codec_names`."""
    return None if name == NONE else _load(_known()[name])


def codec_numbered(number: int) -> Codec | None:
    """Return the codec that a header names; None where this build does not have it."""
    return next((_load(entry) for entry in _known().values() if entry.number == number), None)


def codec_name(number: int) -> str:
    """Return what to call the codec that a header names, 0 for none, also one that this build does not have."""
    known = {entry.number: name for name, entry in _known().items()}
    return known.get(number, f"codec {number}") if number else NONE


def _known() -> dict[str, Entry]:
    return CODECS | {MADE_UP: _OF_TESTS} if os.environ.get(TESTING_ENVIRONMENT) else CODECS


@cache
def _load(entry: Entry) -> Codec:
    codec: Codec = getattr(import_module(entry.module), entry.kind)()
    return codec
