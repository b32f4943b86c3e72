"""Whom kvctl asks where blocks are and why they are missing: an operator the admin socket, for all tenants; a user who
may not reach that, the daemon through a session of his own, for his tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvctl.admin import AdminSocket
from kvctl.connection import open_session
from kvctl.exit_codes import DENIED, UNREACHABLE, CommandError
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

Ask = Callable[[ExplainRequest], ExplainReply]


@contextmanager
def explain_source(directory: Path, timeout_s: float) -> Iterator[Ask]:
    """Raises CommandError where neither way is open."""
    try:
        admin = AdminSocket(directory, timeout_s)
    except CommandError as error:
        if error.exit_code != DENIED:
            raise
    else:
        with admin:
            yield lambda request: admin.call("Explain", request, ExplainReply)
        return
    with open_session(directory, OBJECTS, timeout_s) as session:

        def ask(request: ExplainRequest) -> ExplainReply:
            reply = session.explain(request, deadline_s=timeout_s)
            if reply is None:
                raise CommandError(UNREACHABLE, "explain: the daemon did not answer; give more time with --timeout")
            return reply

        yield ask
