"""Failpoints: parsing, counting, acting; every declared name is in the source and every hit is declared."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore_tiers
from kvstore_tiers import failpoints

pytestmark = pytest.mark.usefixtures("nothing_stays_armed")
NAME = "nvme.read"


def test_declared_names_are_those_in_the_source() -> None:
    root = Path(kvstore_tiers.__file__).parent
    source = "\n".join(path.read_text() for path in root.rglob("*.py"))
    own = {name for name in failpoints.REGISTRY if name.startswith(("host.", "nvme."))}  # others declare theirs
    assert set(re.findall(r'failpoints\.hit\("([^"]+)"\)', source)) == own
    assert all(failpoints.REGISTRY.values())


def test_nothing_happens_unless_armed() -> None:
    failpoints.hit(NAME)
    failpoints.arm("host.before-copy=error:EIO")
    failpoints.hit(NAME)


def test_an_error_at_the_nth_hit_alone() -> None:
    failpoints.arm(f"{NAME}=error:ENOSPC@2")
    failpoints.hit(NAME)
    with pytest.raises(OSError) as raised:
        failpoints.hit(NAME)
    assert raised.value.errno == errno.ENOSPC
    failpoints.hit(NAME)
    assert failpoints.hits(NAME) == 3


def test_a_delay_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", waited.append)
    failpoints.arm(f"{NAME}=delay:0.25")
    failpoints.hit(NAME)
    assert waited == [0.25]


def test_kill_from_the_environment() -> None:
    hit = f"failpoints.hit('{NAME}')"
    program = f"from kvstore_tiers import failpoints; {hit}; print('alive', flush=True); {hit}"
    environment = {**os.environ, failpoints.ENVIRONMENT: f"{NAME}=kill@2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "alive\n")


@pytest.mark.parametrize(
    "bad",
    [f"{NAME}", f"{NAME}=explode", f"{NAME}=error:EWHAT", f"{NAME}=delay:soon", f"{NAME}=kill@x", f"{NAME}=kill:9"],
)
def test_a_bad_specification_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=kill"):
        failpoints.arm(bad)


def test_an_unknown_name_is_refused_until_declared() -> None:
    with pytest.raises(ValueError, match="no such failpoint"):
        failpoints.arm("nvme.no-such=kill")


def test_another_package_declares_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "REGISTRY", dict(failpoints.REGISTRY))
    failpoints.declare("daemon.somewhere", "a place")
    failpoints.declare("daemon.somewhere", "a place")
    with pytest.raises(ValueError, match="declared twice"):
        failpoints.declare("daemon.somewhere", "another place")
    failpoints.arm("daemon.somewhere=error:EIO")
    assert failpoints.unknown_names() == []
