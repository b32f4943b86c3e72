"""What is in a remote store: a block's image in an envelope, encrypted unless its tenant wants it plain.

    offset  size  field
    0       4     magic "KVR1"
    4       1     version (1)
    5       1     kind: 0 plain, 1 AES-256-GCM
    6       2     reserved, zero
    8       8     bytes of the image
    16      16    salt          (kind 1; zero in kind 0)
    32      12    nonce         (kind 1; zero in kind 0)
    44      4     reserved, zero
    48            the image, encrypted in kind 1
    end     16    tag           (kind 1; zero in kind 0)

The key of a value is derived from the secret of the node or cluster, the tenant's digest and the value's own salt; so a
nonce never repeats under a key. The envelope's first 48 bytes and the object's name (tenant and block key) are
authenticated with it: a value that was changed, cut, exchanged with another or taken from another tenant does not open.
A plain image has checksums against damage, which its reader verifies, and nothing against forgery.
The name of a value in the store is a keyed hash of the object's name: without the secret one cannot ask for a block.

Works on memory of the caller's, and copies nothing but what it encrypts.
"""

from __future__ import annotations

import hashlib
import os
import struct
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore_tiers.objects import DIGEST_BYTES, DamagedObject
from kvstore_tiers.remote.driver import NAME_CHARACTERS

HEAD_BYTES, TAG_BYTES = 48, 16
MAGIC, VERSION = b"KVR1", 1
PLAIN, AES_GCM = 0, 1
_HEAD, _TAIL = struct.Struct("<4sBBHQ16s12sI"), struct.Struct(f"{TAG_BYTES}s")
_TENANTS_KEPT = 1024
assert _HEAD.size == HEAD_BYTES


def value_bytes(image_bytes: int) -> int:
    """Bytes of the value of an image, of either kind."""
    return HEAD_BYTES + image_bytes + TAG_BYTES


class Sealer:
    """`secret`: of the node or of its cluster, 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._name_key = hashlib.blake2b(secret, digest_size=32, person=b"kvstore names").digest()
        seal_key = hashlib.blake2b(secret, digest_size=32, person=b"kvstore seals").digest()

        @lru_cache(_TENANTS_KEPT)
        def tenant_key(digest: bytes) -> bytes:
            return hashlib.blake2b(digest, key=seal_key, digest_size=32, person=b"kvstore tenant").digest()

        self._tenant_key = tenant_key

    def value_name(self, name: bytes) -> str:
        """The name in the store of the object `name` (32 bytes)."""
        return hashlib.blake2b(name, key=self._name_key, digest_size=NAME_CHARACTERS // 2).hexdigest()

    def seal(self, name: bytes, image: memoryview, value: memoryview, *, plain: bool) -> None:
        """Make the value of an image in `value`, which has its size. The image of a plain value is in its place there
        already: `image` is that part of it."""
        if plain:
            _HEAD.pack_into(value, 0, MAGIC, VERSION, PLAIN, 0, len(image), bytes(16), bytes(12), 0)
            _TAIL.pack_into(value, len(value) - TAG_BYTES, bytes(TAG_BYTES))
            return
        salt, nonce = os.urandom(16), os.urandom(12)
        _HEAD.pack_into(value, 0, MAGIC, VERSION, AES_GCM, 0, len(image), salt, nonce, 0)
        self._cipher(name, salt).encrypt_into(nonce, image, bytes(value[:HEAD_BYTES]) + name, value[HEAD_BYTES:])

    def open(self, name: bytes, value: memoryview, image: memoryview, *, plain: bool) -> memoryview:
        """The image in a value: in the front of `image`, or where it is in a plain value. `plain`: whether a plain
        value is accepted; an encrypted one always is. Raises DamagedObject."""
        if len(value) < HEAD_BYTES + TAG_BYTES:
            raise DamagedObject(f"the value has {len(value)} bytes, less than an envelope")
        magic, version, kind, _, nbytes, salt, nonce, _ = _HEAD.unpack_from(value)
        if magic != MAGIC or version != VERSION or kind not in (PLAIN, AES_GCM):
            raise DamagedObject("the value is no envelope of a version that this daemon knows")
        if value_bytes(nbytes) != len(value):
            raise DamagedObject(f"the envelope says {nbytes} bytes, the value has {len(value)} in all")
        if nbytes > len(image):
            raise DamagedObject(f"the image has {nbytes} bytes, more than {len(image)}")
        if kind == PLAIN:
            if not plain:
                raise DamagedObject("the value is not encrypted, and its tenant's blocks are")
            return value[HEAD_BYTES : HEAD_BYTES + nbytes]
        opened = image[:nbytes]
        try:
            self._cipher(name, salt).decrypt_into(nonce, value[HEAD_BYTES:], bytes(value[:HEAD_BYTES]) + name, opened)
        except InvalidTag:
            raise DamagedObject("the value was changed, or is another block's or tenant's") from None
        return opened

    def _cipher(self, name: bytes, salt: bytes) -> AESGCM:
        tenant_key = self._tenant_key(name[:DIGEST_BYTES])
        return AESGCM(hashlib.blake2b(salt, key=tenant_key, digest_size=32, person=b"kvstore value").digest())
