"""Objects with names and versions, in a real daemon: whole or not there, mapped at one address, never wrong."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl.output import FAILED, MISS, USAGE
from kvstore_client import ErrorKind, KVStoreError
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.objects.sources import ArraySource, BytesSource
from kvstore_client.objects.store import ObjectStore, label, open_objects
from kvstore_client.objects.tables import Table, array_source
from kvstore_proto.manifest import PART_CLASSES
from kvstore_proto.v1 import kvstore_pb2 as wire
from kvstore_proto.v1.admin_pb2 import BlocksRequest
from kvstore_proto.v1.explain_pb2 import ExplainRequest
from tests.reference import forked
from tests.reference.examples import each_nth
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

PART = PART_CLASSES[5]  # 252 KiB
STAGING = 2 << 20


def content(seed: int, nbytes: int = 3 * PART + 1000) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def store(daemon: RunningDaemon) -> Iterator[ObjectStore]:
    with open_objects(daemon.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:
        yield opened
        for each in {each.name for each in opened.listed()}:
            opened.remove(each)


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def put(store: ObjectStore, name: str, data: bytes, **options: Any) -> Any:
    return store.put(name, BytesSource(data), part_bytes=PART, **options)


def test_tensors_of_all_parts_lie_behind_one_another(store: ObjectStore) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "wide": rng.standard_normal((700, 300)).astype("f4"), "none": np.zeros((0, 4), "i8"),
        "odd": np.arange(7, dtype="u1"),
        "half": rng.standard_normal((300, 300)).astype("f2"),
    }  # fmt: skip
    made = store.put("model", ArraySource(arrays, metadata={"a": 1}), part_bytes=PART)
    assert len(made.filled.parts) == 4 == made.filled.durable_parts
    with store.map("model") as mapped:
        assert list(mapped) == list(arrays) and mapped.manifest.metadata == {"a": "1"}
        for name, array in arrays.items():
            assert np.array_equal(mapped[name], array) and mapped.entry(name).shape == array.shape
            assert (mapped[name].ctypes.data - mapped.address) % 64 == 0 and not mapped[name].flags.writeable
        assert mapped.valid and mapped.digest == made.version.digest.hex()


def test_a_put_writes_what_is_new_alone_and_one_content_is_one_version(store: ObjectStore) -> None:
    first, other = content(1), content(2)
    assert put(store, "a", first).filled.new_bytes >= len(first)
    assert put(store, "b", first[: 2 * PART] + other).filled.new_bytes == pytest.approx(len(other), rel=0.35)
    again = put(store, "a", first)
    assert again.filled.new_bytes == 0 and again.version.version == 1
    assert put(store, "a", other).version.version == 2
    assert [label(each) for each in store.listed()] == ["a@1", "a@2", "b@1"]
    with store.map("a") as newest, store.map("a@1") as oldest:
        assert newest.content.tobytes() == other and oldest.content.tobytes() == first
        assert newest.digest != oldest.digest


def test_removing_an_object_leaves_what_others_have(store: ObjectStore) -> None:
    data = content(3)
    put(store, "a", data)
    put(store, "b", data[:PART] + content(4, PART))
    keys, _ = store.located(store.find("a"))
    assert [label(each) for each in store.remove("a")] == ["a@1"]
    tiers = store.session.lookup(keys=keys).tiers
    assert tiers[0] == "host" and set(tiers[1:]) == {"absent"}
    assert store.map("b").content[:PART].tobytes() == data[:PART]
    for name in ("a", "b@7"):
        with pytest.raises(KVStoreError) as missing:
            store.map(name)
        assert missing.value.kind is ErrorKind.NOT_FOUND


def test_a_mapping_outlives_removal_pressure_and_the_store(daemon: RunningDaemon) -> None:
    data = content(5, 8 * PART)
    with open_objects(daemon.socket_dir, staging_bytes=STAGING) as opened:
        put(opened, "mapped", data)
        view = opened.map("mapped").content[100:]
        opened.remove("mapped")
        for seed in range(10, 20):  # 20 MiB into 24
            put(opened, "pressure", content(seed, 8 * PART), durability="none")
        opened.remove("pressure")
    assert view.tobytes() == data[100:]
    keeper = opened._keeper
    assert keeper is not None
    del view
    gc.collect()
    keeper.join(20)
    assert not keeper.is_alive() and opened.session.state == "closed"


def test_what_is_larger_than_dram_is_put_and_verified_but_not_mapped(store: ObjectStore) -> None:
    data = content(6, 100 * PART)
    put(store, "large", data)
    assert store.verify("large") == {}
    with pytest.raises(KVStoreError, match="larger than the host tier"):
        store.map("large", deadline_s=1)


def test_a_pin_and_a_time_to_live(store: ObjectStore) -> None:
    data = content(7)
    put(store, "pinned", data, pin=True)
    put(store, "short", content(8), ttl=1)
    put(store, "twin", data + content(9, PART), pin=True)
    store.unpin("pinned")
    keys, _ = store.located(store.find("twin"))
    described = store.session.explain(ExplainRequest(keys=[key.hex() for key in keys]))
    assert described is not None and [list(each.block.pinned_by) for each in described.blocks] == [["objects"]] * len(
        keys
    )
    store.unpin("twin")
    described = store.session.explain(ExplainRequest(keys=[key.hex() for key in keys]))
    assert described is not None and not any(each.block.pinned_by for each in described.blocks)
    assert not any(each.pinned for each in store.listed())
    assert eventually(lambda: not store.listed("short")) and len(store.listed()) == 2
    with pytest.raises(KVStoreError, match="no object of this name"):
        store.find("short")


def test_a_put_that_names_no_time_to_live_ends_an_earlier_one(store: ObjectStore) -> None:
    put(store, "short", content(17), ttl=60)
    put(store, "for ever", content(17))
    assert [each.expires_s > 0 for each in store.listed()] == [False, True]
    keys, _ = store.located(store.find("for ever"))
    described = store.session.explain(ExplainRequest(keys=[key.hex() for key in keys]))
    assert described is not None and {each.block.expires_in_s for each in described.blocks} == {0}


@pytest.mark.parametrize("pin", [False, True])
def test_what_is_removed_while_it_is_mapped_counts_until_it_is_not(pin: bool, store: ObjectStore, kvctl: Kvctl) -> None:
    data = content(18)
    put(store, "mapped", data, pin=pin)
    view = store.map("mapped").content
    assert "DRAM until released" in kvctl("objects rm mapped").out
    assert eventually(lambda: store.catalogue().limbo_bytes > len(data))
    assert "removed, but mapped" in kvctl("objects list").out and view.tobytes() == data
    put(store, "mapped", data)  # in memory of its own
    assert store.verify("mapped") == {} and view.tobytes() == data
    del view
    gc.collect()
    assert eventually(lambda: not store.catalogue().limbo_bytes)


def test_a_pinned_object_is_removed_for_good(store: ObjectStore) -> None:
    put(store, "pinned", content(19), pin=True)
    keys, _ = store.located(store.find("pinned"))
    assert store.take_away("pinned").mapped_parts == 0
    assert set(store.session.lookup(keys=keys).tiers) == {"absent"}


def test_a_put_that_does_not_fit_names_and_pins_nothing() -> None:
    with (
        running_daemon("limits.pinned_per_tenant=2MiB", "nvme.capacity=16MiB") as running,
        open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened,
    ):
        small = content(20, 4 * PART)
        put(opened, "kept", small, pin=True)
        keys, _ = opened.located(opened.find("kept"))
        with pytest.raises(KVStoreError, match="pinned_per_tenant"):
            put(opened, "pinned", small + content(21, 12 * PART), pin=True)
        with pytest.raises(KVStoreError, match="parts were evicted while the others were put"):
            put(opened, "large", content(22, 300 * PART))
        assert [label(each) for each in opened.listed()] == ["kept@1"]
        pinned = [each.key for each in running.ask("Blocks", BlocksRequest(limit=1000)).blocks if each.pinned_by]
        assert set(map(bytes.hex, keys)) < set(pinned) and len(pinned) == len(keys) + 1  # the manifest


def owners(daemon: RunningDaemon) -> set[tuple[str, ...]]:
    return {tuple(each.pinned_by) for each in daemon.ask("Blocks", BlocksRequest(limit=1000)).blocks}


@pytest.mark.parametrize("ends", ["the daemon", "the client"])
def test_pins_of_a_put_that_is_killed_end_by_themselves(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(26, 12 * PART)
    monkeypatch.setattr("kvstore_client.objects.filling.PUT_PIN_S", 5.0, raising=False)
    with running_daemon() as running:

        def half(done: int, total: int) -> None:
            if 5 * PART < done < 7 * PART:
                if ends == "the daemon":
                    assert () not in owners(running)  # pinned while it is under way
                    running.kill9()
                else:
                    os._exit(0)

        def put_half() -> None:
            with open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:
                opened.put("half", BytesSource(data), part_bytes=PART, pin=True, progress=half)

        if ends == "the daemon":
            with pytest.raises(DaemonUnavailable):
                put_half()
            running.start()
        else:
            process = multiprocessing.get_context("fork").Process(target=put_half)
            process.start()
            process.join(30)
        assert eventually(lambda: owners(running) == {()})
        with open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:
            put(opened, "half", data, pin=True)
        running.kill9()  # its pins are durable as its parts are
        running.start()
        with open_objects(running.socket_dir) as opened:
            assert [each.pinned for each in opened.listed()] == [True] and owners(running) == {("objects",)}


@pytest.mark.parametrize("words", ["drop --pins --tenant {}", "unpin objects --tenant {} --all"])
def test_an_object_is_listed_as_pinned_while_it_is(words: str, store: ObjectStore, kvctl: Kvctl) -> None:
    put(store, "pinned", content(27), pin=True)
    put(store, "other", content(28), pin=True)
    assert [each.pinned for each in store.listed()] == [True, True]
    kvctl(words.format(f"uid-{os.geteuid()}"))
    assert [each.pinned for each in store.listed()] == [False, False]
    put(store, "pinned", content(27))
    assert [each.pinned for each in store.listed("pinned")] == [False]
    put(store, "pinned", content(27), pin=True)
    assert [each.pinned for each in store.listed("pinned")] == [True]


def test_what_is_stored_and_may_not_be_pinned_is_not_listed_as_pinned() -> None:
    with (
        running_daemon("limits.pinned_per_owner=2MiB") as running,
        open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened,
    ):
        put(opened, "kept", content(29, 4 * PART), pin=True)
        with pytest.raises(KVStoreError, match=r"more@1 is stored, but not pinned: .*pinned_per_owner, 2.0 MiB"):
            put(opened, "more", content(30, 5 * PART), pin=True)
        put(opened, "later", content(31, 5 * PART))
        with pytest.raises(KVStoreError, match="not pinned"):
            opened.pin("later")
        assert [(label(each), each.pinned) for each in opened.listed()] == [
            ("kept@1", True), ("later@1", False), ("more@1", False),
        ]  # fmt: skip
        assert owners(running) == {(), ("objects",)}


def test_parts_that_left_nvme_again_are_not_called_durable() -> None:
    with (
        running_daemon("host.capacity=48MiB", "nvme.capacity=16MiB") as running,
        open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened,
    ):
        filled = put(opened, "in DRAM", content(25, 100 * PART)).filled
        keys, where = opened.located(opened.find("in DRAM"))
        running.drop("host", discard=True)
        left = opened.session.lookup(keys=keys).tiers.count("nvme")
        assert set(where.tiers) == {"host"} and filled.durable_parts == left < len(keys)


def test_a_put_that_loses_its_daemon_says_that_it_goes_on() -> None:
    source = BytesSource(content(23, 12 * PART))
    with running_daemon() as running:
        with open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:

            def kill(done: int, total: int) -> None:
                if 5 * PART < done < 7 * PART:
                    running.kill9()

            with pytest.raises(DaemonUnavailable, match=r"start it, .*stored so far: .* goes on from there"):
                opened.put("half", source, part_bytes=PART, progress=kill)
        running.start()
        with open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:
            assert opened.listed() == []
            assert opened.put("half", source, part_bytes=PART).filled.new_bytes < 9 * PART


def test_a_daemon_without_a_catalogue_is_said_to_be_older() -> None:
    class Older:
        def begin(self, request: Any, deadline_s: float) -> Any:
            raise KVStoreError(ErrorKind.INVALID, "a request of a kind this daemon does not know")

    store = ObjectStore(SimpleNamespace(daemon=Older()))  # type: ignore[arg-type]
    with pytest.raises(DaemonUnavailable, match="older") as older:
        store.put("any", BytesSource(b"bytes"))  # before anything is stored
    assert older.value.is_refused


def test_a_refusal_of_the_catalogue_says_why() -> None:
    error = wire.Error(kind=wire.ERROR_KIND_UNAVAILABLE, message="nothing was changed: make room there")
    call = SimpleNamespace(wait=lambda timeout_s: wire.Response(error=error), judge=lambda response: "unavailable")
    daemon = SimpleNamespace(begin=lambda request, deadline_s: call)
    with pytest.raises(KVStoreError, match="make room there"):
        ObjectStore(SimpleNamespace(daemon=daemon)).listed()  # type: ignore[arg-type]


def test_standard_output_that_takes_nothing_is_not_said_to_be_read(store: ObjectStore, daemon: RunningDaemon) -> None:
    put(store, "any", content(24))
    words = ["--socket-dir", str(daemon.socket_dir), "objects", "get", "any"]
    with open("/dev/full", "wb") as full:
        ended = forked.run([sys.executable, "-m", "kvctl.main", *words], stdout=full)
    assert ended.returncode == FAILED and "space left" in ended.stderr and "read" not in ended.stderr


def test_a_table_gives_rows(store: ObjectStore) -> None:
    rows = np.random.default_rng(2).standard_normal((5000, 24)).astype("f4")
    store.put("users", array_source(rows), part_bytes=PART)
    table = Table(store.map("users"))
    wanted = np.random.default_rng(3).integers(0, 5000, 1000)
    out = np.empty((1000, 24), "f4")
    assert np.array_equal(table.gather(wanted, out), rows[wanted]) and len(table) == 5000
    for wrong in ([5000], [-1], [0.5]):
        with pytest.raises(IndexError):
            table.gather(wrong)


def test_objects_survive_kills_and_a_mapping_finds_its_parts_again() -> None:
    data, second = content(11), content(12)
    with running_daemon("limits.lease_ttl_ms=2000") as running:
        with open_objects(running.socket_dir, staging_bytes=STAGING, deadline_s=30) as opened:
            put(opened, "kept", data)
            mapped = opened.map("kept")
            before = mapped.address
            running.kill9()
            running.start()
            assert eventually(lambda: mapped.valid)
            assert mapped.address == before and mapped.content.tobytes() == data
            put(opened, "kept", second)
            running.kill9()
            running.start()
        with open_objects(running.socket_dir) as opened:
            assert [label(each) for each in opened.listed()] == ["kept@1", "kept@2"]
            assert opened.map("kept").content.tobytes() == second


def test_a_put_that_is_interrupted_names_nothing_and_goes_on(store: ObjectStore) -> None:
    data = content(13, 12 * PART)
    source = BytesSource(data)

    class Interrupted(RuntimeError):
        pass

    def stop(done: int, total: int) -> None:
        if done > 5 * PART:
            raise Interrupted

    with pytest.raises(Interrupted):
        store.put("half", source, part_bytes=PART, progress=stop)
    assert store.listed() == []
    assert store.put("half", source, part_bytes=PART).filled.new_bytes < 9 * PART


def test_kvctl_puts_lists_and_writes_out(kvctl: Kvctl, store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(content(14))
    np.save(tmp_path / "rows.npy", np.arange(600.0).reshape(100, 6))
    assert "bytes@1" in kvctl(f"objects put bytes --file {tmp_path / 'in'} --pin").out
    kvctl(f"objects put --table {tmp_path / 'rows.npy'} rows --durability batch")
    listed = kvctl.json("objects list")["objects"]
    assert [(each["name"], each["kind"], each["pinned"]) for each in listed] == [
        ("bytes", "bytes", True), ("rows", "table", False),
    ]  # fmt: skip
    shown = kvctl.json("objects list bytes")
    assert {each["tier"] for each in shown["parts"]} == {"host"}
    assert shown["parts"][0]["key"] in kvctl(f"explain {shown['parts'][0]['key']} --json").out
    assert kvctl("objects get bytes").bytes == content(14)
    kvctl(f"objects get rows -o {tmp_path / 'rows.safetensors'}")
    raw = (tmp_path / "rows.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["rows"]["shape"] == [100, 6] and raw.endswith(np.arange(600.0).tobytes())
    assert kvctl("objects get rows --tensor rows").bytes == np.arange(600.0).tobytes()
    assert "as they were put" in kvctl("objects verify bytes").out
    assert "1 of 1 part in DRAM" in kvctl("objects prefetch rows --wait 5").out
    assert kvctl.json("objects unpin bytes")["pinned"] is False
    assert kvctl.json("objects ttl bytes 172800")["expires_s"] > 0
    assert kvctl.json("objects ttl bytes 0")["expires_s"] == 0
    kvctl("objects rm bytes")
    assert "no object of this name" in kvctl("objects get bytes", exit_code=MISS).err
    for wrong in ("objects put x", "objects rm", "objects ttl rows", "objects list --file a"):
        with pytest.raises(SystemExit, match=str(USAGE)):
            kvctl(wrong)
    kvctl("objects rm rows@no", exit_code=USAGE)


def test_bytes_that_are_not_those_that_were_put_are_found(kvctl: Kvctl, store: ObjectStore) -> None:
    from kvstore_proto.manifest import part_digest, part_tokens

    data = content(15, PART)
    store.session.put(part_tokens(part_digest(data)), payloads=[content(16, PART)])  # by a client that lies
    put(store, "wrong", data)
    assert store.verify("wrong") == {0: "its bytes are not those that were put"}
    assert "part 0" in kvctl("objects verify wrong", exit_code=FAILED).out
    assert store.map("wrong").content.tobytes() != data


@pytest.mark.parametrize("name", each_nth(["a@99999999999999999999", "\udcff", "x" * 5000, "a\nb", "@1", "a@b"], 2))
def test_what_can_name_no_object_is_said_in_one_line(name: str, kvctl: Kvctl, tmp_path: Path) -> None:
    (data := tmp_path / "data").write_bytes(b"bytes")
    actions = [["put", name, "--file", str(data)], ["ttl", name, "5"]]
    actions += [[action, name] for action in ("list", "get", "pin", "unpin", "verify", "prefetch", "rm")]
    for words in actions:
        said = kvctl(["objects", *words], exit_code=USAGE).err
        assert said.count("\n") == 1 and len(said) < 300, words


@pytest.mark.parametrize("kind", ["empty", "npz", "directory", "text"])
def test_what_is_no_array_is_put_in_no_table(kind: str, kvctl: Kvctl, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "npz":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros((2, 2)))
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("" if kind == "empty" else "text")
    said = kvctl(["objects", "put", "--table", str(path), "rows"], exit_code=USAGE).err
    assert str(path) in said and said.count("\n") == 1
