"""Delete on the wire."""

from __future__ import annotations

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.validate import keys_of, known_group
from kvstored.store.operations.delete import Delete, Deleted, Fate


class DeleteVerb:
    """`max_keys` of a request."""

    def __init__(self, delete: Delete, *, max_keys: int) -> None:
        self._delete = delete
        self._max_keys = max_keys

    async def delete(self, session: Session, request: pb.Delete) -> pb.DeleteReply:
        """The sums of `delete_each`."""
        known_group(session, request.set.group)
        deleted = await self.delete_each(session, request.set.keys)
        count = deleted.fates.count
        return pb.DeleteReply(
            deleted=count(Fate.DELETED),
            deleted_bytes=deleted.nbytes,
            leased=count(Fate.IN_USE),
            continued=count(Fate.CONTINUED),
            missing=count(Fate.MISSING),
        )

    async def delete_each(self, session: Session, packed_keys: bytes) -> Deleted:
        """See `Delete.delete`. Raises KVStoreError for a malformed request."""
        return await self._delete.delete(session, keys_of(packed_keys, self._max_keys))
