"""The catalogue of objects against a model of it: what is answered is saved, and nothing else is listed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients import objects
from kvstored.clients.objects import ObjectCatalogue
from kvstored.clock import SystemClock
from kvstored.state.orders import Orders as SavedOrders
from kvstored.state.process import StateProcess
from tests.reference.examples import examples

NAMES = st.sampled_from(["a", "aa", "b/c", "ä"])
DIGESTS = st.integers(0, 3).map(lambda number: bytes([number]) * 32)


class Orders:
    """Saved entries, of which a successor has those alone that were saved."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[bytes, bytes]] = {"objects": {}}
        self.saved: dict[bytes, bytes] = {}
        self.fails = False

    async def read(self) -> None:
        self.entries["objects"] = dict(self.saved) | self.entries["objects"]

    async def save(self, name: str, key: bytes, value: bytes | None) -> None:
        if self.fails:
            raise KVStoreError(ErrorKind.UNAVAILABLE, "nothing was changed")
        if value is None:
            self.saved.pop(key, None)
        else:
            self.saved[key] = value

    async def remove(self, name: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            await self.save(name, key, None)
            self.entries[name].pop(key, None)


def entry(digest: bytes, expires_s: int = 0) -> pb.ObjectVersion:
    return pb.ObjectVersion(digest=digest, manifest_parts=digest, manifest_bytes=9, kind="bytes", expires_s=expires_s)


class CatalogueModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000
        clock: Any = SimpleNamespace(wall_ns=lambda: self.now_s * 10**9)
        self.orders = Orders()
        self.catalogue = ObjectCatalogue(self.orders, clock)
        self.tenant: Any = SimpleNamespace(index_name="aa11", name="chat")
        self.other: Any = SimpleNamespace(index_name="aa1", name="other")
        self.model: dict[str, list[tuple[int, bytes, int]]] = {}

    def ask(self, tenant: Any = None, **fields: Any) -> list[pb.ObjectVersion]:
        return list(asyncio.run(self.catalogue.answer(tenant or self.tenant, pb.Catalogue(**fields))).objects)

    def live(self, name: str) -> list[tuple[int, bytes, int]]:
        return [each for each in self.model.get(name, []) if not 0 < each[2] <= self.now_s]

    @rule(name=NAMES, digest=DIGESTS, ttl_s=st.sampled_from([0, 0, 5]), fails=st.sampled_from([False, False, True]))
    def put(self, name: str, digest: bytes, ttl_s: int, fails: bool) -> None:
        self.orders.fails = fails
        expires_s = self.now_s + ttl_s if ttl_s else 0
        versions = self.live(name)
        try:
            made = self.ask(action=pb.Catalogue.ACTION_PUT, name=name, object=entry(digest, expires_s))
        except KVStoreError:
            assert fails
            return
        finally:
            self.orders.fails = False
        if versions and versions[-1][1] == digest:
            number, _, before = versions.pop()
            expires_s = max(before, expires_s) if before and expires_s else 0
        else:
            number = versions[-1][0] + 1 if versions else 1
        assert [made[0].version, made[0].digest] == [number, digest]
        self.model[name] = [*versions, (number, digest, expires_s)]

    @rule(name=NAMES, version=st.integers(0, 4))
    def remove(self, name: str, version: int) -> None:
        removed = self.ask(action=pb.Catalogue.ACTION_REMOVE, name=name, version=version)
        gone = {each for each in self.live(name) if version in (0, each[0])}
        assert {each.version for each in removed} == {each[0] for each in gone}
        self.model[name] = [each for each in self.live(name) if each not in gone]

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def restart(self) -> None:
        self.orders.entries["objects"] = {}

    @invariant()
    def lists_what_is_there(self) -> None:
        listed = [(each.name, each.version, each.digest) for each in self.ask()]
        wanted = [(name, each[0], each[1]) for name in self.model for each in self.live(name)]
        assert sorted(listed) == sorted(wanted) and not self.ask(self.other)
        for name in self.model:
            assert [each.version for each in self.ask(name=name)] == [each[0] for each in self.live(name)]


TestCatalogueModel = CatalogueModel.TestCase
TestCatalogueModel.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


def catalogue() -> ObjectCatalogue:
    clock: Any = SimpleNamespace(wall_ns=lambda: 10**12)
    return ObjectCatalogue(Orders(), clock)


TENANT: Any = SimpleNamespace(index_name="aa11", name="chat")


def test_a_long_list_comes_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PAGE", 3)
    listing, found = catalogue(), list[str]()

    async def run() -> None:
        for number in range(8):
            put = pb.Catalogue(action=pb.Catalogue.ACTION_PUT, name=f"n{number}", object=entry(b"1" * 32))
            await listing.answer(TENANT, put)
        request, more = pb.Catalogue(), True
        while more:
            reply = await listing.answer(TENANT, request)
            found.extend(each.name for each in reply.objects)
            more = reply.more
            request.after_name, request.after_version = reply.objects[-1].name, reply.objects[-1].version

    asyncio.run(run())
    assert found == [f"n{number}" for number in range(8)]


def test_what_no_object_can_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_VERSIONS", 1)
    listing = catalogue()
    good = entry(b"1" * 32)

    async def refused(action: Any, name: str, described: pb.ObjectVersion) -> ErrorKind:
        with pytest.raises(KVStoreError) as error:
            await listing.answer(TENANT, pb.Catalogue(action=action, name=name, object=described))
        return error.value.kind

    async def run() -> None:
        put, keep = pb.Catalogue.ACTION_PUT, pb.Catalogue.ACTION_KEEP
        for name in ("", "a@1", "a\n", "x" * 1025):
            assert await refused(put, name, good) is ErrorKind.INVALID
        for wrong in (entry(b"1"), pb.ObjectVersion(digest=b"1" * 32, manifest_bytes=1), entry(b"")):
            assert await refused(put, "a", wrong) is ErrorKind.INVALID
        assert await refused(keep, "a", good) is ErrorKind.NOT_FOUND
        await listing.answer(TENANT, pb.Catalogue(action=put, name="a", object=good))
        assert await refused(put, "b", good) is ErrorKind.TOO_LARGE

    asyncio.run(run())


def test_entries_that_were_not_read_yet_are_forgotten_too_and_all_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        process = StateProcess(tmp_path, "test", SystemClock())
        before = SavedOrders(process)
        for number in range(3):
            await before.save(objects.OBJECTS, b"aa\0%d" % number, b"x")
        await before.save(objects.OBJECTS, b"bb\0", b"y")
        later, changes = SavedOrders(process), list[bool]()
        begun = process.transaction

        def counted(*, durable: bool) -> Any:
            changes.append(durable)
            return begun(durable=durable)

        process.transaction = counted  # type: ignore[assignment, method-assign]
        await later.forget(objects.OBJECTS, objects.of_tenant("aa"))
        assert changes == [True]
        assert later.items(objects.OBJECTS) == [(b"bb\0", b"y")] == list(await process.read(objects.OBJECTS))
        await process.close()

    asyncio.run(run())
