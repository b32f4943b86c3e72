"""Seals encrypt blocks on NVMe with a key of their tenant, and bind each image to its block, tenant, slot and time.

Only bytes on the medium are sealed: a block is sealed while it is written, and opened in place after it was read. The
stored bytes keep their length. The module owns the form; docs/format.md describes it. Who has a key is not its matter.

    offset in a seal  size  field
    0                 8     number of the key
    8                 16    salt, random; the key of one image is derived from it and the tenant's key
    24                12    nonce, random.
    36                16    tag
    52                16    xxh3_64 of the payload and of the stored bytes as they were before, encrypted.

One AES-256-GCM message has these two checksums, the token ids and the stored bytes, in this order. The header's first
256 bytes, without what is known only after encryption, are authenticated with it, and so is the block's key. A salt and
a nonce, 224 random bits for each write, do not repeat, so the number of writes has no limit. On the medium key, parent
and extra of a block are encrypted alone, by AES of the tenant's key. Equal ones stay equal, so scrubber and checks work
without a key. Invariant: bytes that do not open are never given to a caller as a block.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvstore_proto.arena import SEAL_BYTES, SEALED, TOKENS_OFFSET, BlockHeader, Coded
from kvstore_proto.identity import split_keys
from kvstore_tiers.recovered import Column
from kvstore_tiers.segments import Segment, buffer_at, checksum_at

DATA_KEY_BYTES = 32
_SEAL = struct.Struct("<8s16s12s16s16s")
_CHECKS = struct.Struct("<QQ")
_NO_TAG = bytes(16)
assert _SEAL.size == SEAL_BYTES


class DataKey:
    """The key of one tenant's blocks on NVMe: `secret`, 32 bytes, with its `number`, 8 bytes, by which the blocks name
    it. Any thread may use it.
    """

    def __init__(self, number: bytes, secret: bytes) -> None:
        self.number = number
        self._secret = secret
        self._names = Cipher(algorithms.AES(self._derived(b"names")), modes.ECB())

    def veil(self, names: bytes) -> bytes:
        """Return the keys in `names`, of 16 bytes each, as they are on the medium. 16 zero bytes, which name nothing,
        stay as they are."""
        return self._renamed(names, is_hiding=True)

    def unveil(self, veiled: bytes) -> bytes:
        """Return the keys that `veil` turned into `veiled`."""
        return self._renamed(veiled, is_hiding=False)

    def unveil_column(self, veiled: Column) -> Column:
        """Return the keys that are on the medium as `veiled`, uint64 of the shape (n, 2)."""
        return np.frombuffer(self.unveil(veiled.tobytes()), "<u8").reshape(-1, 2)

    def seal(self, header: BlockHeader, segments: Sequence[Segment], target: Segment) -> BlockHeader:
        """Write the stored bytes in `segments` to `target`, encrypted. Return the header for the medium. `header` is
        complete, with the slot's generation."""
        salt, nonce = os.urandom(16), os.urandom(12)
        veiled = split_keys(self.veil(header.key + header.parent + header.extra))
        form = Coded(SEALED | header.codec, header.stored_bytes, 0)
        seal = _SEAL.pack(self.number, salt, nonce, _NO_TAG, bytes(16))
        hidden = replace(
            header, key=veiled[0], parent=veiled[1], extra=veiled[2], checksum=0, coded=form, tokens=b"", seal=seal
        )
        making = Cipher(algorithms.AES(self._derived(salt)), modes.GCM(nonce)).encryptor()
        making.authenticate_additional_data(hidden.pack()[:TOKENS_OFFSET] + header.key)
        checks = making.update(_CHECKS.pack(header.checksum, header.stored_checksum))
        tokens = making.update(header.tokens)
        offset = 0
        for segment in segments:
            making.update_into(_view(segment.address, segment.nbytes), _view(target.address + offset, segment.nbytes))
            offset += segment.nbytes
        making.finalize()
        form = form._replace(checksum=checksum_at(target.address, header.stored_bytes))
        seal = _SEAL.pack(self.number, salt, nonce, making.tag, checks)
        return replace(hidden, coded=form, tokens=tokens, seal=seal)

    def open(self, sealed: BlockHeader, key: bytes, segments: Sequence[Segment]) -> BlockHeader | str:
        """Decrypt the stored bytes in `segments`, in place, and return the header of the block `key` as it was before
        `seal`. `sealed` is the header on the medium. Return a sentence about the fault if the block does not open; the
        segments then hold garbage."""
        _, salt, nonce, tag, checks = _SEAL.unpack(sealed.seal)
        form = Coded(sealed.codec, sealed.stored_bytes, 0)
        seal = _SEAL.pack(self.number, salt, nonce, _NO_TAG, bytes(16))
        hidden = replace(sealed, checksum=0, coded=form, tokens=b"", seal=seal)
        opening = Cipher(algorithms.AES(self._derived(salt)), modes.GCM(nonce, tag)).decryptor()
        opening.authenticate_additional_data(hidden.pack()[:TOKENS_OFFSET] + key)
        checksum, stored_checksum = _CHECKS.unpack(opening.update(checks))
        tokens = opening.update(sealed.tokens)
        for segment in segments:
            place = _view(segment.address, segment.nbytes)
            opening.update_into(place, place)
        try:
            opening.finalize()
        except InvalidTag:
            return "its seal is broken: it was changed, or is another block's or tenant's"
        codec = sealed.codec ^ SEALED
        return replace(
            self.reveal(sealed), checksum=checksum, tokens=tokens,
            coded=Coded(codec, sealed.stored_bytes, stored_checksum) if codec else None,
        )  # fmt: skip

    def reveal(self, sealed: BlockHeader) -> BlockHeader:
        """Return what a header or record on the medium says of an encrypted block without its stored bytes: no
        checksums, no token ids."""
        names = split_keys(self.unveil(sealed.key + sealed.parent + sealed.extra))
        codec = sealed.codec ^ SEALED
        return replace(
            sealed, key=names[0], parent=names[1], extra=names[2], checksum=0, tokens=b"", seal=b"",
            coded=Coded(codec, sealed.stored_bytes, 0) if codec else None,
        )  # fmt: skip

    def _derived(self, salt: bytes) -> bytes:
        return hashlib.blake2b(salt, key=self._secret, digest_size=32, person=b"kvstore slot").digest()

    def _renamed(self, names: bytes, *, is_hiding: bool) -> bytes:
        making = self._names.encryptor() if is_hiding else self._names.decryptor()
        given = np.frombuffer(names, "<u8").reshape(-1, 2)
        made = np.frombuffer(making.update(names), "<u8").reshape(-1, 2)
        return np.where((given != 0).any(axis=1, keepdims=True), made, given).tobytes()


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview(buffer_at(address, nbytes)).cast("B")
