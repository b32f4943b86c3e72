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
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the configuration reads the names of codecs before numpy is loaded
    from kvstore_proto.arena import BlockHeader
    from kvstore_tiers.codecs.shapes import PayloadShape

NONE, AUTO = "none", "auto"
_SEALED = 0x100  # kvstore_proto.arena.SEALED, without numpy
TESTING_ENVIRONMENT = "KVSTORED_TESTING_CODECS"  # set: there is a codec more, which proves the seam and saves little


class Undecodable(ValueError):
    """Raised for stored bytes that the codec cannot have written. The message says what is wrong with them."""


class NotReadable(Exception):
    """Raised for stored bytes that may be sound, but that this build cannot decode: of a newer version, or of a library
    that is not installed. The message says what is missing."""


class CodingError(NamedTuple):
    """The error of a lossy codec in one block: `relative_rms` is the RMS of the differences divided by the RMS of the
    numbers, `max_abs` the largest difference."""

    relative_rms: float
    max_abs: float


class Encoded(NamedTuple):
    """The result of encoding a payload: the length in bytes of the form, and the error of a lossy one. 0 bytes say that
    the payload is stored as it is."""

    nbytes: int
    error: CodingError | None = None


AS_IT_IS = Encoded(0)
ShapeOf = Callable[[bytes, int, int], "PayloadShape | None"]  # of a fingerprint's digest, a group, the payload's bytes


class Codec(ABC):
    """One form of payloads. Its methods are called from several threads at once, and release the GIL for long work.

    What it writes describes itself: its version, and what else decoding needs. `is_lossy` codecs give back a payload
    that differs, within the error that `encode` reported; they give back the same payload each time.
    """

    name: str
    number: int  # 1 to 255; 254 and 255 are kept for tests
    is_lossy: bool = False
    most_error: float = 1.0  # a block with a larger relative RMS of the error is stored exact

    def lacks(self) -> str:
        """Return what must be installed before a tier can have this codec, in one line; "" if nothing is missing."""
        return ""

    @abstractmethod
    def bound(self, payload_bytes: int) -> int:
        """Return the most bytes that `encode` writes for a payload of `payload_bytes` bytes. The call comes before
        memory is allocated."""

    @abstractmethod
    def encode(
        self, header: BlockHeader, shape: PayloadShape | None, payload: memoryview, target: memoryview
    ) -> Encoded:
        """Write the encoded form of `payload` to the front of `target`, which has `bound` bytes. `header` names the
        owner of the payload; `shape` says what tensors it has, None if that is not known. When the length is not less
        than the payload's, the payload is stored as it is."""

    @abstractmethod
    def decode(self, stored: memoryview, payload: memoryview) -> None:
        """Fill `payload` from `stored`, which is all that it needs. Memory use must follow from the length of `payload`
        alone. Raises Undecodable for bytes that `encode` does not write, and for a form of another length; NotReadable
        for a form that another build may read."""

    def decode_and_hash(self, stored: memoryview, payload: memoryview) -> int:
        """Do what `decode` does, and return the xxh3_64 of the bytes that `payload` got."""
        from kvstore_proto.arena import payload_checksum

        self.decode(stored, payload)
        return payload_checksum(payload)

    def layers(self, stored: memoryview) -> int:
        """Return into how many layers of one size `stored` can be decoded alone; 1 for a form without layers. Raises as
        `decode` does."""
        return 1

    def decode_layer(self, stored: memoryview, layer: int, target: memoryview) -> None:
        """Fill `target`, which has the size of a layer, with the layer `layer` alone. Raises as `decode` does."""
        assert layer == 0
        self.decode(stored, target)

    def error(self, stored: memoryview) -> CodingError | None:
        """Return the error that `encode` reported for `stored`; None if the payload comes back exactly. Raises as
        `decode` does."""
        return None


class Entry(NamedTuple):
    """One codec of the list: calling `kind` of `module` makes it. It is loaded by name when a tier that uses it is
    opened, or by number when a block that it encoded is read."""

    number: int
    module: str
    kind: str


CODECS: dict[str, Entry] = {
    "lossless": Entry(1, "kvstore_tiers.codecs.lossless", "LosslessCodec"),
    "context": Entry(2, "kvstore_tiers.codecs.context", "ContextCodec"),
    "int8": Entry(3, "kvstore_tiers.codecs.quantised", "int8"),
    "int4": Entry(4, "kvstore_tiers.codecs.quantised", "int4"),
}
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


def codec_of(setting: str) -> Codec | None:
    """Return the codec that a setting names; None for "auto", which names none."""
    return None if setting == AUTO else codec_named(setting)


def codec_numbered(number: int) -> Codec | None:
    """Return the codec with the number in a header; None when this build does not have it."""
    return next((_load(entry) for entry in _known().values() if entry.number == number), None)


def codec_name(number: int) -> str:
    """Return a name for the codec number in a header, for people: "none" for 0, "codec 9" for a 9 that this build does
    not have, "AES-GCM" for encrypted bytes."""
    known = {entry.number: name for name, entry in _known().items()}
    if number >= _SEALED:
        return f"{codec_name(number % _SEALED)} in AES-GCM" if number % _SEALED else "AES-GCM"
    return known.get(number, f"codec {number}") if number else NONE


def _known() -> dict[str, Entry]:
    return CODECS | _OF_TESTS if os.environ.get(TESTING_ENVIRONMENT) else CODECS


@cache
def _load(entry: Entry) -> Codec:
    codec: Codec = getattr(import_module(entry.module), entry.kind)()
    return codec
