"""The doctor's checks of GPU tiers: the devices of NVIDIA's driver, and a unit that hides them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.doctor import tiers
from kvctl.doctor.surroundings import DaemonSettings, Finding, Level, Surroundings
from tests.tidy.tree import ROOT

NODES = ("nvidia0", "nvidiactl", "nvidia-uvm")


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    """A machine with one GPU, and systemd with a unit that has no sandbox."""
    dev, systemd = tmp_path / "dev", tmp_path / "systemd"
    dev.mkdir()
    systemd.mkdir()
    for name in NODES:
        (dev / name).touch()
        (dev / name).chmod(0o666)
    settings = DaemonSettings("a test", {"vram.device": "0"})
    return Surroundings(tmp_path, settings, dev=dev, systemd=systemd, run=lambda command: "LoadState=loaded\n")


def unit_with(around: Surroundings, *lines: str) -> list[Finding]:
    shown = "\n".join(["LoadState=loaded", *lines])
    return list(tiers.unit(replace(around, run=lambda command: shown)))


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def levels(findings: Iterable[Finding]) -> set[Level]:
    return {finding.level for finding in findings}


def test_gpu_tiers_are_known_from_a_daemon_and_from_a_file() -> None:
    daemons = {"vram.device": "0", "vram.from_nvme": "bounce", "far.encrypt": "True"}
    assert tiers.gpu_tiers(DaemonSettings("", daemons)) == ["vram"]
    assert tiers.gpu_tiers(DaemonSettings("", {"host.kind": "shared", "g.kind": "gpu", "s.kind": "remote"})) == ["g"]
    assert tiers.gpu_tiers(DaemonSettings("", {"host.kind": "shared"})) == []


def test_a_machine_whose_devices_can_be_opened_is_fine(around: Surroundings) -> None:
    found = by_name(tiers.devices(around))
    assert found.keys() == set(NODES) and levels(found.values()) == {Level.OK}
    assert levels(tiers.unit(around)) == {Level.OK}


def test_a_device_that_is_not_there_says_how_it_is_made(around: Surroundings) -> None:
    for name in NODES:
        (around.dev / name).unlink()
    found = by_name(tiers.devices(around))
    assert found.keys() == set(NODES) and levels(found.values()) == {Level.FAIL}
    assert "nvidia-modprobe" in found["nvidia-uvm"].advice and "does not exist" in found["nvidia0"].seen


def test_a_device_whose_driver_does_not_answer_fails(around: Surroundings) -> None:
    """Opening a socket fails as a node without a driver does: there is no such device."""
    node = around.dev / "nvidiactl"
    node.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(node))
        found = by_name(tiers.devices(around))["nvidiactl"]
    assert found.level is Level.FAIL and "No such device" in found.seen and "NVRM" in found.advice


def test_a_device_of_a_group_names_the_group(around: Surroundings) -> None:
    node = around.dev / "nvidia0"
    node.chmod(0o660)
    found = by_name(tiers.devices(around))["nvidia0"]
    assert found.level is Level.WARN and f"SupplementaryGroups={node.stat().st_gid}" in found.advice


def test_a_unit_that_hides_the_devices_fails(around: Surroundings) -> None:
    (hides,) = unit_with(around, "PrivateDevices=yes", "DevicePolicy=auto")
    assert hides.level is Level.FAIL and "hides /dev/nvidia*" in hides.seen and "gpu.conf" in hides.advice
    (closes,) = unit_with(around, "PrivateDevices=no", "DevicePolicy=closed", "DeviceAllow=char-195 rw")
    assert closes.level is Level.FAIL and closes.seen.endswith("leaves out /dev/nvidia-uvm")
    (listed,) = unit_with(around, "PrivateDevices=no", "DevicePolicy=auto", "DeviceAllow=char-rtc r")
    assert "/dev/nvidiactl and /dev/nvidia-uvm" in listed.seen
    (executes,) = unit_with(around, "PrivateDevices=no", "DevicePolicy=auto", "MemoryDenyWriteExecute=yes")
    assert executes.level is Level.FAIL and "MemoryDenyWriteExecute=no" in executes.advice


def test_our_drop_in_is_what_the_doctor_asks_for(around: Surroundings) -> None:
    drop_in = (ROOT / "deploy/systemd/kvstored.service.d/gpu.conf").read_text()
    lines = [line for line in drop_in.partition("[Service]")[2].splitlines() if line[:1].isalpha()]
    assert levels(unit_with(around, *lines)) == {Level.OK}
    patterns = ("PrivateDevices=no", "DevicePolicy=strict", "DeviceAllow=char-nvidia* rw")
    assert levels(unit_with(around, *patterns)) == {Level.OK}


def test_without_a_unit_or_systemd_nothing_is_said_of_them(around: Surroundings) -> None:
    assert not list(tiers.unit(replace(around, run=lambda command: "LoadState=not-found\nPrivateDevices=yes\n")))
    assert not list(tiers.unit(replace(around, systemd=around.dev / "nowhere")))


def test_a_missing_library_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings"):  # it may be loaded already
        monkeypatch.setitem(sys.modules, name, None)
    (found,) = tiers.library()
    assert found.level is Level.FAIL and ".[gpu]" in found.advice
