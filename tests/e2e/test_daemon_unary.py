"""The unary service against the real daemon: every verb with inline bytes, and together with clients that map them."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.raw_client import as_user
from tests.reference.running_daemon import MIB, RunningDaemon, eventually, running_daemon
from tests.reference.unary_client import UnaryClient, by_tokens, names, unary_client
from tests.tidy.tree import ROOT

MODEL = model()
BLOCK_BYTES = MODEL.payload_bytes()
MAX_KEYS = 128
MESSAGE_BYTES = 512 << 10
_conversations = itertools.count(1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(f"limits.max_keys={MAX_KEYS}", "unary.message=512KiB", "limits.max_block=128KiB") as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[UnaryClient]:
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as unary:
        yield unary


@pytest.fixture(autouse=True)
def nothing_is_left_behind(daemon: RunningDaemon) -> Iterator[None]:
    yield
    if daemon.process is not None and daemon.process.poll() is None:
        assert eventually(lambda: daemon.status().leases == 0), "leases outlive their call"
    assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture
def conversation() -> int:
    """One that no other test speaks of."""
    return next(_conversations)


def object_blocks(conversation: int, blocks: int = 1, *, first_block: int = 0) -> pb.Chain:
    """Return the blocks of the object of one test."""
    return pb.Chain(object=f"object {conversation}", object_blocks=blocks, first_block=first_block)


# What is stored is found, by both ways in


def test_what_was_put_is_looked_up_and_got(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 4))
    before = client.lookup(chain)
    assert names(before.statuses) == ["MISS"] * 4
    assert list(before.miss_reasons) == [kv.MISS_REASON_NEVER_STORED] * 4
    payloads = payloads_of(conversation, 4, MODEL)
    stored = client.put(chain, payloads)
    assert names(stored.statuses) == ["STORED"] * 4
    assert list(stored.durability) == [kv.DURABILITY_DURABLE] * 4
    assert stored.keys == before.keys and len(stored.keys) == 64
    found = client.lookup(by_tokens(MODEL, tokens_of(conversation, 5)))
    assert names(found.statuses) == ["PRESENT"] * 4 + ["MISS"]
    assert found.usable_blocks == 4
    assert list(found.tiers) == [kv.TIER_CODE_HOST] * 4 + [kv.TIER_CODE_ABSENT]
    assert list(found.payload_bytes) == [BLOCK_BYTES] * 4 + [0]
    got = client.get(by_tokens(MODEL, tokens_of(conversation, 5)))
    assert names(got.statuses) == ["SENT"] * 4 + ["MISS"]
    assert list(got.miss_reasons) == [kv.MISS_REASON_UNSPECIFIED] * 4 + [kv.MISS_REASON_NEVER_STORED]
    assert list(got.payloads) == [payload.tobytes() for payload in payloads]
    again = client.put(chain, payloads)
    assert names(again.statuses) == ["PRESENT"] * 4
    assert list(again.durability) == [kv.DURABILITY_DURABLE] * 4


def test_a_tail_that_fills_no_block_has_no_key(client: UnaryClient, conversation: int) -> None:
    assert client.lookup(by_tokens(MODEL, tokens_of(conversation, 2)[:100])).keys[16:] == b""
    assert not client.lookup(by_tokens(MODEL, tokens_of(conversation, 1)[:63])).statuses


def test_a_client_with_shared_memory_gets_what_was_put_unary(
    client: UnaryClient, daemon: RunningDaemon, conversation: int
) -> None:
    payloads = payloads_of(conversation, 3, MODEL)
    client.put(by_tokens(MODEL, tokens_of(conversation, 3)), payloads)
    with daemon.connect(MODEL) as session, session.get(tokens_of(conversation, 3)) as lease:
        assert holds(lease, payloads)  # the session compared the token ids in the headers, too


def test_unary_gets_what_a_client_with_shared_memory_put(
    client: UnaryClient, daemon: RunningDaemon, conversation: int
) -> None:
    payloads = payloads_of(conversation, 3, MODEL)
    with daemon.connect(MODEL) as session:
        session.put(tokens_of(conversation, 3), payloads=payloads, wait="settled")
    got = client.get(by_tokens(MODEL, tokens_of(conversation, 3)))
    assert list(got.payloads) == [payload.tobytes() for payload in payloads]


def test_another_fingerprint_is_a_miss_that_says_so(client: UnaryClient, conversation: int) -> None:
    client.put(by_tokens(MODEL, tokens_of(conversation, 1)), payloads_of(conversation, 1, MODEL))
    missed = client.get(by_tokens(model("other weights"), tokens_of(conversation, 1)))
    assert list(missed.miss_reasons) == [kv.MISS_REASON_OTHER_FINGERPRINT]


# Parts of a chain


def test_a_chain_is_put_and_got_in_parts(client: UnaryClient, conversation: int) -> None:
    tokens = tokens_of(conversation, 4)
    payloads = payloads_of(conversation, 4, MODEL)
    orphan = client.put(by_tokens(MODEL, tokens, first_block=2), payloads[2:])
    assert names(orphan.statuses) == ["ORPHANED"] * 2
    assert names(client.put(by_tokens(MODEL, tokens[:128]), payloads[:2]).statuses) == ["STORED"] * 2
    assert names(client.put(by_tokens(MODEL, tokens, first_block=2), payloads[2:]).statuses) == ["STORED"] * 2
    got = client.get(by_tokens(MODEL, tokens, first_block=3))
    assert list(got.payloads) == [payloads[3].tobytes()]
    assert len(got.keys) == 16
    assert not client.get(by_tokens(MODEL, tokens, first_block=9)).statuses


def test_extras_make_other_keys(client: UnaryClient, conversation: int) -> None:
    tokens = tokens_of(conversation, 2)
    plain, image = bytes(32), bytes(16) + b"digest of an img"
    client.put(by_tokens(MODEL, tokens, extras=image), payloads_of(conversation, 2, MODEL))
    assert names(client.lookup(by_tokens(MODEL, tokens, extras=plain)).statuses) == ["PRESENT", "MISS"]
    assert names(client.lookup(by_tokens(MODEL, tokens, extras=image)).statuses) == ["PRESENT", "PRESENT"]
    assert client.lookup(by_tokens(MODEL, tokens)).keys == client.lookup(by_tokens(MODEL, tokens, extras=plain)).keys


def test_an_answer_is_filled_up_to_its_limit_and_no_further(client: UnaryClient, conversation: int) -> None:
    tokens = tokens_of(conversation, 40)
    payloads = payloads_of(conversation, 40, MODEL)
    for first in (0, 20):
        client.put(by_tokens(MODEL, tokens[: (first + 20) * 64], first_block=first), payloads[first : first + 20])
    sizes = []
    received: list[bytes] = []
    while len(received) < 40:
        got = client.get(by_tokens(MODEL, tokens, first_block=len(received)))
        assert got.payloads and set(names(got.statuses)) <= {"SENT", "OMITTED"}
        received.extend(got.payloads)
        sizes.append(got.ByteSize())
    assert received == [payload.tobytes() for payload in payloads]
    assert max(sizes) <= MESSAGE_BYTES < sum(sizes)
    assert names(client.get(by_tokens(MODEL, tokens[:256]), max_blocks=1).statuses) == ["SENT"] + ["OMITTED"] * 3
    few = client.get(by_tokens(MODEL, tokens[:256]), max_bytes=2 * BLOCK_BYTES + 1)
    assert names(few.statuses) == ["SENT"] * 2 + ["OMITTED"] * 2
    with pytest.raises(grpc.RpcError) as caught:
        client.get(by_tokens(MODEL, tokens[:64]), max_bytes=BLOCK_BYTES - 1)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "raise max_bytes" in caught.value.details()


# Named objects, and blocks by their keys


def test_an_objects_blocks_are_of_any_size_and_continue_each_other(client: UnaryClient, conversation: int) -> None:
    payloads = [b"small", bytes(range(256)) * 100, b"x"]
    whole = object_blocks(conversation, 3)
    assert names(client.put(whole, payloads).statuses) == ["STORED"] * 3
    assert list(client.get(whole).payloads) == payloads
    assert list(client.lookup(whole).payload_bytes) == [len(item) for item in payloads]
    assert list(client.get(object_blocks(conversation, 2, first_block=1)).payloads) == [payloads[1]]
    assert names(client.put(object_blocks(conversation, 6, first_block=5), [b"6"]).statuses) == ["ORPHANED"]
    assert names(client.put(object_blocks(conversation, 4, first_block=3), [b"4"]).statuses) == ["STORED"]
    assert names(client.delete(object_blocks(conversation, 4)).statuses) == ["DELETED"] * 4


def test_blocks_are_read_by_their_keys(client: UnaryClient, conversation: int) -> None:
    payloads = payloads_of(conversation, 2, MODEL)
    stored = client.put(by_tokens(MODEL, tokens_of(conversation, 2)), payloads)
    by_keys = pb.Chain(keys=stored.keys)
    assert list(client.get(by_keys).payloads) == [payload.tobytes() for payload in payloads]
    assert client.get(by_keys).keys == b"", "the caller knows them"
    assert names(client.lookup(by_keys).statuses) == ["PRESENT"] * 2
    assert names(client.delete(by_keys).statuses) == ["DELETED"] * 2


def test_a_caller_chooses_no_key(client: UnaryClient, conversation: int) -> None:
    """Else an object could stand where a block of tokens belongs, or where another tenant's does."""
    tokens = by_tokens(MODEL, tokens_of(conversation, 1))
    key = client.lookup(tokens).keys
    with pytest.raises(grpc.RpcError) as caught:
        client.put(pb.Chain(keys=key), [b"forged"])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.put(pb.Chain(object=key.hex()), [bytes(BLOCK_BYTES)]).keys != key
    assert names(client.lookup(tokens).statuses) == ["MISS"]


# Promotion and hints


def test_a_get_promotes_what_is_only_on_nvme(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 4))
    payloads = payloads_of(conversation, 4, MODEL)
    client.put(chain, payloads)
    daemon.drop("host")
    assert list(client.lookup(chain).tiers) == [kv.TIER_CODE_NVME] * 4
    got = client.get(chain)
    assert list(got.payloads) == [payload.tobytes() for payload in payloads]
    assert got.promoted_blocks == 4
    assert client.get(chain).promoted_blocks == 0


def test_a_prefetch_brings_the_run_up(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 3))
    client.put(chain, payloads_of(conversation, 3, MODEL))
    daemon.drop("host")
    client.get(by_tokens(MODEL, tokens_of(conversation, 1)))
    hinted = client.prefetch(by_tokens(MODEL, tokens_of(conversation, 4)), budget_bytes=BLOCK_BYTES)
    assert names(hinted.statuses) == ["PRESENT", "SCHEDULED", "OMITTED", "MISS"]
    assert list(hinted.miss_reasons)[3] == kv.MISS_REASON_NEVER_STORED
    assert eventually(lambda: list(client.lookup(chain).tiers)[1] == kv.TIER_CODE_HOST)
    assert list(client.lookup(chain).tiers)[2] == kv.TIER_CODE_NVME


def test_a_touch_says_how_long_to_keep_the_leading_run(
    client: UnaryClient, daemon: RunningDaemon, conversation: int
) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 3))
    keys = client.put(chain, payloads_of(conversation, 3, MODEL)).keys
    client.delete(pb.Chain(keys=keys[32:]))
    touched = client.touch(by_tokens(MODEL, tokens_of(conversation, 4)), terms=kv.Terms(ttl_s=900, pin="cron"))
    assert names(touched.statuses) == ["PRESENT", "PRESENT", "MISS", "MISS"] and touched.keys[:48] == keys
    assert list(touched.miss_reasons)[2:] == [kv.MISS_REASON_DROPPED, kv.MISS_REASON_NEVER_STORED]
    assert client.touch(pb.Chain(keys=keys[32:] + keys[:16])).statuses == [pb.KEY_STATUS_MISS, pb.KEY_STATUS_OMITTED]
    for at in (0, 16):
        (block,) = daemon.ask("Blocks", admin_pb2.BlocksRequest(key_prefix=keys[at : at + 16].hex())).blocks
        assert 0 < block.expires_in_s <= 900 and list(block.pinned_by) == ["cron"]
    with pytest.raises(grpc.RpcError, match="priority must be from -8 to 7, got 8"):
        client.touch(chain, terms=kv.Terms(priority=8))
    client.touch(chain, terms=kv.Terms(unpin="cron"))


def test_damaged_bytes_are_a_miss(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 3))
    payloads = payloads_of(conversation, 3, MODEL)
    victim = client.put(chain, payloads).keys[16:32]
    blocks = daemon.ask("Blocks", admin_pb2.BlocksRequest(key_prefix=victim.hex())).blocks
    daemon.drop("host")
    path, _, start = blocks[0].location.rpartition(":")
    with open(path, "r+b") as slab:
        slab.seek(int(start) + 4096 + 77)
        byte = slab.read(1)
        slab.seek(-1, 1)
        slab.write(bytes([byte[0] ^ 1]))
    got = client.get(chain)
    assert list(got.payloads) == [payloads[0].tobytes()]
    assert names(got.statuses)[:2] == ["SENT", "MISS"]
    assert got.miss_reasons[1] == kv.MISS_REASON_CORRUPT
    assert names(client.put(chain, payloads).statuses)[1] == "STORED", "computed again, it is whole again"
    assert list(client.get(chain).payloads) == [payload.tobytes() for payload in payloads]


# Delete


def test_deleted_blocks_are_gone_for_everybody(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 3))
    client.put(chain, payloads_of(conversation, 3, MODEL))
    gone = client.delete(by_tokens(MODEL, tokens_of(conversation, 4)))
    assert names(gone.statuses) == ["DELETED"] * 3 + ["MISS"]
    assert gone.deleted_bytes == 3 * BLOCK_BYTES
    assert gone.miss_reasons[3] == kv.MISS_REASON_NEVER_STORED
    assert list(client.lookup(chain).miss_reasons) == [kv.MISS_REASON_DROPPED] * 3
    with daemon.connect(MODEL) as session:
        assert not session.lookup(tokens_of(conversation, 3)).blocks


def test_a_delete_leaves_no_hole(client: UnaryClient, conversation: int) -> None:
    tokens = tokens_of(conversation, 3)
    payloads = payloads_of(conversation, 3, MODEL)
    client.put(by_tokens(MODEL, tokens), payloads)
    assert names(client.delete(by_tokens(MODEL, tokens[:128])).statuses) == ["CONTINUED"] * 2
    assert list(client.get(by_tokens(MODEL, tokens)).payloads) == [payload.tobytes() for payload in payloads]
    assert names(client.delete(by_tokens(MODEL, tokens, first_block=2)).statuses) == ["DELETED"]
    assert names(client.delete(by_tokens(MODEL, tokens[:128])).statuses) == ["DELETED"] * 2


def test_a_reader_keeps_what_it_holds(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 2))
    payloads = payloads_of(conversation, 2, MODEL)
    client.put(chain, payloads)
    with daemon.connect(MODEL) as session:
        with session.get(tokens_of(conversation, 2)) as lease:
            assert names(client.delete(chain).statuses) == ["IN_USE"] * 2
            assert holds(lease, payloads) and lease.valid
        assert eventually(lambda: names(client.delete(chain).statuses)[0] in ("DELETED", "MISS"))
    assert names(client.lookup(chain).statuses) == ["MISS"] * 2


# Bad input


def long_chain(blocks: int) -> pb.Chain:
    return by_tokens(MODEL, tokens_of(0, blocks))


@pytest.mark.parametrize(
    ("chain", "code", "says"),
    [
        (pb.Chain(token_ids=[1]), "INVALID_ARGUMENT", "token_ids need the fingerprint"),
        (pb.Chain(fingerprint=b"{", token_ids=[1]), "INVALID_ARGUMENT", "fingerprint is not JSON"),
        (pb.Chain(fingerprint=b"[]", keys=bytes(16)), "INVALID_ARGUMENT", "fingerprint has a wrong shape"),
        (pb.Chain(fingerprint=b" " * 70000), "INVALID_ARGUMENT", "over 65536"),
        (by_tokens(MODEL, [1], keys=bytes(16)), "INVALID_ARGUMENT", "one of them"),
        (pb.Chain(keys=bytes(16), object="x"), "INVALID_ARGUMENT", "one of them"),
        (pb.Chain(keys=bytes(16), first_block=1), "INVALID_ARGUMENT", "do not go with keys"),
        (by_tokens(MODEL, [1], object_blocks=1), "INVALID_ARGUMENT", "object_blocks go with an object"),
        (pb.Chain(object="x", fingerprint=MODEL.canonical()), "INVALID_ARGUMENT", "a fingerprint of their own"),
        (by_tokens(MODEL, tokens_of(0, 2), extras=b"x"), "INVALID_ARGUMENT", "16 bytes for each of 2 blocks"),
        (by_tokens(MODEL, tokens_of(0, 2), group=3), "INVALID_ARGUMENT", "layer group 3"),
        (pb.Chain(keys=b"x" * 17), "INVALID_ARGUMENT", "16 bytes each"),
        (pb.Chain(object="x" * 4097), "INVALID_ARGUMENT", "1 to 4096 bytes"),
        (pb.Chain(keys=bytes(16 * (MAX_KEYS + 1))), "RESOURCE_EXHAUSTED", f"limit is {MAX_KEYS}"),
        (pb.Chain(object="x", object_blocks=MAX_KEYS + 1), "RESOURCE_EXHAUSTED", f"limit is {MAX_KEYS}"),
        (long_chain(MAX_KEYS + 1), "RESOURCE_EXHAUSTED", f"limit is {MAX_KEYS} blocks"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_chain_that_makes_no_sense_is_refused_in_words(
    client: UnaryClient, chain: pb.Chain, code: str, says: str
) -> None:
    for ask in (client.lookup, client.get, client.prefetch, client.delete):
        with pytest.raises(grpc.RpcError) as caught:
            ask(chain)
        assert caught.value.code().name == code
        assert says in caught.value.details()
        kinds = {item.key: item.value for item in caught.value.trailing_metadata()}
        assert kinds["kvstored-error-kind"] in ("INVALID", "TOO_LARGE")


@pytest.mark.parametrize(
    ("payloads", "code", "says"),
    [
        ([], "INVALID_ARGUMENT", "0 payloads for 1 blocks"),
        ([bytes(BLOCK_BYTES)] * 2, "INVALID_ARGUMENT", "2 payloads for 1 blocks"),
        ([b"short"], "INVALID_ARGUMENT", f"has {BLOCK_BYTES} payload bytes by the fingerprint, got 5"),
        ([b""], "INVALID_ARGUMENT", "more than 0"),
        ([bytes(MESSAGE_BYTES)], "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_a_put_of_wrong_payloads_stores_nothing(
    client: UnaryClient, conversation: int, payloads: list[bytes], code: str, says: str
) -> None:
    chain = by_tokens(MODEL, tokens_of(conversation, 1))
    with pytest.raises(grpc.RpcError) as caught:
        client.put(chain, payloads)
    assert (caught.value.code().name, says in caught.value.details()) == (code, True), caught.value.details()
    assert names(client.lookup(chain).statuses) == ["MISS"]


def test_a_block_over_the_limit_is_refused_with_the_limit(client: UnaryClient, conversation: int) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.put(object_blocks(conversation, 2), [b"fits", bytes(129 << 10)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"limit of {128 << 10}" in caught.value.details()
    good = object_blocks(conversation)
    assert names(client.lookup(good).statuses) == ["MISS"], "the whole call is refused"
    assert names(client.put(good, [b"fits"]).statuses) == ["STORED"], "and its keys are free"


# Who reaches the socket


def test_the_socket_is_for_the_daemons_own_user(daemon: RunningDaemon) -> None:
    path = daemon.socket_dir / "unary.sock"
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_users_cannot_connect(daemon: RunningDaemon) -> None:

    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    path = str(daemon.socket_dir / "unary.sock")
    os.chmod(daemon.directory, 0o755)
    os.chmod(daemon.socket_dir, 0o755)  # the directory would keep them out before the socket does

    def connect() -> str:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError as error:
                return type(error).__name__
        return "connected"

    assert as_user(4711, connect) == "PermissionError"
    os.chmod(daemon.socket_dir, 0o750)


def test_inline_bytes_are_counted(client: UnaryClient, daemon: RunningDaemon, conversation: int) -> None:
    before = daemon.status().counters["grpc_payload_bytes"]
    chain = by_tokens(MODEL, tokens_of(conversation, 2))
    client.put(chain, payloads_of(conversation, 2, MODEL))
    client.get(chain)
    assert daemon.status().counters["grpc_payload_bytes"] - before == 4 * BLOCK_BYTES


def test_an_unary_put_obeys_the_quota_of_its_tenant(tmp_path: Path) -> None:
    config = tmp_path / "kvstored.toml"
    config.write_text(f'[[tenant]]\nname = "me"\nuids = [{os.geteuid()}]\nhost_max = "1MiB"\n')
    with running_daemon("nvme.enabled=false", config=config) as small:
        with unary_client(f"unix:{small.socket_dir}/unary.sock") as unary:
            for conversation in range(40):
                payloads = payloads_of(conversation, 4, MODEL)
                stored = unary.put(by_tokens(MODEL, tokens_of(conversation, 4)), payloads)
                assert set(names(stored.statuses)) <= {"STORED", "OVER_QUOTA"}
                assert list(stored.durability) == [kv.DURABILITY_VOLATILE] * 4
            longer = by_tokens(MODEL, tokens_of(99, 80))
            stored = unary.put(longer, payloads_of(99, 80, MODEL))
            assert names(stored.statuses)[-1] == "OVER_QUOTA" and stored.retry_after_ms > 0
            assert unary.lookup(longer).miss_reasons[-1] == kv.MISS_REASON_OVER_QUOTA
        tenants = {item.name: item for item in small.ask("Tenants", admin_pb2.TenantsRequest()).tenants}
        assert 0 < tenants["me"].host_bytes <= MIB


def test_the_example_of_the_document(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "docs/unary.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(code.replace("/run/kvstored", str(daemon.socket_dir)), {})
    assert capsys.readouterr().out == "b'any bytes'\n"
