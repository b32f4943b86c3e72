"""Stored blocks follow a user to a tenant's name, or the start says that it cannot; no tenant gets another's bytes.

Clients are our own user and, as root, processes of other users and groups.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore_proto.state_identity import IDENTITY_FILE
from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference import forked
from tests.reference.conversations import found_blocks, model, payloads_of, put_conversation, tokens_of
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 4
UID = os.geteuid()
MINE, OTHER = f"uid-{UID}", UID + 4711
CLIENT = """
import os
import numpy.random
from pathlib import Path
from tests.faults.test_daemon_tenants import got, put
from tests.reference.running_daemon import RunningDaemon
daemon = RunningDaemon(Path({directory!r}))
got(daemon, 999)  # loads all modules, which the other user may not be able to read
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
for conversation in {puts}: put(daemon, conversation)
print(*[got(daemon, conversation) for conversation in {gets}])
"""


def put(daemon: RunningDaemon, conversation: int) -> None:
    with daemon.connect(MODEL) as session:
        assert put_conversation(session, conversation, BLOCKS, durability="always").stored_blocks == BLOCKS


def got(daemon: RunningDaemon, conversation: int) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, conversation, BLOCKS)


def as_user(daemon: RunningDaemon, uid: int, *, puts: tuple[int, ...] = (), gets: tuple[int, ...] = ()) -> list[int]:
    """Run a program as another user, which stores and then gets."""
    if UID:
        pytest.skip("needs root, to be another user")
    program = CLIENT.format(uid=uid, directory=str(daemon.directory), puts=list(puts), gets=list(gets))
    done = forked.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        running.directory.chmod(0o755)
        running.stop()
        yield running


def listing(**tenants: object) -> str:
    """A configuration: `alice={"uids": [1]}`."""
    return "".join(
        f'[[tenant]]\nname = "{name}"\n' + "".join(f"{key} = {value}\n" for key, value in dict(keys).items())  # type: ignore[call-overload]
        for name, keys in tenants.items()
    )


def restart(daemon: RunningDaemon, failpoints: str = "", /, **tenants: object) -> str:
    """Start with these tenants listed; what it said. Sockets are open to other users."""
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.stop()
    daemon.config = daemon.directory / "kvstored.toml"
    daemon.config.write_text(listing(**tenants))
    before = len(daemon.log)
    daemon.restart(failpoints=failpoints)
    daemon.socket_dir.chmod(0o755)
    for path in daemon.socket_dir.glob("*.sock"):
        path.chmod(0o666)
    return daemon.log[before:]


def rename(daemon: RunningDaemon, old: str, new: str, *, replace: bool = False) -> pb.RenameTenantReply:
    reply: pb.RenameTenantReply = daemon.ask("RenameTenant", pb.RenameTenantRequest(old=old, new=new, replace=replace))
    return reply


def refusal(daemon: RunningDaemon, old: str, new: str) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        rename(daemon, old, new)
    return str(refused.value.details())


def blocks(daemon: RunningDaemon) -> dict[str, int]:
    return {
        tenant.name: tenant.blocks for tenant in daemon.ask("Tenants", pb.TenantsRequest()).tenants if tenant.blocks
    }


@pytest.mark.slow
def test_a_user_that_is_listed_alone_keeps_what_is_stored(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    said = restart(daemon, alice={"uids": [UID]})
    assert f"tenant alice takes over {BLOCKS} blocks (64.0 KiB) of {MINE}" in said or "tenant alice takes over" in said
    assert got(daemon, 1) == BLOCKS and blocks(daemon) == {"alice": BLOCKS}
    assert daemon.status().warnings == []
    put(daemon, 2)
    daemon.kill9()
    restart(daemon, alice={"uids": [UID]})
    assert got(daemon, 1) == got(daemon, 2) == BLOCKS
    assert as_user(daemon, OTHER, gets=(1, 2)) == [0, 0]
    said = restart(daemon)
    assert "tenant alice is not listed any more" in said and f"are {MINE}'s again" in said
    assert got(daemon, 1) == got(daemon, 2) == BLOCKS and blocks(daemon) == {MINE: 2 * BLOCKS}
    restart(daemon, bob={"uids": [UID]})
    assert got(daemon, 1) == BLOCKS and blocks(daemon) == {"bob": 2 * BLOCKS}


@pytest.mark.slow
@pytest.mark.skipif(UID != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("file_is_lost", each_nth([True, False], 2))
def test_what_a_user_stored_never_goes_to_a_tenant_without_him(daemon: RunningDaemon, file_is_lost: bool) -> None:
    """The name alice was his, and is another's now; with the file that says so, and without it."""
    restart(daemon)
    put(daemon, 1)
    restart(daemon, alice={"uids": [UID]})
    put(daemon, 2)
    daemon.stop()
    if file_is_lost:
        (daemon.state_dir / IDENTITY_FILE).unlink()
        (daemon.nvme_dir / IDENTITY_FILE).unlink()
    said = restart(daemon, alice={"uids": [OTHER]})
    assert file_is_lost or f"tenant alice does not list uid {UID} any more" in said
    assert as_user(daemon, OTHER, puts=(3,), gets=(1, 2, 3)) == [0, 0, BLOCKS]
    assert [got(daemon, number) for number in (1, 2, 3)] == [BLOCKS, BLOCKS, 0]
    restart(daemon, alice={"uids": [OTHER]}, carol={"uids": [UID]})
    assert as_user(daemon, OTHER, gets=(1, 2, 3)) == [0, 0, BLOCKS]
    assert [got(daemon, number) for number in (1, 2, 3)] == [BLOCKS, BLOCKS, 0]


def test_a_rename_that_cannot_be_written_drops_nothing(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    team = {"team": {"uids": [UID, OTHER]}}
    restart(daemon, **team)
    put(daemon, 2)
    restart(daemon, "file.identity.json=error:ENOSPC", **team)
    with pytest.raises(grpc.RpcError) as refused:
        rename(daemon, MINE, "team", replace=True)
    assert refused.value.code() is grpc.StatusCode.INTERNAL, "UNAVAILABLE says that the daemon is gone"
    assert f"{daemon.state_dir / IDENTITY_FILE} cannot be written (No space left" in refused.value.details()
    assert got(daemon, 2) == BLOCKS and not any("cannot be written" in said for said in daemon.status().warnings)
    restart(daemon, **team)
    assert rename(daemon, MINE, "team", replace=True).replaced_blocks >= BLOCKS and got(daemon, 1) == BLOCKS


@pytest.mark.slow
@pytest.mark.skipif(UID != 0, reason="needs root, to be another user")
def test_two_users_in_one_tenant_follow_only_when_the_operator_says_so(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    as_user(daemon, OTHER, puts=(2,))
    team = {"team": {"uids": [UID, OTHER]}}
    said = restart(daemon, **team)
    for name, uid in ((MINE, UID), (f"uid-{OTHER}", OTHER)):
        sentence = f"of {name} are out of reach: uid {uid} is tenant team; `kvctl tenants rename {name} team` gives"
        assert sentence in said and any(sentence in warning for warning in daemon.status().warnings)
    assert got(daemon, 1) == got(daemon, 2) == 0
    assert as_user(daemon, OTHER, gets=(1, 2)) == [0, 0]
    put(daemon, 3)
    assert "has stored 4 blocks" in refusal(daemon, MINE, "team")
    assert got(daemon, 3) == BLOCKS
    reply = rename(daemon, MINE, "team", replace=True)
    assert (reply.blocks, reply.replaced_blocks >= BLOCKS) == (BLOCKS, True)
    assert [got(daemon, number) for number in (1, 2, 3)] == [BLOCKS, 0, 0]
    assert as_user(daemon, OTHER, gets=(1, 2, 3)) == [BLOCKS, 0, 0]
    assert blocks(daemon) == {"team": BLOCKS, f"uid-{OTHER}": BLOCKS}
    daemon.kill9()
    restart(daemon, **team)
    assert as_user(daemon, OTHER, gets=(1, 2, 3)) == [BLOCKS, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(UID != 0, reason="needs root, to be another user")
def test_a_listed_name_that_becomes_another(daemon: RunningDaemon) -> None:
    restart(daemon, ml={"uids": [UID, OTHER]})
    put(daemon, 1)
    assert "is listed and in use" in refusal(daemon, "ml", "ml2") or "no tenant" in refusal(daemon, "ml", "ml2")
    restart(daemon, research={"uids": [UID, OTHER]})
    said = "of ml are out of reach: the configuration does not list that tenant; `kvctl tenants rename ml NEW`"
    assert eventually(lambda: said in daemon.log), "names are read while the daemon serves"
    assert got(daemon, 1) == 0
    with daemon.connect(MODEL) as session:
        reply = rename(daemon, "ml", "research")
        assert reply.blocks == BLOCKS
        assert reply.clients in (1, 2), "twice where it had connected again before the renaming was done"
        assert eventually(lambda: session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS), "it connects again by itself"
    restart(daemon, research={"uids": [UID]}, ml={"uids": [OTHER]})
    assert got(daemon, 1) == BLOCKS
    assert as_user(daemon, OTHER, puts=(2,), gets=(1, 2)) == [0, BLOCKS], "the name is used again, for others"
    assert got(daemon, 2) == 0
    restart(daemon, research={"uids": [UID]}, ml={"uids": [OTHER]})
    assert got(daemon, 1) == BLOCKS and as_user(daemon, OTHER, gets=(1, 2)) == [0, BLOCKS]
    assert "ml is listed" in refusal(daemon, "ml", "research").replace("'", "").replace("tenant ", "")


def test_renames_that_are_refused(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    restart(daemon, alice={"uids": [OTHER]}, bob={"uids": [OTHER + 1]})
    assert f"alice does not list uid {UID}" in refusal(daemon, MINE, "alice")
    assert "give two names" in refusal(daemon, MINE, MINE)
    assert "nothing is stored as tenant 'nobody'" in refusal(daemon, "nobody", "alice")
    assert "no tenant 'carol' is listed" in refusal(daemon, MINE, "carol")
    assert "nothing is stored as tenant 'bob'" in refusal(daemon, "bob", "alice")
    assert got(daemon, 1) == BLOCKS


def test_a_user_in_a_group_that_is_listed_is_said_to_be_out_of_reach(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    restart(daemon, group={"gids": [os.getegid()]})
    assert eventually(lambda: f"of {MINE} are out of reach: uid {UID} is tenant group by its group" in daemon.log)
    assert got(daemon, 1) == 0
    assert f"group does not list uid {UID}" in refusal(daemon, MINE, "group")


@pytest.mark.slow
@pytest.mark.parametrize("whose", [MINE, "alice"])
def test_where_others_have_a_token_nothing_follows_by_itself(daemon: RunningDaemon, whose: str) -> None:
    restart(daemon)
    put(daemon, 1)
    tokens = daemon.directory / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{whose} {hashlib.sha256(b'one').hexdigest()}\n")
    daemon.settings = (f"unary.tokens_file={tokens}",)
    said = restart(daemon, alice={"uids": [UID]})
    assert f"of {MINE} are out of reach" in said and "takes over" not in said
    assert got(daemon, 1) == 0
    if whose == MINE:
        assert "unary.tokens_file has tokens for" in refusal(daemon, MINE, "alice")
    else:
        assert rename(daemon, MINE, "alice").blocks == BLOCKS and got(daemon, 1) == BLOCKS


def test_dram_follows_too() -> None:
    """Arenas that outlive the daemon belong to the identity, not to the name."""
    with running_daemon("host.warm_restart=holder", "nvme.enabled=false") as daemon:
        with daemon.connect(MODEL) as session:
            session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL))
        restart(daemon, alice={"uids": [UID]})
        assert got(daemon, 1) == BLOCKS and blocks(daemon) == {"alice": BLOCKS}
        restart(daemon, alice={"uids": [UID, OTHER]})
        assert got(daemon, 1) == BLOCKS
        restart(daemon, bob={"uids": [UID, OTHER]})
        assert got(daemon, 1) == 0 and blocks(daemon) == {MINE: BLOCKS}
        assert rename(daemon, MINE, "bob").blocks == BLOCKS and got(daemon, 1) == BLOCKS


def test_a_file_that_gives_one_identity_to_two_names_is_damage(daemon: RunningDaemon) -> None:
    restart(daemon)
    put(daemon, 1)
    daemon.stop()
    path = daemon.state_dir / IDENTITY_FILE
    document = json.loads(path.read_text())
    document["tenants"] = {"alice": MINE, "bob": MINE}
    path.write_text(json.dumps(document))
    restart(daemon, alice={"uids": [OTHER]}, bob={"uids": [OTHER + 1]})
    assert got(daemon, 1) == BLOCKS and Path(path).read_text() != json.dumps(document)
