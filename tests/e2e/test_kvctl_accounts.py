"""Whom an engine serves: the tenants of a server's API keys, by name in what an operator sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.main import main
from kvctl.output import OK
from kvstore_engine.server.assembly import TenantSessions, fingerprint_for
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = replace(model(), model_name="tiny-llama")
BLOCKS = {"anna": 5, "bert": 2, "": 1}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Each tenant of a server asks, in vain, stores and asks again."""
    with running_daemon() as running:
        sessions = TenantSessions(running.socket_dir, MODEL)
        for tenant, blocks in BLOCKS.items():
            session: Any = sessions(tenant)
            assert eventually(lambda session=session: session.state == "connected")
            tokens, payloads = tokens_of(1, blocks), payloads_of(blocks, blocks, MODEL)
            assert session.lookup(tokens, deadline_s=20).reason == "never_stored"
            assert session.put(tokens, payloads=payloads, wait="settled", deadline_s=20).stored_blocks == blocks
            with session.get(tokens, deadline_s=20) as lease:
                assert len(lease) == blocks and holds(lease, payloads), "the same tokens are other blocks"
        yield running
        sessions.close()


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def test_an_operator_sees_who_holds_and_misses_what(kvctl: Kvctl) -> None:
    (tenant,) = kvctl.json("tenants")["tenants"]
    assert int(tenant["blocks"]) == sum(BLOCKS.values()) and tenant["clients"] == 3
    accounts = {account["name"]: account for account in tenant["accounts"]}
    assert set(accounts) == {"anna", "bert"}
    for name, account in accounts.items():
        blocks = BLOCKS[name]
        assert [int(account[what]) for what in ("blocks", "clients", "lookups", "hit_blocks", "missed_blocks")] == [
            blocks, 1, 1, blocks, blocks,
        ]  # fmt: skip
        assert int(account["host_bytes"]) * sum(BLOCKS.values()) == int(tenant["host_bytes"]) * blocks > 0
    lines = kvctl("tenants").out.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == [tenant["name"], f"{tenant['name']}/anna", f"{tenant['name']}/bert"], "the one with most first"
    assert f"{MODEL.model_name}:" in kvctl("blocks --by model").out and " for anna" in kvctl("blocks --by model").out
    assert int(kvctl.json(["blocks", "--model", "for anna", "--by", "model"])["blocks"]) == BLOCKS["anna"]
    assert " /anna" in kvctl("top --once").out


def test_the_report_names_them(daemon: RunningDaemon, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["--socket-dir", str(daemon.socket_dir), "report", "-o", str(page)]) == OK
    assert "/anna" in page.read_text() and "/bert" in page.read_text()


def test_a_model_that_differs_is_another_fingerprint_and_a_new_account_is_not(daemon: RunningDaemon) -> None:
    other = replace(fingerprint_for(MODEL, "anna"), kv_dtype="q8_0")
    with daemon.connect(other) as session:
        assert session.lookup(tokens_of(1, 1)).reason == "other_fingerprint"
    with daemon.connect(fingerprint_for(MODEL, "carl")) as session:
        assert session.lookup(tokens_of(1, 1)).reason == "never_stored"
    with daemon.connect(replace(fingerprint_for(MODEL, "anna"), shard_index=1, shard_count=2)) as session:
        assert session.lookup(tokens_of(1, 1)).reason == "never_stored", "another rank's"
    with daemon.connect(replace(other, model_name="another")) as session:
        assert session.lookup(tokens_of(1, 1)).reason == "never_stored"


def test_it_is_known_after_a_restart(daemon: RunningDaemon, kvctl: Kvctl) -> None:
    daemon.stop()
    daemon.start()

    def accounts() -> dict[str, int]:
        (tenant,) = kvctl.json("tenants")["tenants"]
        return {account["name"]: int(account["blocks"]) for account in tenant["accounts"]}

    assert eventually(lambda: accounts() == {"anna": 5, "bert": 2}), "names are read while the daemon serves"
    other = replace(fingerprint_for(MODEL, "bert"), kv_dtype="q8_0")
    with daemon.connect(other) as session:
        assert session.lookup(tokens_of(1, 1)).reason == "other_fingerprint"
