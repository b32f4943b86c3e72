"""A session for one command: the way an engine takes, so the tenant is that of the calling user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvctl.exit_codes import DENIED, FAILED, MISS, UNREACHABLE, CommandError
from kvctl.explain_text import in_words
from kvstore_client.entry import connect
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.session import Session
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint

NEVER_STORED = "never_stored"


@contextmanager
def open_session(
    directory: Path, fingerprint: Fingerprint, timeout_s: float, *, staging_bytes: int = 0
) -> Iterator[Session]:
    """Raises CommandError, also for what the daemon finds wrong with a request made inside."""
    try:
        with connect(
            directory,
            fingerprint=fingerprint,
            client_name="kvctl",
            deadline_s=timeout_s,
            connect_timeout_s=timeout_s,
            required=True,
            staging_bytes=staging_bytes,
        ) as session:
            yield session
    except DaemonUnavailable as error:
        code = DENIED if error.is_denied else FAILED if error.is_refused else UNREACHABLE
        raise CommandError(code, error.message) from None
    except KVStoreError as error:
        raise CommandError(FAILED, error.message) from None


def not_there(what: str, reason: str, timeout_s: float, **facts: object) -> CommandError:
    """The failure of a command whose blocks could not be had, by the client's reason."""
    if reason == REASON_NO_DAEMON:
        return CommandError(UNREACHABLE, f"{what}: the daemon went away")
    if reason == REASON_DEADLINE:
        return CommandError(
            UNREACHABLE, f"{what}: the daemon did not answer within {timeout_s:g} s; give more time with --timeout"
        )
    reason = reason or NEVER_STORED
    return CommandError(MISS, f"{what}: {in_words(reason)}", reason=reason, **facts)
