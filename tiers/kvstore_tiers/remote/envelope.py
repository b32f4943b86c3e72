"""The content of a remote store: a block's image in an envelope, encrypted unless its tenant wants it plain.

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

`sealed.py` makes and opens values.
"""

from __future__ import annotations

import struct

HEAD_BYTES, TAG_BYTES = 48, 16
MAGIC, VERSION = b"KVR1", 1
PLAIN, AES_GCM = 0, 1
HEAD, TAIL = struct.Struct("<4sBBHQ16s12sI"), struct.Struct(f"{TAG_BYTES}s")
assert HEAD.size == HEAD_BYTES


def value_bytes(image_bytes: int) -> int:
    """Return the bytes of the value that a remote store keeps for a block image of `image_bytes` bytes, encrypted or
    plain: the image with a head and an end.
    """
    return HEAD_BYTES + image_bytes + TAG_BYTES
