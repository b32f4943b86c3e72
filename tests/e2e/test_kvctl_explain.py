"""kvctl explain against the real daemon: where blocks are, and each reason of a miss, brought about for real."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl.main import main
from kvctl.output import FAILED, UNREACHABLE, USAGE
from kvstore_client import Fingerprint, LayerGroup
from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
SMALL_HOST = ("host.capacity=8MiB", "host.staging=2MiB", "nvme.enabled=false")


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def put(daemon: RunningDaemon, conversation: int, blocks: int, durability: str = "always") -> None:
    with daemon.connect(MODEL) as session:
        receipt = put_conversation(session, conversation, blocks, durability=durability)
        assert receipt.stored_blocks == blocks, receipt


def prefix(directory: Path, conversation: int, blocks: int, fingerprint: Fingerprint = MODEL) -> list[str]:
    """The options that name a conversation's prefix."""
    path = directory / f"{fingerprint.digest().hex()[:8]}.json"
    path.write_bytes(fingerprint.canonical())
    first = 1000 * conversation
    return ["--tokens", f"{first}-{first + 64 * blocks - 1}", "--fingerprint", str(path)]


def explained(kvctl: Kvctl, directory: Path, conversation: int, blocks: int) -> Any:
    return kvctl.json(["explain", *prefix(directory, conversation, blocks)])


def test_the_layer_group_that_ends_a_hit_is_named(kvctl: Kvctl, tmp_path: Path) -> None:
    groups = (
        LayerGroup(0, layers=(0,), bytes_per_token_per_layer=8),
        LayerGroup(4, "sliding", 65, layers=(1,), bytes_per_token_per_layer=8),
    )
    kinds = Fingerprint("kinds", "kinds", groups=groups)
    with kvctl.daemon.connect(kinds) as session:
        size = kinds.payload_bytes()
        session.put(tokens_of(1, 4), payloads=[np.zeros(size, np.uint8)] * 4)
        for block in (1, 3):
            session.put(tokens_of(1, 4), payloads=[np.zeros(size, np.uint8)], first_block=block, group=4)
        assert session.resume_point(tokens_of(1, 5)[:-1]).ended_by is None
        asked = prefix(tmp_path, 1, 4, kinds)
        assert kvctl.json(["explain", *asked])["resume"]["ended_by"] is None
        assert "an engine can resume behind 4 blocks (256 tokens)\n" in kvctl(["explain", *asked]).out
        shorter = prefix(tmp_path, 1, 3, kinds)
        said = kvctl.json(["explain", *shorter])["resume"]
        assert (said["blocks"], said["tokens"], said["ended_by"], said["kind"]) == (2, 128, 4, "sliding")
        text = kvctl(["explain", *shorter]).out
        assert "can resume behind 2 blocks (128 tokens); layer group 4 (sliding) ends it: never stored" in text
        windows = kvctl.json(["explain", *asked, "--group", "4"])["blocks"]
        assert [block["missing_ancestor"] for block in windows] == [""] * 4, "a window's block needs none before it"
        session.resume_point(tokens_of(1, 3))
        miss = kvctl.json("explain --recent 1")["misses"][0]
        assert (miss["group"], miss["kind"], miss["found_blocks"], miss["asked_blocks"]) == (4, "sliding", 2, 3)
        assert "4 sliding" in kvctl("explain --recent").out
    new = kvctl.json(["explain", *prefix(tmp_path, 77, 1, kinds)])["resume"]
    assert "of a prefix shorter than one block of 64 tokens nothing is stored" in new["reason"]
    short = ["explain", "--tokens", "0-39", "--fingerprint", asked[-1]]
    assert "the prompt has 40 tokens, shorter than one block of 64" in kvctl(short, exit_code=USAGE).err


def test_stored_blocks_are_explained_with_place_age_use_and_cost(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 3)
    said = explained(kvctl, tmp_path, 1, 3)
    assert (said["usable_blocks"], said["cause"], said["elsewhere"]) == (3, "", [])
    for depth, block in enumerate(said["blocks"]):
        assert (block["state"], block["block"]["depth"], block["has_age"]) == ("stored", depth, True)
        assert 0 <= block["age_s"] < 60 and block["load_us"] >= 1 and block["missing_ancestor"] == ""
        assert [copy["tier"] for copy in block["copies"]] == ["host", "nvme"]
        assert {copy["state"] for copy in block["copies"]} == {"resident"}
        assert block["copies"][1]["location"].startswith(str(kvctl.daemon.nvme_dir))
        assert block["block"]["durability"] == "durable"
    assert said["blocks"][1]["block"]["parent"] == said["blocks"][0]["key"]
    text = kvctl(["explain", *prefix(tmp_path, 1, 3)]).out
    assert "all 3 blocks are stored, in DRAM" in text and "host+nvme" in text
    kvctl.daemon.drop("host")
    said = explained(kvctl, tmp_path, 1, 3)
    assert said["load_us"] == sum(block["load_us"] for block in said["blocks"]) > 3
    assert not said["blocks"][0]["has_age"]
    assert "would take about" in kvctl(["explain", *prefix(tmp_path, 1, 3)]).out


def test_explaining_changes_nothing(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 3)
    kvctl.daemon.drop("host")
    before = {name: kvctl.daemon.status().counters[name] for name in ("lookups", "acquires", "promoted_blocks")}
    first, second = explained(kvctl, tmp_path, 1, 3), explained(kvctl, tmp_path, 1, 3)
    assert [b["block"]["accesses"] for b in first["blocks"]] == [b["block"]["accesses"] for b in second["blocks"]]
    assert {name: kvctl.daemon.status().counters[name] for name in before} == before
    assert kvctl.daemon.tiers()["host"].blocks == 0


def test_leases_and_children_are_counted(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 2)
    with kvctl.daemon.connect(MODEL) as session, session.get(tokens_of(1, 2)) as lease:
        assert len(lease) == 2
        blocks = explained(kvctl, tmp_path, 1, 2)["blocks"]
        assert [(block["block"]["leases"], block["block"]["children"]) for block in blocks] == [(1, 1), (1, 0)]


def test_a_key_is_explained_with_the_blocks_before_it(kvctl: Kvctl) -> None:
    put(kvctl.daemon, 1, 3)
    listed = kvctl.daemon.ask("Blocks", pb.BlocksRequest()).blocks
    keys = [block.key for block in sorted(listed, key=lambda block: block.depth)]
    for given in (keys[2], keys[2][:12], keys[2][:12].upper()):
        assert [block["key"] for block in kvctl.json(["explain", given])["blocks"]] == keys
    assert [block["key"] for block in kvctl.json(["explain", keys[0], keys[2]])["blocks"]] == [keys[0], keys[2]]


def test_keys_that_are_none_or_several_are_said_to_be(kvctl: Kvctl) -> None:
    put(kvctl.daemon, 1, 1)
    for given, said, exit_code in [
        ("abc", "a key is 32 hex digits, or its first 6 or more, got 'abc'", USAGE),
        ("nonsense", "got 'nonsense'", USAGE),
        ("0" * 33, "a key is 32 hex digits", USAGE),
        ("000000", "no block begins with 000000", FAILED),
    ]:
        wrong = kvctl(["explain", given], exit_code=exit_code)
        assert said in wrong.err and wrong.err.count("\n") == 1
    assert "no tenant 'nobody'" in kvctl("explain 00000000 --tenant nobody", exit_code=FAILED).err
    assert "8 to 64 digits" in kvctl("explain 00000000 --fingerprint 12", exit_code=USAGE).err
    unknown = kvctl.json(["explain", "0" * 32])
    assert (unknown["blocks"][0]["state"], unknown["cause"]) == ("missing", "never_stored")


def test_never_stored(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 2)
    said = explained(kvctl, tmp_path, 1, 6)
    assert (said["usable_blocks"], said["cause"]) == (2, "never_stored")
    assert said["blocks"][3]["missing_ancestor"] == said["blocks"][2]["key"]
    text = kvctl(["explain", *prefix(tmp_path, 1, 6)]).out
    assert "a get finds 2 of 6 blocks, in DRAM; block 2: never stored" in text
    assert "\n  2-5 " in text or "\n2-5 " in text, "a run of blocks with one fate is one line"


def test_dropped_and_used_how_often_before(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 2)
    with kvctl.daemon.connect(MODEL) as session:
        session.get(tokens_of(1, 2)).release()
        assert session.delete(tokens_of(1, 2)).blocks == 2
    block = explained(kvctl, tmp_path, 1, 2)["blocks"][0]
    assert (block["state"], block["cause"], block["accesses_before"]) == ("missing", "dropped", 2)
    assert 0 < block["gone_s"] < 60
    assert "deleted by its owner or dropped by an operator" in kvctl(["explain", *prefix(tmp_path, 1, 2)]).out
    by_prefix = kvctl.json(["explain", block["key"][:10]])
    assert by_prefix["cause"] == "dropped", "a key that is gone is found by its first digits too"


def test_invalidated(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 2)
    kvctl(f"invalidate {MODEL.digest().hex()}")
    assert explained(kvctl, tmp_path, 1, 2)["cause"] == "invalidated"


def test_corrupt_and_what_hangs_on_it(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 4)
    damaged = explained(kvctl, tmp_path, 1, 4)["blocks"][1]
    path, _, offset = damaged["copies"][1]["location"].rpartition(":")
    with open(path, "r+b") as file:
        file.seek(int(offset) + 4096 + 100)
        byte = file.read(1)[0]
        file.seek(int(offset) + 4096 + 100)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    kvctl.daemon.drop("host")
    with kvctl.daemon.connect(MODEL) as session, session.get(tokens_of(1, 4)) as lease:
        assert holds(lease, payloads_of(1, 1, MODEL))
    said = explained(kvctl, tmp_path, 1, 4)
    assert (said["usable_blocks"], said["cause"]) == (1, "corrupt")
    assert said["blocks"][1]["continued"]
    assert [block["state"] for block in said["blocks"]] == ["stored", "missing", "stored", "stored"]
    assert {block["missing_ancestor"] for block in said["blocks"][2:]} == {damaged["key"]}
    text = kvctl(["explain", *prefix(tmp_path, 1, 4)]).out
    assert "failed verification" in text and f"not reached: {damaged['key'][:12]} before it is missing" in text
    chain = kvctl.json(["explain", said["blocks"][3]["key"]])["blocks"]
    assert [block["key"] for block in chain] == [block["key"] for block in said["blocks"]]


def test_evicted(tmp_path: Path, capfdbinary: Any) -> None:
    with running_daemon(*SMALL_HOST) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        for conversation in range(1, 60):
            put(daemon, conversation, 8, "none")
        said = explained(kvctl, tmp_path, 1, 8)
        assert said["cause"] == "evicted" and said["blocks"][-1]["gone_s"] > 0
        assert "evicted for want of room" in kvctl(["explain", *prefix(tmp_path, 1, 8)]).out


def test_quota(tmp_path: Path, capfdbinary: Any) -> None:
    config = tmp_path / "k.toml"
    config.write_text(f"[[tenant]]\nname = 'small'\nuids = [{os.getuid()}]\nhost_max = '1MiB'\n")
    with running_daemon("nvme.enabled=false", config=config) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        for conversation in range(1, 12):
            put(daemon, conversation, 8, "none")
        assert explained(kvctl, tmp_path, 1, 8)["cause"] == "quota"
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(1, 8)).reason == "quota"
        text = kvctl(["explain", *prefix(tmp_path, 1, 8)]).out
        assert "its tenant was at its own maximum" in text


def test_a_put_over_the_quota_names_the_quota(tmp_path: Path, capfdbinary: Any) -> None:
    """One chain that is larger than its tenant's maximum: it keeps its own head."""
    config = tmp_path / "k.toml"
    config.write_text(f"[[tenant]]\nname = 'small'\nuids = [{os.getuid()}]\nhost_max = '1MiB'\n")
    with running_daemon("nvme.enabled=false", config=config) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        with daemon.connect(MODEL) as session:
            receipt = session.put(tokens_of(1, 80), payloads=payloads_of(1, 80, MODEL), durability="none")
            stored = receipt.stored_blocks
            assert 0 < stored < 80 and receipt.statuses == ["stored"] * stored + ["over_quota"] * (80 - stored)
            assert "raise its host_max" in receipt.reason
            assert session.lookup(tokens_of(1, 80)).reason == "over_quota"
        said = explained(kvctl, tmp_path, 1, 80)
        assert (said["usable_blocks"], said["cause"]) == (stored, "over_quota")
        assert {block["cause"] for block in said["blocks"][stored:]} == {"over_quota"}
        assert "raise the tenant's host_max" in kvctl(["explain", *prefix(tmp_path, 1, 80)]).out
        assert "over_quota" in kvctl(["explain", "--recent"]).out
        counters = daemon.status().counters
        assert (counters["over_quota_blocks"], counters["no_room_blocks"]) == (80 - stored, 0)


def test_expired(tmp_path: Path, capfdbinary: Any) -> None:
    with running_daemon("host.ttl_s=1", "nvme.enabled=false") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        put(daemon, 1, 2, "none")
        assert eventually(lambda: daemon.status().blocks == 0)
        assert explained(kvctl, tmp_path, 1, 2)["cause"] == "expired"


def test_other_fingerprint_says_which(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 3)
    other = model("other weights")
    said = kvctl.json(["explain", *prefix(tmp_path, 1, 4, other)])
    assert (said["usable_blocks"], said["cause"]) == (0, "other_fingerprint")
    elsewhere = {key: said["elsewhere"][0][key] for key in ("fingerprint", "stored_blocks", "blocks")}
    assert elsewhere == {"fingerprint": MODEL.digest().hex(), "stored_blocks": 3, "blocks": 4}
    text = kvctl(["explain", *prefix(tmp_path, 1, 4, other)]).out
    assert "stored under another fingerprint: test model:" in text and "has 3 of 4 blocks" in text


def test_a_restart_forgets_why_but_not_what(kvctl: Kvctl, tmp_path: Path) -> None:
    put(kvctl.daemon, 1, 2)
    with kvctl.daemon.connect(MODEL) as session:
        session.delete(tokens_of(1, 2), group=0)
    put(kvctl.daemon, 2, 2)
    kvctl.daemon.kill9()
    kvctl.daemon.restart()
    assert explained(kvctl, tmp_path, 1, 2)["cause"] == "never_stored"
    assert explained(kvctl, tmp_path, 2, 2)["usable_blocks"] == 2


def test_a_named_object_is_explained_by_its_name(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(np.random.default_rng(1).bytes(70 * 4096))
    kvctl(["put", "--name", "o", "--block-size", "4KiB", str(tmp_path / "in")])
    said = kvctl.json("explain --name o")
    assert said["usable_blocks"] == len(said["blocks"]) == 71, "asked for in pages, without its head being read"
    kvctl("delete --name o")
    gone = kvctl.json("explain --name o")
    assert (gone["cause"], len(gone["blocks"])) == ("dropped", 71)
    assert kvctl.json("explain --name nothing")["cause"] in ("never_stored", "other_fingerprint")


def test_recent_misses_are_listed_newest_first_and_by_tenant(kvctl: Kvctl) -> None:
    assert "nothing was missed" in kvctl("explain --recent").out
    put(kvctl.daemon, 1, 2)
    with kvctl.daemon.connect(MODEL, client_name="an engine") as session:
        for _ in range(5):
            assert session.lookup(tokens_of(1, 4)).blocks == 2
        assert not len(session.get(tokens_of(9, 3)))
        missing = session.keys(tokens_of(1, 4))
        assert missing is not None
        tenant = session.tenant
    get, lookup = kvctl.json("explain --recent")["misses"]
    assert (get["request"], get["found_blocks"], get["asked_blocks"], get["times"]) == ("get", 0, 3, 1)
    assert (lookup["request"], lookup["found_blocks"], lookup["asked_blocks"], lookup["times"]) == ("lookup", 2, 4, 5)
    assert (lookup["key"], lookup["cause"], lookup["client"]) == (missing[2].hex(), "never_stored", "an engine")
    assert (lookup["pid"], lookup["tenant"]) == (os.getpid(), tenant)
    assert lookup["fingerprint"].startswith("test model:")
    assert len(kvctl.json("explain --recent 1")["misses"]) == 1
    assert len(kvctl.json(f"explain --recent --tenant {tenant}")["misses"]) == 2
    text = kvctl("explain --recent").out
    assert "an engine" in text and missing[2].hex() in text
    assert kvctl.json(["explain", missing[2].hex()])["cause"] == "never_stored", "what a miss names can be explained"


def test_only_the_last_misses_are_kept(capfdbinary: Any) -> None:
    with running_daemon("limits.misses_per_tenant=3") as daemon:
        with daemon.connect(MODEL) as session:
            for conversation in range(10):
                session.lookup(tokens_of(conversation, 1))
            newest = session.keys(tokens_of(9, 1))
        misses = Kvctl(daemon, capfdbinary).json("explain --recent 100")["misses"]
        assert newest is not None and [misses[0]["key"], len(misses)] == [newest[0].hex(), 3]


def test_no_token_ids_and_no_payload_are_shown(kvctl: Kvctl, tmp_path: Path) -> None:
    """The conversation is in the blocks' headers: an explanation shows keys and sizes only."""
    put(kvctl.daemon, 1, 1)
    reply = kvctl.daemon.ask(
        "Explain", pb.ExplainRequest(keys=[kvctl.daemon.ask("Blocks", pb.BlocksRequest()).blocks[0].key])
    )
    assert tokens_of(1, 1).tobytes()[:16] not in reply.SerializeToString()


def test_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket-dir", str(tmp_path), "explain", "--recent"]) == UNREACHABLE
    assert "kvstored serve" in capsys.readouterr().err
