"""The state directory's secret against the blocks: what the next start of the daemon would say, daemon or not."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.doctor.finding import Finding, fail, ok
from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import Surroundings
from kvstore_proto.state_identity import SECRET_FILE, read_ownership


def secret(around: Surroundings) -> Iterator[Finding]:
    state_dir = around.settings.path("daemon.state_dir")
    if state_dir is None:
        return
    try:
        nvme_dir = around.settings.path("nvme.path") if around.settings.flag("nvme.enabled") else None
        found = read_ownership(state_dir, nvme_dir)
    except PermissionError:
        seen = f"{state_dir / SECRET_FILE} is closed to user {user_name(around.uid)}, as it should be"
        yield ok("secret", seen, "sudo kvctl doctor compares it with the blocks")
        return
    if found.problem:
        seen, _, advice = found.problem.partition(": ")
        yield fail("secret", f"{seen}; the daemon will refuse to start", advice)
    elif found.secret is None:
        yield ok("secret", f"{state_dir / SECRET_FILE} does not exist yet; the daemon makes it")
    else:
        yield ok("secret", "it is the one that the blocks were stored under", "keep a copy of it with your backups")
