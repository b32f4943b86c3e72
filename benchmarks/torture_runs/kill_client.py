"""A client process under a daemon that is killed: puts, deletes and reads, and remembers what it was promised.

    python kill_client.py SOCKET_DIR NAME TENANT_UID SEED

Driven by JSON lines on standard input, one a life of the daemon: `{"do": "life", "number": N}` first checks everything
that was promised in earlier lives (`{"verified": ...}`), then works until the daemon dies (`{"ended": ...}`).
Conversations named "shared-..." are put by every client of the tenant; the others by this one alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc  # noqa: E402, F401  # all of it while this process may still read the interpreter's folder
import numpy as np  # noqa: E402

import kvstore_client  # noqa: E402
from kvstore_client import KVStoreError, Session  # noqa: E402
from kvstore_client.entry import connect  # noqa: E402
from kvstore_client.results import REASON_LATE  # noqa: E402
from torture_runs.child_process import end_with_parent  # noqa: E402
from torture_runs.kill_model import MODELS, Conversation  # noqa: E402

OWN_CONVERSATIONS, SHARED_CONVERSATIONS = 18, 6
LONGEST = 6
STAGING_BYTES = 512 << 10
DEADLINE_S = 10.0
READ_SHARE, DELETE_SHARE = 0.2, 0.12
ORDERS = (("always", "settled"), ("batch", "settled"), ("batch", "published"), ("none", "settled"))
PATIENT_READS = 4
NOT_AN_ANSWER = ("no_daemon", "deadline", "arena_not_mapped")


class Interrupted(Exception):
    """The daemon is gone."""


class KillClient:
    """One client; its model lasts over all lives of the daemon."""

    def __init__(self, socket_dir: str, name: str, tenant: str, seed: int) -> None:
        self._socket_dir = socket_dir
        self._rng = np.random.default_rng(seed)
        owners = [(f"own-{tenant}-{name}", 1 + int(name)), (f"shared-{tenant}", 99)]
        counts = (OWN_CONVERSATIONS, SHARED_CONVERSATIONS)
        self._conversations = [
            Conversation(owner, number % len(MODELS), 1000 * base + number, LONGEST)
            for (owner, base), count in zip(owners, counts, strict=True)
            for number in range(count)
        ]
        self._report: dict[str, Any] = {}

    def life(self, number: int) -> None:
        self._report = {"lost": [], "wrong": [], "resurrected": [], "checked_durable": 0, "checked_gone": 0}
        self._report |= {"read_blocks": 0, "puts": 0, "deletes": 0, "verified_all": False, "durable": 0}
        sessions: list[Session] = []
        try:
            sessions = self._connect()
            for conversation in self._conversations:
                self._verify(sessions, conversation)
            self._report["verified_all"] = True
            self._say("verified")
            while True:
                self._act(sessions)
        except (Interrupted, KVStoreError, kvstore_client.DaemonUnavailable) as error:
            self._report["interrupted_by"] = f"{type(error).__name__}: {error}"
            self._report["durable"] = sum(conversation.durable_blocks for conversation in self._conversations)
            self._say("ended")
        finally:
            for session in sessions:
                session.close()

    def forget(self) -> None:
        """The directory was replaced by an empty one."""
        for conversation in self._conversations:
            conversation.__post_init__()

    def _connect(self) -> list[Session]:
        """One session a fingerprint. The daemon has said that it serves: one that refuses is dead, or broken."""
        return [
            connect(
                self._socket_dir,
                fingerprint=model,
                required=True,
                deadline_s=DEADLINE_S,
                connect_timeout_s=DEADLINE_S,
                staging_bytes=STAGING_BYTES,
            )
            for model in MODELS
        ]

    # -- after a crash -----------------------------------------------------------------------------------------------

    def _verify(self, sessions: list[Session], conversation: Conversation) -> None:
        """Durable blocks are there, deleted ones are not, what can be read is right."""
        session = sessions[conversation.model]
        found = session.lookup(conversation.tokens(conversation.longest))
        self._require(session, found.reason)
        for block in conversation.lost(found.tiers):
            self._report["lost"].append(f"{conversation.owner} {conversation.number} block {block}: {found}")
        for block in conversation.resurrected(found.tiers):
            self._report["resurrected"].append(f"{conversation.owner} {conversation.number} block {block}: {found}")
        self._report["checked_durable"] += conversation.durable_blocks
        self._report["checked_gone"] += sum(state.value == "gone" for state in conversation.states)
        self._read(session, conversation, must_have=conversation.durable_head)

    def _read(self, session: Session, conversation: Conversation, must_have: int = 0) -> None:
        for _ in range(PATIENT_READS):
            with session.get(conversation.tokens(conversation.longest)) as lease:
                held = [np.array(lease.payload(block)) for block in range(len(lease))]
                reason = lease.reason
                if held and not lease.valid:
                    raise Interrupted("the lease ended while it was read")
            if reason != REASON_LATE:  # on a machine with other work a promotion may take longer than a deadline
                break
        if len(held) < conversation.longest:
            self._require(session, reason)
        for block, payload in enumerate(held):
            self._report["read_blocks"] += 1
            if not np.array_equal(payload, conversation.payload(block)):
                self._report["wrong"].append(f"{conversation.owner} {conversation.number} block {block}")
        if len(held) < must_have:
            self._report["lost"].append(
                f"{conversation.owner} {conversation.number}: {len(held)} of {must_have} read, {reason}"
            )

    # -- at work -----------------------------------------------------------------------------------------------------

    def _act(self, sessions: list[Session]) -> None:
        conversation = self._conversations[int(self._rng.integers(len(self._conversations)))]
        session = sessions[conversation.model]
        draw = self._rng.random()
        if draw < READ_SHARE:
            self._read(session, conversation)
        elif draw < READ_SHARE + DELETE_SHARE and conversation.owner.startswith("own"):
            self._delete(session, conversation)
        else:
            self._put(session, conversation)
        self._require(session, "")

    def _put(self, session: Session, conversation: Conversation) -> None:
        blocks = int(self._rng.integers(1, conversation.longest + 1))
        durability, wait = ORDERS[int(self._rng.choice(len(ORDERS), p=(0.35, 0.35, 0.2, 0.1)))]
        conversation.putting(blocks)
        receipt = session.put(
            conversation.tokens(blocks),
            payloads=conversation.payloads(blocks),
            durability=durability,
            wait=wait,  # type: ignore[arg-type]
            deadline_s=DEADLINE_S,
        )
        conversation.answered(receipt.durability)
        self._report["puts"] += 1

    def _delete(self, session: Session, conversation: Conversation) -> None:
        conversation.deleting()
        tokens = conversation.tokens(conversation.longest)
        deleted = session.delete(tokens, deadline_s=DEADLINE_S)
        if not deleted.reason and deleted.blocks + deleted.missing == conversation.longest:
            conversation.deleted()
            self._report["deletes"] += 1

    def _require(self, session: Session, reason: str) -> None:
        """Answers count only while the daemon that gives them lives."""
        if session.state != "connected" or reason in NOT_AN_ANSWER:
            raise Interrupted(reason)

    def _say(self, what: str) -> None:
        print(json.dumps({what: self._report}), flush=True)


def main() -> None:
    socket_dir, name, uid, seed = sys.argv[1:]
    if int(uid) != os.geteuid():
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    end_with_parent()
    client = KillClient(socket_dir, name, uid, int(seed))
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "forget":
            client.forget()
        else:
            client.life(order["number"])


if __name__ == "__main__":
    main()
