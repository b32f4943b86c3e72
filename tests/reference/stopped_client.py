"""A client in a process of its own that holds slots and stops, to be killed: a fork of a test's threads can hang.

python -m tests.reference.stopped_client SOCKET_DIR KIB_A_BLOCK CONVERSATION reserve|put
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvstore_client import connect
from kvstore_client.memory import Bytes
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient

REACHED = "stopped"


@contextmanager
def stopped_client(directory: Path, kib_a_block: int, conversation: int, at: str) -> Iterator[None]:
    """Within it the client has stopped: `reserve`: three slots are its own; `put`: the fourth of six is being written.

    It is killed with SIGKILL at the end.
    """
    arguments = [str(directory), str(kib_a_block), str(conversation), at]
    command = [sys.executable, "-m", __name__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().strip() == REACHED
            yield
        finally:
            process.kill()


def stop(*_: object) -> NoReturn:
    print(REACHED, flush=True)
    while True:
        signal.pause()


def _main(directory: Path, kib_a_block: int, conversation: int, at: str) -> None:
    identity = model(kib_a_block=kib_a_block)
    if at == "reserve":
        with RawClient(directory, identity) as raw:
            raw.ask(reserve_slots=pb.ReserveSlots(payload_bytes=identity.payload_bytes(), blocks=3))
            stop()

    def write(_: Bytes) -> None:
        stop()

    payloads: list[Any] = [*payloads_of(conversation, 6, identity)]
    payloads[3] = write
    with connect(directory, fingerprint=identity, required=True) as session:
        session.put(tokens_of(conversation, 6), payloads=payloads)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
