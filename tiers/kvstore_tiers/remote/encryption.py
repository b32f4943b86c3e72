"""Encrypts images into the values of a remote store, and opens them; their form is in `envelope.py`.

The functions work on the caller's memory, and copy only what they encrypt. They run in the worker process alone.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore_tiers.objects import DIGEST_BYTES, DamagedObject
from kvstore_tiers.remote.driver import NAME_CHARACTERS
from kvstore_tiers.remote.envelope import AES_GCM, HEAD, HEAD_BYTES, MAGIC, PLAIN, TAG_BYTES, TAIL, VERSION, value_bytes

_TENANTS_KEPT = 1024


class Sealer:
    """An encryptor and decryptor of block images (a block's header and payload) for a remote store. Its keys are made
    from `secret`, 32 bytes that the node or the cluster keeps.
    """

    def __init__(self, secret: bytes) -> None:
        self._name_key = hashlib.blake2b(secret, digest_size=32, person=b"kvstore names").digest()
        seal_key = hashlib.blake2b(secret, digest_size=32, person=b"kvstore seals").digest()

        @lru_cache(_TENANTS_KEPT)
        def tenant_key(digest: bytes) -> bytes:
            return hashlib.blake2b(digest, key=seal_key, digest_size=32, person=b"kvstore tenant").digest()

        self._tenant_key = tenant_key

    def value_name(self, name: bytes) -> str:
        """Return the name in the remote store of the object `name`, 32 bytes that the daemon uses. It cannot be turned
        back into `name`.
        """
        return hashlib.blake2b(name, key=self._name_key, digest_size=NAME_CHARACTERS // 2).hexdigest()

    def seal(self, name: bytes, image: memoryview, value: memoryview, *, plain: bool) -> None:
        """Write into `value` what the store keeps for the block `image`: the image encrypted or, if `plain`, unchanged,
        with a head and an end. `name` is the object's name of 32 bytes. `value` has the right size; a plain image must
        be at its place in `value` already.
        """
        if plain:
            HEAD.pack_into(value, 0, MAGIC, VERSION, PLAIN, 0, len(image), bytes(16), bytes(12), 0)
            TAIL.pack_into(value, len(value) - TAG_BYTES, bytes(TAG_BYTES))
            return
        salt, nonce = os.urandom(16), os.urandom(12)
        HEAD.pack_into(value, 0, MAGIC, VERSION, AES_GCM, 0, len(image), salt, nonce, 0)
        self._cipher(name, salt).encrypt_into(nonce, image, bytes(value[:HEAD_BYTES]) + name, value[HEAD_BYTES:])

    def open(self, name: bytes, value: memoryview, image: memoryview, *, plain: bool) -> memoryview:
        """Return the block image in the stored `value` of the object `name`: decrypted into the memory `image`, or, if
        it was stored plain, as a part of `value`. With `plain` False a plain value is refused. Raises DamagedObject for
        a value that was changed, cut or belongs to another object.
        """
        if len(value) < HEAD_BYTES + TAG_BYTES:
            raise DamagedObject(f"the value has {len(value)} bytes, less than an envelope")
        magic, version, kind, _, nbytes, salt, nonce, _ = HEAD.unpack_from(value)
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
