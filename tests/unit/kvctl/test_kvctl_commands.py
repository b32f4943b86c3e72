"""kvctl against a double of the admin socket: texts, JSON, exit codes, and advice when things are missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvctl.arguments import build_parser
from kvctl.main import main
from kvctl.output import DENIED, FAILED, MEANINGS, OK, UNREACHABLE, USAGE
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2
from tests.reference import forked
from tests.reference.fake_admin import FakeAdmin
from tests.reference.fake_daemon import FakeDaemon, Knobs

COMMANDS = [
    "status",
    "tiers",
    "tenants",
    "blocks",
    "config",
    "drop",
    "flush",
    "drain",
    "shutdown",
    "invalidate",
    "ping",
    "put",
    "get",
    "prefetch",
    "delete",
    "explain",
    "bench",
]


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    monkeypatch.setenv("KVSTORED_SOCKET_DIR", str(tmp_path))
    with FakeAdmin(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("status", ["state            serving", "up               2 h 3 min", "1,234,567", "nvme>host"]),
        ("status", ["1.0 GiB of 4.0 GiB (25 %)", "warning: memlock limit is low", "9.9 (protocol 1)"]),
        ("tiers", ["host  ok", "25 %", "100 %", "/var/kv", "host holds: blocks 1.0 GiB"]),
        (
            "tiers",
            ["host expects: hot 24 blocks, 24.0 MiB; warm 0 blocks, 0 B; cold 1,000 blocks, 1000 MiB (by chain"],
        ),
        ("tenants", ["uid-1000", "75 %", "nobody"]),
        (
            "tenants rename uid-7 alice --replace",
            ["alice has 9 blocks (9.0 MiB) of uid-7", "dropped 2 blocks (2.0 MiB)", "1 client has to connect again"],
        ),
        (
            "tenants drop alice --yes",
            [
                "dropped 9 blocks (9.0 MiB) of alice",
                "2 clients disconnected: end processes that have objects mapped",
                "1 block stayed in use",
                "key is destroyed",
                "12 slots",
                "0 are read",
            ],
        ),
        ("drop --tier host", ["dropped 7 blocks (7.0 MiB) from host", "kept 2 blocks that are in use"]),
        ("drop --tier nvme", ["kept 3 blocks (3.0 MiB) that are only in nvme; --discard removes them"]),
        ("drop --all --yes", ["from all tiers"]),
        ("drop --pins --tenant alice --owner nightly", ["unpinned 4 blocks of alice"]),
        ("flush", ["wrote 5 blocks"]),
        ("drain --undo", ["taking clients again"]),
        ("drain", ["state: drained"]),
        ("shutdown", ["daemon 4242 is stopping"]),
        ("invalidate abababab", ["removed 9 blocks (9.0 MiB) of abab"]),
        ("blocks --limit 3", ["000000000000", "host+nvme", "3 of 5 blocks"]),
        ("blocks --by model", ["llama:abab", "25 %", "4.0 MiB", "8 blocks, 16.0 MiB", "1 of 3 groups"]),
        ("blocks --by prefix", ["PREFIX", "LONGEST", "0123456789ab  uid-7"]),
    ],
)
def test_commands_say_what_the_daemon_said(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], command: str, expected: list[str]
) -> None:
    assert main(command.split()) == OK
    text = capsys.readouterr().out
    for part in expected:
        assert part in text


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(("command", "method"), [("status", "Status"), ("tiers", "Tiers"), ("tenants", "Tenants")])
def test_json_is_one_document_with_numbers_as_numbers(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], command: str, method: str, place: str
) -> None:
    assert main(["--json", command] if place == "before" else [command, "--json"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {field.name for field in admin.replies[method].DESCRIPTOR.fields}
    if command == "status":
        assert document["rss_bytes"] == 64 << 20
        assert document["counters"] == {"lookups": 10}
        assert document["lanes"][0]["queued_by_priority"] == [1, 2, 0, 0]
        assert document["leases"] == 0


def test_blocks_pages_until_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAdmin(tmp_path, stored_blocks=2500) as admin:
        arguments = ["--socket-dir", str(tmp_path), "--json", "blocks"]
        assert main([*arguments, "--limit", "2300", "--tier", "nvme", "--prefix", "3FA9"]) == OK
        listed = json.loads(capsys.readouterr().out)["blocks"]
        assert [block["depth"] for block in listed] == list(range(2300))
        assert [request.limit for request in admin.requests] == [1000, 1000, 300]
        assert {(request.tier, request.key_prefix) for request in admin.requests} == {("nvme", "3fa9")}


def test_requests_carry_what_was_asked(admin: FakeAdmin) -> None:
    main(["drop", "--tier", "host", "--tenant", "t", "--discard"])
    main(["drain", "--wait", "2"])
    main(["shutdown", "--now"])
    main(["tenants", "rename", "uid-7", "alice"])
    assert admin.requests == [
        pb.DropRequest(tier="host", tenant="t", discard=True),
        pb.DrainRequest(timeout_ms=2000),
        pb.ShutdownRequest(now=True),
        pb.RenameTenantRequest(old="uid-7", new="alice"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["drop"], "either --tier TIER or --all"),
        (["drop", "--all", "--tier", "host"], "either --tier TIER or --all"),
        (["drop", "--all"], "add --yes if you mean it"),
        (["drop", "--pins"], "drop --pins takes --tenant TENANT"),
        (["drop", "--pins", "--tenant", "a", "--tier", "host"], "and nothing else"),
        (["drop", "--tier", "host", "--owner", "a"], "--owner belongs to --pins"),
        (["drop", "--tier", "tape"], "tape"),
        (["blocks", "--prefix", "xyz"], "hex digits"),
        (["blocks", "--limit", "0"], "whole number"),
        (["blocks", "--class", "lukewarm"], "lukewarm"),
        (["blocks", "--sort", "age"], "age"),
        (["blocks", "--reverse"], "add --sort"),
        (["blocks", "--by", "model", "--sort", "size"], "leave --sort"),
        (["blocks", "--by", "model", "--prefix-blocks", "2"], "add --by prefix"),
        (["blocks", "--sort", "idle", "--limit", "1001"], "at most 1000"),
        (["report", "--port", "80"], "--port belongs to --serve"),
        (["report", "--serve", "-o", "x"], "writes no file"),
        (["status", "--timeout", "-1"], "seconds"),
        (["tenants", "rename", "alice"], "two names"),
        (["tenants", "drop", "alice"], "give one name, and --yes"),
        (["tenants", "alice"], "invalid choice: 'alice'"),
        (["tenants", "list", "--replace"], "takes nothing further"),
        (["quarantine"], "required: action\n"),
        (["objects", "put", "weights", "model.gguf"], "takes a name and --weights PATH"),
        (["objects", "put", "weights", "5", "--file", "x"], "takes a name and --weights PATH"),
        (["objects", "ttl", "weights", "soon"], "objects ttl: S must be a whole number"),
        (["quarantine", "release"], "--all"),
        (["quarantine", "list", "1:4096"], "takes nothing further"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_usage_is_status_2_and_no_request(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, as_json: bool
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"] if as_json else arguments)
    assert ended.value.code == USAGE
    printed = capsys.readouterr()
    assert said in printed.err
    if as_json:
        document = json.loads(printed.out)
        assert said.strip() in document["error"] and document["exit_code"] == USAGE
    else:
        assert not printed.out
    assert not admin.requests


@pytest.mark.parametrize(
    "arguments", [["blocks", "--tenant", "\udcff"], ["explain", "\udcff"], ["quarantine", "release", "\udcff"]]
)
def test_what_is_not_utf_8_is_wrong_usage(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == USAGE
    assert "not valid UTF-8" in capsys.readouterr().err
    assert not admin.requests


@pytest.mark.parametrize("command", ["status", "status --json", "blocks --limit 1"])
def test_a_full_disk_behind_a_redirection_is_one_line(admin: FakeAdmin, command: str) -> None:
    with open("/dev/full", "w") as full:
        ended = forked.run([sys.executable, "-m", "kvctl.main", *command.split()], stdout=full)
    assert ended.returncode == FAILED
    assert ended.stderr == "kvctl: No space left on device\n"


def test_a_terminal_without_our_letters_gets_others(admin: FakeAdmin) -> None:
    admin.replies["Status"] = pb.StatusReply(state="serving", config_path="/tmp/für mich.toml")
    for command in ("status", "status --json"):
        run = [sys.executable, "-m", "kvctl.main", *command.split()]
        ended = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert (ended.returncode, ended.stderr) == (OK, "")


def test_a_fingerprint_is_taken_as_listings_show_it(admin: FakeAdmin) -> None:
    assert main(["invalidate", "llama:abababab"]) == OK
    assert [request.fingerprint for request in admin.requests if isinstance(request, pb.InvalidateRequest)] == [
        "abababab"
    ]


def test_a_fingerprint_that_is_none_is_wrong_usage(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invalidate", "abc"]) == USAGE
    assert "kvctl --json tenants" in capsys.readouterr().err
    assert not admin.requests


@pytest.mark.parametrize(
    ("method", "reply", "command"),
    [
        ("Flush", pb.FlushReply(written_blocks=1, pending_blocks=2), ["flush"]),
        ("Drain", pb.DrainReply(clients_left=1, state="draining"), ["drain"]),
        ("Invalidate", pb.InvalidateReply(), ["invalidate", "abababab"]),
    ],
)
def test_unfinished_work_is_status_1(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], method: str, reply: object, command: list[str]
) -> None:
    admin.replies[method] = reply
    assert main(command) == FAILED
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, DENIED, "permission denied: not you"),
        (grpc.StatusCode.INVALID_ARGUMENT, FAILED, "not you"),
        (grpc.StatusCode.UNIMPLEMENTED, FAILED, "older than kvctl"),
        (grpc.StatusCode.UNAVAILABLE, UNREACHABLE, "went away"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, UNREACHABLE, "--timeout"),
    ],
)
def test_failures_have_codes_and_one_clear_line(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], code: grpc.StatusCode, exit_code: int, said: str
) -> None:
    admin.failure = (code, "not you")
    assert main(["--json", "status"]) == exit_code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert json.loads(printed.out)["exit_code"] == exit_code


@pytest.mark.parametrize("command", ["status", "ping"])
def test_no_daemon_is_status_3_with_the_command_that_starts_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["--socket-dir", str(tmp_path), command]) == UNREACHABLE
    assert f"kvstored serve --socket-dir {tmp_path}" in capsys.readouterr().err


def test_a_stale_socket_is_said_to_be_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "admin.sock"))
    assert main(["--socket-dir", str(tmp_path), "status"]) == UNREACHABLE
    assert "stale socket" in capsys.readouterr().err


def test_a_path_too_long_for_a_socket_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket-dir", str(tmp_path / ("d" * 120)), "status"]) == UNREACHABLE
    assert "shorter socket directory" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give up root in a child")
def test_a_missing_permission_is_status_4_and_names_the_group(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(tmp_path / "admin.sock"))
        closed.listen()
        (tmp_path / "admin.sock").chmod(0o600)
        for directory in (tmp_path, *tmp_path.parents):
            if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
                directory.chmod(directory.stat().st_mode | 0o011)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.dup2(writer, 2)
            os._exit(_main_in_child(tmp_path))
        os.close(writer)
        said = os.read(reader, 65536).decode()
        os.close(reader)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == DENIED
        assert "kvstored-admin" in said


def _main_in_child(directory: Path) -> int:
    with os.fdopen(2, "w", closefd=False) as errors:
        sys.stderr = errors
        return main(["--socket-dir", str(directory), "status"])


def test_ping_takes_the_way_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeDaemon(tmp_path / "s") as daemon:
        arguments = ["--socket-dir", str(tmp_path / "s"), "ping", "--count", "3"]
        assert main(arguments) == OK
        assert "3 of 3 answered" in capsys.readouterr().out
        assert daemon.log.count("ping") >= 3
        assert main([*arguments, "--json"]) == OK
        reply = json.loads(capsys.readouterr().out)
        assert (reply["pings"], reply["lost"]) == (3, 0)
    refuse = kvstore_pb2.Error(kind=kvstore_pb2.ERROR_KIND_FORBIDDEN, message="no tenant for you")
    with FakeDaemon(tmp_path / "s", Knobs(refuse=refuse)):
        assert main(arguments) == FAILED
        assert "no tenant for you" in capsys.readouterr().err


def test_help_shows_every_command_code_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = build_parser().format_help()
    assert all(command in text for command in COMMANDS)
    assert all(f"{code}  {meaning}" in text for code, meaning in MEANINGS.items())
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert f"examples:\n  kvctl {command}" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvctl ")


def test_the_page_about_kvctl_lists_every_command_and_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kvctl.md").read_text()
    assert all(f"| `{command}` |" in page for command in COMMANDS)
    assert all(f"| {code} | {meaning} |" in page for code, meaning in MEANINGS.items())
