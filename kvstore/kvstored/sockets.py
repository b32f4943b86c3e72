"""The socket directory: made with mode 0750, stale sockets removed, live ones respected.

Invariant: a socket file is removed only when no process answers on it.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import socket
import stat
from pathlib import Path

from kvstored.config.recognition import TENANTS
from kvstored.process import is_unmapped

log = logging.getLogger(__name__)
BACKLOG = 1024  # a client that finds it full has to try again
MAX_SOCKET_PATH_BYTES = 107  # sun_path, less its terminator
_SO_PASSRIGHTS = 83  # <asm-generic/socket.h>


class SocketError(Exception):
    """An error: a socket cannot be made. The message says why and what to do."""


def prepare_directory(path: Path, group: str) -> None:
    """Create the socket directory `path` (mode 0750), owned by the group `group` if it is not "". Raises
    SocketError.
    """
    if len(os.fsencode(path / "handshake.sock")) > MAX_SOCKET_PATH_BYTES:
        raise SocketError(
            f"socket directory {path} is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes with the "
            "socket's name); set daemon.socket_dir to a shorter path"
        )
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        owner = path.stat().st_uid
        is_trusted = owner in (0, os.geteuid()) or (os.geteuid() == 0 and not is_unmapped("uid", owner))
        if not is_trusted:
            raise SocketError(
                f"socket directory {path} belongs to uid {owner}, who could put other sockets in place of ours; "
                "chown it, or set daemon.socket_dir to a directory of its own"
            )
        if path.stat().st_mode & stat.S_IWOTH:
            raise SocketError(
                f"socket directory {path} is writable for all users; set daemon.socket_dir to a directory of its own"
            )
        if path.stat().st_uid == os.geteuid() and _holds_only_sockets(path):
            path.chmod(0o750)
            if group:
                os.chown(path, -1, _gid(group))
    except OSError as error:
        raise SocketError(
            f"cannot make socket directory {path}: {error.strerror}; set daemon.socket_dir to a writable place"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SocketError(
            f"socket directory {path} is not writable by uid {os.geteuid()} (is the file system read-only?); let it "
            "write there, or set daemon.socket_dir to another place"
        )


def _holds_only_sockets(path: Path) -> bool:
    """Return whether the daemon may close a directory to others: a mistaken `--socket-dir /run` must not change
    /run.
    """
    return all(entry.is_socket() or entry.name == TENANTS for entry in path.iterdir())


def clear_stale(path: Path) -> None:
    """Remove the socket `path` if no process listens on it. Raises SocketError if one does, or that cannot be known."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise SocketError(f"{path} is in the way and is not a socket; remove it")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):  # of any type: no process holds it
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except PermissionError:
            raise SocketError(
                f"{path} belongs to another user; remove it or choose another daemon.socket_dir"
            ) from None
        except OSError:
            pass  # a full backlog, or a socket of another type: a process holds it
    raise SocketError(f"another daemon is serving on {path}; stop it or choose another daemon.socket_dir")


def prepare_own_directory(directory: Path) -> None:
    """Create the directory of one tenant's own sockets. Its parent is closed to others, so only processes that have the
    directory mounted reach it. Raises SocketError."""
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.parent.chmod(0o700)
        directory.mkdir(mode=0o755, exist_ok=True)
        directory.chmod(0o755)
    except OSError as error:
        raise SocketError(f"cannot make {directory}, for a tenant's own socket: {error.strerror}") from None


def listen_to_all(path: Path) -> socket.socket:
    """Return a listening SOCK_SEQPACKET socket at `path`, to which everybody who reaches the file may connect. Raises
    SocketError.

    Other users may be able to write in the directory: the mode is set on the file that was opened, never by name."""
    listener = _bound_seqpacket(path)
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stat.S_ISSOCK(os.fstat(opened).st_mode):
                os.chmod(f"/proc/self/fd/{opened}", 0o666)
        finally:
            os.close(opened)
    except OSError as error:
        listener.close()
        raise SocketError(f"cannot open {path} to its tenant: {error.strerror}") from None
    return listener


def listen_seqpacket(path: Path, group: str) -> socket.socket:
    """Return a listening SOCK_SEQPACKET socket at `path`, to which `group` may connect. Raises SocketError."""
    listener = _bound_seqpacket(path)
    open_to_group(path, group)
    return listener


def _bound_seqpacket(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise SocketError(
            f"{path} is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes): shorten the tenant's name"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SocketError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def refuse_descriptors(receiver: socket.socket) -> None:
    """Have the kernel refuse descriptors that clients send to `receiver`, a Unix socket, or to what `receiver` accepts.
    To drop one may take as long as its sender wants, such as a TCP socket that lingers. Linux before 6.16 cannot.
    """
    with contextlib.suppress(OSError):
        receiver.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def open_to_group(path: Path, group: str) -> None:
    """Let the group `group` connect to the socket `path`. The mode of the directory keeps other users out."""
    if group:
        os.chown(path, -1, _gid(group))
    path.chmod(0o660)


def remove_socket(path: Path) -> None:
    """Remove the daemon's socket `path`. If that is impossible, log it; the next start removes it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed (%s): nothing answers there any more", path, error.strerror)


def restrict_to_admins(path: Path, group: str) -> None:
    if group:
        os.chown(path, -1, _gid(group))
        path.chmod(0o660)
    else:
        path.chmod(0o600)


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketError(f"group {group!r} does not exist; create it with: groupadd --system {group}") from None
