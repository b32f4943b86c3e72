"""Operators and trainers have a say while the daemon runs: shares of tenants, terms of blocks, versions of weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvstore_client import KVStoreError
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1 import admin_pb2
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
ME = f"uid-{os.geteuid()}"
BLOCKS = 3


def version(number: int) -> Any:
    return replace(MODEL, weights="policy", weights_version=number)


def fill(daemon: RunningDaemon, *conversations: int, of: Any = MODEL, **terms: Any) -> None:
    with daemon.connect(of) as session:
        for number in conversations:
            session.put(
                tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), durability="always",
                wait="settled", **terms,
            )  # fmt: skip


def stored(daemon: RunningDaemon, number: int, of: Any = MODEL) -> int:
    with daemon.connect(of) as session:
        return session.lookup(tokens_of(number, BLOCKS)).blocks


@pytest.fixture
def fingerprint(tmp_path: Any) -> str:
    path = tmp_path / "model.json"
    path.write_bytes(MODEL.canonical())
    return str(path)


def tokens(number: int) -> str:
    return ",".join(map(str, tokens_of(number, BLOCKS)))


def test_settings_of_a_tenant_hold_at_once_and_after_a_kill(capfdbinary: Any) -> None:
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1)
        said = kvctl(["tenants", "set", ME, "--min", "4MiB", "--max", "16MiB", "--weight", "3", "--ttl", "600"]).out
        assert "host_max 16.0 MiB" in said and "host_weight 3" in said
        kvctl(["tenants", "set", ME, "--tier", "nvme", "--max", "64MiB"])
        fill(daemon, 2)
        lives = {block["depth"]: block["expires_in_s"] > 0 for block in kvctl.json("blocks")["blocks"]}
        assert any(lives.values())

        def shown() -> dict[str, tuple[str, str]]:
            settings = kvctl.json("config")["settings"]
            return {each["key"]: (each["written"], each["origin"]) for each in settings if each["tenant"] == ME}

        ours = shown()
        assert ours["host_max"] == ('"16MiB"', "kvctl tenants set") and ours["nvme_max"][0] == '"64MiB"'
        daemon.kill9()
        daemon.restart()
        assert shown() == ours
        assert "min 4.0 MiB max 16.0 MiB weight 3" in kvctl("tenants").out
        kvctl("reload")
        assert shown() == ours
        kvctl(["tenants", "set", ME, "--max", "default"])
        assert "host_max" not in shown()
        kvctl(["tenants", "reset", ME])
        daemon.kill9()
        daemon.restart()
        assert not {"host_min", "host_weight", "nvme_max", "ttl_s"} & shown().keys()


def test_settings_that_the_file_contradicts_cost_no_other_tenant_its_own(tmp_path: Any, capfdbinary: Any) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[[tenant]]\nname = "a"\n[[tenant]]\nname = "b"\n')
    with running_daemon(config=file) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        kvctl(["tenants", "set", "a", "--min", "8MiB"])
        kvctl(["tenants", "set", "b", "--weight", "3"])
        file.write_text('[[tenant]]\nname = "a"\nhost_max = "4MiB"\n[[tenant]]\nname = "b"\n')
        said = kvctl("reload", exit_code=1).err
        assert "tenant a: host_max 4.0 MiB is below its host_min" in said and "kvctl tenants set has" in said
        daemon.kill9()
        daemon.restart()
        assert "settings of kvctl tenants set for a are not in force: tenant a: host_max" in daemon.log
        assert "weight 3" in kvctl("tenants").out
        kvctl(["tenants", "reset", "a"])
        kvctl("reload")


def test_settings_of_a_user_make_it_no_other_tenant(tmp_path: Any, capfdbinary: Any) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text("")
    with running_daemon(config=file) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1)
        kvctl(["tenants", "set", ME, "--weight", "3"])
        assert "out of reach" not in daemon.log and stored(daemon, 1) == BLOCKS
        file.write_text(f'[[tenant]]\nname = "group"\ngids = [{os.getegid()}]\n')
        kvctl("reload")
        with daemon.connect(MODEL) as session:
            assert session.tenant == "group"


def test_settings_of_a_tenant_that_is_nobody_are_said_to_be_so(tmp_path: Any, capfdbinary: Any) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text(f'[[tenant]]\nname = "chat"\nuids = [{os.geteuid()}]\n')
    with running_daemon(config=file) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1)
        said = kvctl(["tenants", "set", ME, "--weight", "3"]).out
        assert f"nobody is {ME}: uid {os.geteuid()} is tenant chat; `kvctl tenants set chat`" in said
        for words in (["reset", ME], ["set", "chat", "--weight", "3"], ["set", "uid-4999", "--weight", "3"]):
            assert "nobody" not in kvctl(["tenants", *words]).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("set", "nobody", "--min", "1MiB"), "no tenant 'nobody'"),
        (("set", ME, "--min", "100GiB"), "host_min are 100 GiB together"),
        (("set", ME, "--min", "4MiB", "--max", "2MiB"), "is below its host_min"),
        (("set", ME, "--weight", "many"), "host_weight must be a whole number"),
        (("set", ME, "--tier", "tape", "--min", "1MiB"), "tape_min cannot be set while the daemon runs"),
    ],
)
def test_wrong_settings_change_nothing(words: tuple[str, ...], says: str, keeper: Callable[..., Any]) -> None:
    done = keeper(["tenants", *words], exit_code=1)
    assert says in done.err and "Traceback" not in done.err
    assert "min" not in keeper("tenants").out


@pytest.fixture(scope="module")
def served() -> Any:
    with running_daemon() as daemon:
        fill(daemon, 1)
        yield daemon


@pytest.fixture
def keeper(served: RunningDaemon, capfdbinary: Any) -> Any:
    return Kvctl(served, capfdbinary)


def test_pins_and_times_to_live_by_prompt_key_model_and_tenant(fingerprint: str, capfdbinary: Any) -> None:
    with running_daemon("nvme.enabled=false") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1, 2)

        def facts() -> list[tuple[int, bool, list[str]]]:
            blocks = kvctl.json("blocks")["blocks"]
            return sorted((each["depth"], each["expires_in_s"] > 0, each["pinned_by"]) for each in blocks)

        assert "pins 3 of 3 blocks" in kvctl(["pin", "a", "--tokens", tokens(1), "--fingerprint", fingerprint]).out
        assert [owners for *_, owners in facts()].count(["a"]) == BLOCKS
        assert kvctl(["pin", "a", "--tokens", tokens(9), "--fingerprint", fingerprint], exit_code=5).out.endswith(
            "not stored\n"
        )
        leaf = next(
            block["key"] for block in kvctl.json("blocks")["blocks"] if block["depth"] == 1 and not block["pinned_by"]
        )
        assert kvctl.json(["pin", "b", "--tenant", ME, "--key", leaf[:12]])["blocks"] == 2, "it and those before it"
        assert kvctl.json(["pin", "c", "--tenant", ME, "--key", leaf, "--below"])["blocks"] == 2
        assert [owners for *_, owners in facts() if owners != ["a"]] == [["b"], ["b", "c"], ["c"]]
        assert kvctl.json(["unpin", "c", "--tenant", ME, "--all"])["blocks"] == 2 * BLOCKS
        assert "nobody pins none of 6 blocks" in kvctl(["unpin", "nobody", "--tenant", ME, "--all"]).out
        assert kvctl.json(["ttl", "3600", "--tenant", ME, "--model", MODEL.model_name])["blocks"] == 2 * BLOCKS
        assert all(expires for _, expires, _ in facts())
        kvctl(["ttl", "0", "--tenant", ME, "--key", leaf[:12]])
        assert [expires for _, expires, owners in facts() if owners in (["b"], [])] == [False, False, True]
        refused = kvctl(["pin", "a", "--tenant", ME, "--key", "ffffff"], exit_code=1).err
        assert "no stored block has such a key" in refused
        for command in ("pin", "unpin"):
            with pytest.raises(SystemExit, match="2"):
                kvctl([command, "", "--tenant", ME, "--all"])
        with pytest.raises(grpc.RpcError, match="say what is to hold"):
            daemon.ask("Keep", admin_pb2.KeepRequest(tenant=ME, all=True))


def test_a_pin_that_is_over_its_bound_is_refused_as_a_whole(capfdbinary: Any) -> None:
    with running_daemon("limits.pinned_per_owner=64KiB") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, *range(1, 12))
        refused = kvctl(["pin", "big", "--tenant", ME, "--all"], exit_code=1).err
        assert "owner 'big' has pinned 0 B" in refused and "limits.pinned_per_owner" in refused
        assert not any(block["pinned_by"] for block in kvctl.json("blocks")["blocks"])


def test_a_bump_ends_what_computes_with_older_weights(capfdbinary: Any) -> None:
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1, 2, of=version(1), pin="a")
        fill(daemon, 1)
        assert stored(daemon, 1, version(1)) == BLOCKS
        with daemon.connect(version(1)) as old, old.get(tokens_of(1, BLOCKS)) as lease:
            bumped = kvctl.json(["versions", "bump", "policy", "--tenant", ME])
            assert (bumped["clients"], bumped["blocks"]) == (1, 2 * BLOCKS)
            assert bumped["versions"][0]["version"] == 2 and not bumped["versions"][0]["older_blocks"]
            assert bytes(lease.payload(0)) == bytes(payloads_of(1, 1, MODEL)[0]), "a reader keeps its bytes"
            assert old.lookup(tokens_of(1, BLOCKS)).blocks == 0
            put = old.put(tokens_of(3, BLOCKS), payloads=payloads_of(3, BLOCKS, MODEL))
            assert not put.visible_blocks
        with pytest.raises(KVStoreError, match="'policy' are at version 2, this client has 1"):
            daemon.connect(version(1), required=True)
        assert stored(daemon, 1, version(2)) == 0 and stored(daemon, 1) == BLOCKS, "other weights stay"
        fill(daemon, 1, of=version(2))
        daemon.kill9()
        daemon.restart()
        with pytest.raises(KVStoreError, match="are at version 2"):
            daemon.connect(version(1), required=True)
        assert stored(daemon, 1, version(2)) == BLOCKS
        with daemon.connect(OBJECTS) as trainer:
            assert trainer.bump_weights("policy", 7) == 7
            assert trainer.bump_weights("policy") == 8
            with pytest.raises(KVStoreError, match="versions only grow"):
                trainer.bump_weights("policy", 3)
        assert stored(daemon, 1, version(8)) == 0


def test_engines_take_the_version_from_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon() as daemon:
        monkeypatch.setenv("KVSTORED_WEIGHTS", "policy:3")
        fill(daemon, 1)
        with daemon.connect(OBJECTS) as trainer:
            assert not trainer.fingerprint.weights and trainer.bump_weights("policy", 4) == 4
        with pytest.raises(KVStoreError, match="are at version 4, this client has 3"):
            daemon.connect(MODEL)
        monkeypatch.setenv("KVSTORED_WEIGHTS", "policy")
        with pytest.raises(KVStoreError, match="must be NAME:VERSION, such as policy:7"):
            daemon.connect(MODEL)


def test_a_client_with_newer_weights_is_a_bump(capfdbinary: Any) -> None:
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        fill(daemon, 1, of=version(4))
        with daemon.connect(version(4)) as old:
            fill(daemon, 2, of=version(5))
            assert old.lookup(tokens_of(1, BLOCKS)).blocks == 0

        def newest() -> tuple[int, int, int]:
            (status,) = kvctl.json("versions")["versions"]
            return status["version"], status["blocks"], status["older_blocks"]

        assert eventually(lambda: newest() == (5, BLOCKS, 0))
