"""The files for systemd, Prometheus and Grafana are ones that these understand, and fit the daemon."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstored.config import load_config
from tests.reference.promql import RULE_TESTS, RULES, board, rules
from tests.tidy.tree import ROOT

_DEPLOY = ROOT / "deploy"
_UNIT = _DEPLOY / "systemd/kvstored.service"
_HOLDER_UNIT = _DEPLOY / "systemd/kvstored-holder.service"
_SOCKET_UNIT = _DEPLOY / "systemd/kvstored.socket"
_GPU_DROP_IN = _DEPLOY / "systemd/kvstored.service.d/gpu.conf"
_GPU_NODES_UNIT = _DEPLOY / "systemd/kvstored-gpu-nodes.service"
_INSTALLED_IN = "/opt/kvstored/bin"
_PRESERVE = "FileDescriptorStorePreserve"


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def _verify(unit: Path) -> str:
    """Return what systemd says against a unit file; nothing, if all is well. Older ones do not know what newer ones
    keep descriptors by, and go on without.
    """
    command = [_tool("systemd-analyze"), "verify", "--man=no", str(unit)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "\n".join(line for line in run.stderr.splitlines() if unit.name in line and _PRESERVE not in line)


@pytest.mark.parametrize("source", [_UNIT, _HOLDER_UNIT], ids=lambda path: path.stem)
def test_systemd_understands_the_unit(tmp_path: Path, source: Path) -> None:
    text = source.read_text()
    assert _INSTALLED_IN in text
    unit = tmp_path / source.name
    unit.write_text(re.sub(rf"{_INSTALLED_IN}/\w+", sys.executable, text))
    assert _verify(unit) == ""
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHouse=yes"))
    assert "ProtectHouse" in _verify(unit)


def test_systemd_understands_what_a_gpu_adds(tmp_path: Path) -> None:
    unit, nodes = tmp_path / _UNIT.name, tmp_path / _GPU_NODES_UNIT.name
    unit.write_text(re.sub(rf"{_INSTALLED_IN}/\w+", sys.executable, _UNIT.read_text()))
    nodes.write_text(re.sub(r"/usr/bin/nvidia-\w+", sys.executable, _GPU_NODES_UNIT.read_text()))
    drop_in = tmp_path / _GPU_DROP_IN.relative_to(_UNIT.parent)
    drop_in.parent.mkdir()
    drop_in.write_text(_GPU_DROP_IN.read_text())
    assert (_verify(unit), _verify(nodes)) == ("", "")
    drop_in.write_text(_GPU_DROP_IN.read_text().replace("DeviceAllow", "DeviceAllows"))
    assert "DeviceAllows" in _verify(unit), "the drop-in was not read"


@pytest.mark.parametrize("with_gpu", [False, True])
@pytest.mark.parametrize("source", [_UNIT, _HOLDER_UNIT], ids=lambda path: path.stem)
def test_systemd_finds_little_exposed(tmp_path: Path, source: Path, with_gpu: bool) -> None:
    (tmp_path / source.name).write_text(source.read_text())
    if with_gpu:
        (tmp_path / f"{source.name}.d").mkdir()
        (tmp_path / f"{source.name}.d/gpu.conf").write_text(_GPU_DROP_IN.read_text())
    command = [_tool("systemd-analyze"), "security", "--offline=true", "--threshold=15", str(tmp_path / source.name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout[-200:] + run.stderr


def test_every_line_of_the_sandbox_has_its_reason() -> None:
    """A comment above it, or above the lines that it belongs to."""
    sandbox = _UNIT.read_text().partition("# Sandbox")[2].partition("[Install]")[0]
    groups = re.split(r"\n(?=#)", sandbox.strip())
    assert len(groups) >= 10
    assert all(len([line for line in group.splitlines() if "=" in line and line[0] != "#"]) <= 6 for group in groups)


def test_systemd_understands_the_socket(tmp_path: Path) -> None:
    unit, service = tmp_path / _SOCKET_UNIT.name, tmp_path / _UNIT.name
    unit.write_text(_SOCKET_UNIT.read_text())
    service.write_text(re.sub(rf"{_INSTALLED_IN}/\w+", sys.executable, _UNIT.read_text()))
    assert _verify(unit) == ""
    unit.write_text(_SOCKET_UNIT.read_text().replace("SocketUser", "SocketOwner"))
    assert "SocketOwner" in _verify(unit)
    settings = dict(line.split("=", 1) for line in _UNIT.read_text().splitlines() if "=" in line and line[0].isalpha())
    socket_file = Path(f"/run/{settings['RuntimeDirectory']}/handshake.sock")
    assert f"ListenSequentialPacket={socket_file}\n" in _SOCKET_UNIT.read_text()
    assert settings["RuntimeDirectoryPreserve"] == "yes", "a stop would remove the socket's file"


def test_a_gpu_loosens_nothing_but_the_devices_of_nvidia() -> None:
    lines = _GPU_DROP_IN.read_text().partition("[Service]")[2].splitlines()
    settings = [tuple(line.split("=", 1)) for line in lines if line and not line.startswith("#")]
    assert dict(settings).keys() == {"PrivateDevices", "DevicePolicy", "DeviceAllow"}
    assert [value for name, value in settings if name != "DeviceAllow"] == ["no", "closed"]
    allowed = [value.split() for name, value in settings if name == "DeviceAllow"]
    assert dict(allowed) == {
        "char-195": "rw", "char-nvidia-uvm": "rw", "char-nvidia-caps": "r",
    }  # fmt: skip
    unit = _UNIT.read_text()
    assert "LimitMEMLOCK=infinity\n" in unit, "the worker registers host memory"
    assert "\nMemoryDenyWriteExecute=yes" not in unit, "the driver maps pages that it writes and executes"


def test_the_units_agree_on_the_holders_socket() -> None:
    path = "/run/kvstored-holder/holder.sock"
    assert f"Environment=KVSTORED_HOLDER={path}\n" in _UNIT.read_text()
    assert (
        f"--path {path}\n" in _HOLDER_UNIT.read_text()
        and "RuntimeDirectory=kvstored-holder\n" in _HOLDER_UNIT.read_text()
    )


def test_the_unit_does_what_the_daemon_counts_on() -> None:
    settings = dict(line.split("=", 1) for line in _UNIT.read_text().splitlines() if "=" in line and line[0].isalpha())
    config = load_config(_DEPLOY / "kvstored.toml")
    assert settings["Type"] == "notify"
    assert str(config.daemon.socket_dir) == f"/run/{settings['RuntimeDirectory']}"
    assert str(config.daemon.state_dir) == f"/var/lib/{settings['StateDirectory']}"
    assert (settings["RuntimeDirectoryMode"], settings["StateDirectoryMode"]) == ("0750", "0700")
    assert (settings["CacheDirectory"], settings["CacheDirectoryMode"]) == ("kvstored", "0700"), "compiled kernels"
    assert settings["ExecStart"].endswith("serve --config /etc/kvstored/kvstored.toml")
    assert settings["LimitCORE"] == "0"
    assert settings["RestartPreventExitStatus"] == "2 4", "a mistake is not tried again"
    assert settings["ExecReload"].endswith("kvctl reload")
    assert "PrivateUsers" not in settings, "the daemon distinguishes callers by their uid"


def test_users_and_groups_of_the_configuration_are_made() -> None:
    config = load_config(_DEPLOY / "kvstored.toml")
    lines = (_DEPLOY / "sysusers.d/kvstored.conf").read_text().splitlines()
    made = {line.split()[1] for line in lines if line.startswith(("u ", "g "))}
    assert {config.daemon.socket_group, config.daemon.admin_group} <= made
    assert f"m {config.daemon.socket_group} {config.daemon.admin_group}" in lines


@pytest.mark.parametrize(
    ("tool", "file"),
    [("systemd-sysusers", "sysusers.d/kvstored.conf"), ("systemd-tmpfiles", "tmpfiles.d/kvstored.conf")],
)
def test_systemd_understands_users_and_directories(tool: str, file: str, tmp_path: Path) -> None:
    """Applied to an empty root of the test's own, never to this machine."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nkvstored:x:901:901::/:/bin/false\n")
    (tmp_path / "etc/group").write_text("root:x:0:\nkvstored:x:901:\n")
    create = ["--create"] if tool == "systemd-tmpfiles" else []
    command = [_tool(tool), f"--root={tmp_path}", *create, str(_DEPLOY / file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in run.stderr or "Failed to chown" in run.stderr:
        pytest.skip(f"{tool} needs root to act even on a root of its own")
    assert (run.returncode, run.stderr) == (0, "") or "Creating" in run.stderr, run.stderr
    if create:
        assert (tmp_path / "run/kvstored").stat().st_mode & 0o777 == 0o750
    else:
        assert "kvstored-admin" in (tmp_path / "etc/group").read_text()


def test_the_dockerfile_has_nothing_to_complain_about() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint (of the dev extra) is not installed")
    run = subprocess.run([linter, _DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "")


def _stages() -> list[str]:
    """Return the Dockerfile's stages, with lines joined as the builder joins them."""
    return re.split(r"^FROM ", (_DEPLOY / "Dockerfile").read_text().replace("\\\n", ""), flags=re.MULTILINE)[1:]


def _copied() -> list[str]:
    """Return the names that the Dockerfile's first stage copies out of the tree."""
    return [name for line in re.findall(r"^COPY (.*) \S+$", _stages()[0], re.MULTILINE) for name in line.split()]


def test_the_image_holds_every_source_of_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    read_by_setup = re.findall(r'with_name\("(.+?)"\)', (ROOT / "setup.py").read_text())
    needed = [*settings["tool"]["setuptools"]["packages"]["find"]["where"], settings["project"]["readme"]]
    needed += [*settings["project"]["license-files"], "pyproject.toml", "setup.py", *read_by_setup]
    assert set(needed) == set(_copied()) and "CHANGELOG.md" in read_by_setup


def test_the_image_has_compiled_copies_and_codecs_and_no_compiler() -> None:
    """The installed code compiles them, as in the Debian package, where there is a compiler."""
    build, result = _stages()
    assert not build.partition(" ")[0].endswith("-slim-bookworm") and result.startswith("python:3.13-slim-bookworm")
    (shipping,) = re.findall(r"&& /opt/kvstored/bin/python -c '([^']+)'", build)
    (packaged,) = re.findall(r"bin/python -c '([^']+)'", (_DEPLOY / "debian/rules").read_text().replace("\\\n", ""))
    assert shipping.split() == packaged.split()
    assert all(f"{module}.ship()" in packaged for module in ("estimates", "host_copies", "native"))
    assert "COPY --from=build /opt/kvstored /opt/kvstored" in result


def test_the_board_is_one_that_grafana_reads() -> None:
    """The classes of Grafana's library, which are made from the schema of boards, keep all that the file says."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk (dev extra)")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    written = board()
    read = json.loads(JSONEncoder().encode(models.Dashboard.from_json(written)))
    assert _kept(written, read) == []


def _kept(written: Any, read: Any, place: str = "") -> list[str]:
    """Return the places of `written` that are not in `read`."""
    if isinstance(written, dict):
        return [lost for name, value in written.items() for lost in _kept(value, read.get(name), f"{place}.{name}")]
    if isinstance(written, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [lost for at, (value, other) in pairs for lost in _kept(value, other, f"{place}[{at}]")]
    return [] if written == read else [place]


def test_the_first_row_of_the_board_answers_the_first_questions() -> None:
    panels = board()["panels"]
    assert [panel["title"] for panel in panels if panel["gridPos"]["y"] == 0] == [
        "Hit share by tier", "Misses by cause", "Used of limit", "Written a day", "Load time against prefill replaced",
        "Promotions late",
    ]  # fmt: skip
    taken = [
        (across, down)
        for grid in (panel["gridPos"] for panel in panels)
        for across in range(grid["x"], grid["x"] + grid["w"])
        for down in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(taken) == len(set(taken)) and max(across for across, _ in taken) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_alerts_are_raised_when_they_should_be() -> None:
    for command in (["check", "rules", RULES], ["test", "rules", RULE_TESTS]):
        run = subprocess.run([_tool("promtool"), *command], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_is_tested_and_has_a_runbook() -> None:
    headings = set(re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    cases = RULE_TESTS.read_text()
    for rule in rules():
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert name in headings, "its section says what to do"
        assert re.search(rf"alertname: {name}\n\s+exp_alerts", cases), f"no test raises {name}"
    assert {name for name in headings if name.startswith("Kvstored")} == {rule["alert"] for rule in rules()}
