"""The doctor's checks of remote tiers: packages, the store's state, encryption, and files with secrets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.doctor import tiers
from kvctl.doctor.surroundings import DaemonSettings, Finding, Level, Surroundings
from kvstore_proto.v1 import admin_pb2 as pb

DAEMONS = {
    "host.policy": "lru", "far.url": "redis://store:6379/0", "far.encrypt": "True", "far.enabled": "True",
    "far.credentials_file": "None", "cluster.secret_file": "None",
}  # fmt: skip


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are installed."""
    installed = {"cryptography", "redis"}
    monkeypatch.setattr(tiers, "find_spec", lambda name: object() if name in installed else None)
    return installed


@pytest.fixture
def around(tmp_path: Path, packages: set[str]) -> Surroundings:
    """A daemon that is content."""
    return Surroundings(tmp_path, DaemonSettings("a test", DAEMONS), pb.StatusReply(pid=1, state="serving"))


def changed(around: Surroundings, **values: str) -> Surroundings:
    settings = {**around.settings.values, **{key.replace("__", "."): value for key, value in values.items()}}
    return replace(around, settings=DaemonSettings("a test", settings))


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is not Level.OK]


def test_remote_tiers_are_known_from_a_daemon_and_from_a_file() -> None:
    assert tiers.remote_tiers(DaemonSettings("", DAEMONS)) == ["far"]
    file = {"host.kind": "shared", "nvme.kind": "nvme", "s.kind": "remote", "s.url": "s3://b/p", "g.kind": "gpu"}
    assert tiers.remote_tiers(DaemonSettings("", file)) == ["s"]
    assert tiers.remote_tiers(DaemonSettings("", {"host.kind": "shared"})) == []


def test_a_sound_tier_has_no_finding_but_ok(around: Surroundings) -> None:
    assert not bad(tiers.remote_tier(around, "far"))
    (alone,) = tiers.cluster(around)
    assert alone.level is Level.OK and "no other node" in alone.seen and "secret" in alone.name


def test_a_tier_that_is_off_is_not_looked_at(around: Surroundings, packages: set[str]) -> None:
    packages.clear()
    (finding,) = tiers.remote_tier(changed(around, far__enabled="False", far__encrypt="False"), "far")
    assert finding.level is Level.OK and "off" in finding.seen


@pytest.mark.parametrize(
    ("url", "package"),
    [("mooncake://m:50051", "mooncake"), ("s3://b/p", "obstore"), ("gs://b", "obstore"), ("file:///d", "obstore")],
)
def test_a_missing_package_is_named_with_the_extra(around: Surroundings, url: str, package: str) -> None:
    (finding,) = bad(tiers.remote_tier(changed(around, far__url=url), "far"))
    assert finding.level is Level.FAIL and package in finding.seen and ".[remote]" in finding.advice


def test_a_store_that_does_not_answer_is_a_warning_with_the_reason(around: Surroundings) -> None:
    status = pb.StatusReply(degraded=[pb.DegradedStatus(part="far", mode="failed", reason="no route to host")])
    (finding,) = bad(tiers.remote_tier(replace(around, status=status), "far"))
    assert finding.level is Level.WARN and "failed: no route to host" in finding.seen and "every 2 s" in finding.advice
    other = pb.StatusReply(degraded=[pb.DegradedStatus(part="nvme", mode="failed", reason="")])
    assert not bad(tiers.remote_tier(replace(around, status=other), "far"))
    silent = [finding.seen for finding in tiers.remote_tier(replace(around, status=None), "far")]
    assert any("not known" in seen for seen in silent)


def test_encryption_that_is_off_is_warned_about(around: Surroundings) -> None:
    (finding,) = bad(tiers.remote_tier(changed(around, far__encrypt="False"), "far"))
    assert finding.level is Level.WARN and "far.encrypt" in finding.seen and "prompts" in finding.seen
    one = changed(around, tenant__chat__remote="plain", tenant__law__remote="encrypted", tenant__lab__remote="off")
    (finding,) = bad(tiers.remote_tier(one, "far"))
    assert "tenant chat " in finding.seen


@pytest.mark.parametrize("setting", ["far.credentials_file", "cluster.secret_file"])
def test_files_with_secrets_must_be_there_and_closed(around: Surroundings, tmp_path: Path, setting: str) -> None:
    path = tmp_path / "secret"
    here = changed(around, **{setting.replace(".", "__"): str(path)})

    def found() -> list[Finding]:
        return bad(tiers.cluster(here) if setting.startswith("cluster") else tiers.remote_tier(here, "far"))

    assert "does not exist" in found()[0].seen
    path.write_text("x" * 44)
    path.chmod(0o640)
    (finding,) = found()
    assert finding.level is Level.FAIL and "0640" in finding.seen and finding.advice == f"chmod 600 {path}"
    path.chmod(0o600)
    assert not found()
    path.unlink()
    path.mkdir()
    assert "not a regular file" in found()[0].seen


def test_a_short_secret_is_found(around: Surroundings, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("short\n")
    path.chmod(0o600)
    (finding,) = bad(tiers.cluster(changed(around, cluster__secret_file=str(path))))
    assert "too short" in finding.seen and "head -c 32" in finding.advice
