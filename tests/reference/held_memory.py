"""Asks a holder of kvstored, over its socket as a daemon would, what it holds."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def held_memory(state_dir: Path, prefix: str = "a") -> dict[str, int]:
    """Descriptors by name, of names that begin so ("a": arenas); the caller's to close."""
    held: dict[str, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(str(state_dir / "holder.sock"))
        connection.send(b"L")
        while True:
            packet, descriptors, _, _ = socket.recv_fds(connection, 128, 1)
            if packet[:1] != b"F":
                return held
            name = packet[1:].decode()
            if name.startswith(prefix):
                held[name] = descriptors[0]
            else:
                os.close(descriptors[0])


def holder_pid(state_dir: Path) -> int:
    """The process that keeps a daemon's memory; 0 when there is none."""
    wanted = os.fsencode(state_dir / "holder.sock")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvstored.lifetime.holder" in arguments and wanted in arguments:
            return int(process.name)
    return 0
