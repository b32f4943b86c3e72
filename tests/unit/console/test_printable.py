"""Text from a disk or a wire never reaches a terminal or a log as it came: escaped, on one line."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import grpc
import pytest

from kvctl.main import main
from kvctl.output import FAILED, OK
from kvstore_console.log_format import PrintableFormatter
from kvstore_console.printable import printable, printable_lines
from kvstore_console.terminal import Line
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.nvme.layout import FORMAT_VERSION
from kvstored.cli import main as kvstored
from kvstored.exits import failure
from tests.reference.fake_admin import FakeAdmin

EVIL = "\x1b]0;owned\x07\x1b[2J\u202egnp\r\x9b31m"  # a title, a cleared screen, a reversal, C1


def is_safe(text: str) -> bool:
    return "owned" in text and all(char.isprintable() or char == "\n" for char in text)


def test_what_is_printable_stays_and_the_rest_is_spelled_out() -> None:
    assert printable("für 模型 → 1.0") == "für 模型 → 1.0"
    assert printable("\x1b[31m\n\t\x00\u202e\udcff") == r"\x1b[31m\n\t\x00\u202e\udcff"
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"
    assert printable(printable(EVIL)) == printable(EVIL) and is_safe(printable(EVIL))


def test_a_log_record_is_one_line_and_a_traceback_keeps_its_lines() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("client %s", EVIL + "\nERROR forged")
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("WARNING client") and lines[0].endswith(r"\nERROR forged")
    assert lines[1] == "ERROR failed" and len(lines) > 3 and is_safe(out.getvalue())


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    monkeypatch.setenv("KVSTORED_SOCKET_DIR", str(tmp_path))
    return FakeAdmin(tmp_path)


def evil_replies() -> dict[str, object]:
    return {
        "Status": pb.StatusReply(
            state="serving", version=EVIL, config_path=EVIL, warnings=[EVIL],
            degraded=[pb.DegradedStatus(part="nvme", mode="failed", reason=EVIL)],
        ),
        "Tiers": pb.TiersReply(tiers=[pb.TierStatus(name="host", state=EVIL, path=EVIL, policy=EVIL)]),
        "Tenants": pb.TenantsReply(tenants=[pb.TenantStatus(name=EVIL, fingerprints=[EVIL])]),
        "Drain": pb.DrainReply(state=EVIL),
        "Invalidate": pb.InvalidateReply(blocks=1, fingerprints=[EVIL]),
    }  # fmt: skip


@pytest.mark.parametrize("command", ["status", "tiers", "tenants", "drain", "invalidate abababab"])
def test_kvctl_escapes_what_the_daemon_says(admin: FakeAdmin, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with admin:
        admin.replies |= evil_replies()
        assert main(command.split()) == OK
    assert is_safe(capsys.readouterr().out)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_kvctl_escapes_a_refusal(admin: FakeAdmin, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with admin:
        admin.failure = (grpc.StatusCode.INVALID_ARGUMENT, EVIL.replace("\r", ""))
        assert main(["tiers", *options]) == FAILED
    printed = capsys.readouterr()
    assert is_safe(printed.err) and printed.err.count("\n") == 1
    assert "\x1b" not in printed.out


def test_a_coloured_line_has_our_colours_and_no_others() -> None:
    line = Line().add(EVIL, "red").render(1000, colour=True)
    assert line.startswith("\x1b[31m") and line.endswith("\x1b[0m") and line.count("\x1b") == 2


def test_kvstored_escapes_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(f"{EVIL} is there") == FAILED
    assert is_safe(capsys.readouterr().err)


def test_a_strays_name_in_a_directory_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slabs").mkdir()
    (tmp_path / "format").write_text(f"format_version: {FORMAT_VERSION}\n")
    (tmp_path / "slabs" / EVIL.replace("/", "")).touch()
    kvstored(["check", str(tmp_path), "--notes"])
    assert is_safe(capsys.readouterr().out)
