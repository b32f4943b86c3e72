"""Named objects through a session: their payloads without a copy, and the head of a stored one.

Names, keys and layout are defined in `kvstore_proto.objects`, so objects put by unary calls are found here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_client.memory import Bytes
from kvstore_client.payload import Payload
from kvstore_client.session import Session
from kvstore_proto.objects import HEAD_BYTES, ObjectHead, object_tokens, read_head


def payloads_of(head: ObjectHead, data: Bytes) -> list[Payload]:
    """Return the payloads of the blocks that store an object, for a put. `head` describes the object and `data` has its
    bytes, which are not copied.
    """

    def first(destination: Bytes) -> None:
        np.copyto(destination[:HEAD_BYTES], np.frombuffer(head.pack(), np.uint8))
        np.copyto(destination[HEAD_BYTES:], data[: len(destination) - HEAD_BYTES])

    rest: Sequence[Payload] = [
        data[start : start + head.block_bytes]
        for start in range(head.block_bytes - HEAD_BYTES, len(data), head.block_bytes)
    ]
    return [first, *rest]


def get_head(session: Session, name: str, deadline_s: float) -> tuple[ObjectHead | None, str]:
    """Read the head (the description) of the stored object `name`, and return it and "". If it cannot be read within
    `deadline_s` seconds, return None and a word for the reason, which is "no_object" if the stored bytes are not an
    object of that name.
    """
    with session.get(object_tokens(name, 1), deadline_s=deadline_s) as lease:
        if not len(lease):
            return None, lease.reason
        head = read_head(lease.payload(0)[:HEAD_BYTES].tobytes())
        return (head, "") if head is not None and lease.valid else (None, "no_object")
