"""Codecs give payloads another form, smaller where bytes are scarce or slow. The module has the contract and the list
of codecs.

A codec has a file in this package and an entry in `CODECS`. Its number is in the header and in the record of each block
that it encoded, so a number is never given to another codec, nor to another form of the same codec. A codec never sees
slots, headers on the medium or checksums: `images.py` writes and verifies them, so decoded bytes are served only if
they are the payload that was put.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:  # the configuration reads the names of codecs before numpy is loaded
    from kvstore_proto.arena import BlockHeader

NONE = "none"
TESTING_ENVIRONMENT = "KVSTORED_TESTING_CODECS"  # set: there is a codec more, which proves the seam and saves little


class Undecodable(ValueError):
    """Raised for stored bytes that the codec cannot have written. The message says what is wrong with them."""


class Encoded(NamedTuple):
    """The length of an encoded form, and how far the numbers that `decode` gives back may be from the payload's: 0 of
    a codec that is not lossy."""

    nbytes: int
    error: float = 0.0


class Codec(ABC):
    """One form of payloads. Both `encode` and `decode` are called from several threads at once, and release the GIL for
    long work."""

    name: ClassVar[str]
    number: ClassVar[int]  # 1 to 255; 254 and 255 are kept for tests
    is_lossy: ClassVar[bool] = False  # what `decode` gives back may differ from the payload

    @abstractmethod
    def bound(self, payload_bytes: int) -> int:
        """Return the most bytes that `encode` writes for a payload of `payload_bytes` bytes. The call comes before
        memory is allocated."""

    @abstractmethod
    def encode(self, header: BlockHeader, payload: memoryview, target: memoryview) -> Encoded:
        """Write the encoded form of `payload` to the front of `target`, which has `bound` bytes. `header` names the
        owner of the payload, and the fingerprint from which its shape follows. When the length is not less than the
        payload's, the payload is stored as it is."""

    @abstractmethod
    def decode(self, header: BlockHeader, stored: memoryview, payload: memoryview) -> None:
        """Fill `payload`, which has `header.payload_bytes` bytes, from `stored`. Memory use must follow from the length
        of `payload` alone. Raises Undecodable for bytes that `encode` does not write."""


class Entry(NamedTuple):
    """One codec of the list. It is loaded by name when a tier that uses it is opened, or by number when a block that it
    encoded is read."""

    number: int
    module: str
    kind: str


CODECS: dict[str, Entry] = {}
MADE_UP, ROUNDING = "made-up", "rounding"
_OF_TESTS = {
    MADE_UP: Entry(255, "kvstore_tiers.testing.made_up_codec", "MadeUpCodec"),
    ROUNDING: Entry(254, "kvstore_tiers.testing.rounding_codec", "RoundingCodec"),
}


def codec_names() -> tuple[str, ...]:
    """Return the names that a setting may have."""
    return (NONE, *_known())


def codec_named(name: str) -> Codec | None:
    """Return the codec with the name in a setting; None for "none". Raises KeyError for a name that is not in
    `codec_names`."""
    return None if name == NONE else _load(_known()[name])


def codec_numbered(number: int) -> Codec | None:
    """Return the codec with the number in a header; None when this build does not have it."""
    return next((_load(entry) for entry in _known().values() if entry.number == number), None)


def codec_name(number: int) -> str:
    """Return a name for the codec number in a header, for people: "none" for 0, "codec 9" for a 9 that this build does
    not have."""
    known = {entry.number: name for name, entry in _known().items()}
    return known.get(number, f"codec {number}") if number else NONE


def _known() -> dict[str, Entry]:
    return CODECS | _OF_TESTS if os.environ.get(TESTING_ENVIRONMENT) else CODECS


@cache
def _load(entry: Entry) -> Codec:
    codec: Codec = getattr(import_module(entry.module), entry.kind)()
    return codec
