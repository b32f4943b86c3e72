"""A daemon whose NVMe tier has a lossy codec: who accepts lossy copies gets them, and nobody else, over kills too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import ENGINE_ORDER
from kvstore_proto.v1 import admin_pb2, explain_pb2, kvstore_pb2
from kvstore_proto.v1 import unary_pb2 as unary
from kvstore_tiers.codecs import TESTING_ENVIRONMENT
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.examples import each_nth
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.unary_client import unary_client

MODEL, BLOCKS = model(), 6
LOSSY_ONLY = (0, "lossy_only", 0, "lossy_only")
SETTINGS = (
    "host.capacity=32MiB", "host.staging=8MiB", "host.arena=1MiB", "host.warm_restart=holder",
    "nvme.capacity=32MiB", "nvme.slab=1MiB", "nvme.codec=rounding", "nvme.codec_staging=1MiB",
)  # fmt: skip


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")
    config = tmp_path / "kvstored.toml"
    config.write_text(f'[[tenant]]\nname = "chat"\nuids = [{os.getuid()}]\nlossy = true\n')
    with running_daemon(*SETTINGS, config=config) as running:
        yield running


def _payloads(number: int) -> list[np.ndarray]:
    return [np.asarray(payload).view(np.uint8).reshape(-1) for payload in payloads_of(number, BLOCKS, MODEL)]


def _rounded(number: int) -> list[np.ndarray]:
    payloads = [payload.copy() for payload in _payloads(number)]
    for payload in payloads:
        payload[0::2] = 0
    return payloads


def _put(session: Session, number: int) -> None:
    receipt = session.put(tokens_of(number, BLOCKS), payloads=_payloads(number), wait="settled")
    assert set(receipt.durability) == {"durable"}


def _found(session: Session, number: int) -> tuple[int, str, int, str]:
    tokens = tokens_of(number, BLOCKS)
    with session.get(tokens) as lease:
        found = session.lookup(tokens)
        return lease.blocks, lease.reason, found.blocks, found.reason


def _gets(session: Session, number: int, *, lossy: bool) -> bool:
    with session.get(tokens_of(number, BLOCKS)) as lease:
        errors = {lease.error_bound(block) for block in range(lease.blocks)}
        assert errors == ({255.0} if lossy else {0.0})
        return holds(lease, _rounded(number) if lossy else _payloads(number)) and lease.blocks == BLOCKS


def test_lossy_copies_are_for_those_who_accept_them(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL, exact=False) as lossy, daemon.connect(MODEL) as exact:
        _put(lossy, 1)
        _put(exact, 2)
        assert _gets(lossy, 1, lossy=False) and _gets(exact, 1, lossy=False), "DRAM has what was put"
        daemon.drop("host")
        assert _found(exact, 1) == LOSSY_ONLY and exact.probe(tokens_of(1, BLOCKS)).blocks == 0
        assert exact.prefetch(tokens_of(1, BLOCKS)).scheduled_blocks == 0
        assert _gets(lossy, 1, lossy=True) and _gets(lossy, 2, lossy=False) and _gets(exact, 2, lossy=False)
        assert _found(exact, 1) == LOSSY_ONLY, "a promoted copy is lossy too"
        assert exact.probe(tokens_of(1, BLOCKS)).blocks == 0 and exact.probe(tokens_of(2, BLOCKS)).blocks == BLOCKS
        with lossy.get(tokens_of(1, BLOCKS)) as held:
            _put(exact, 1)
            assert _gets(exact, 1, lossy=False) and _gets(lossy, 1, lossy=False)
            assert held.valid and holds(held, _rounded(1)), "who reads a lossy copy keeps its bytes"
        assert eventually(lambda: daemon.tiers()["nvme"].lossy_blocks == 0)
        daemon.drop("host")
        assert _gets(exact, 1, lossy=False)
        counters = daemon.status().counters
        assert counters["replaced_lossy_copies"] >= BLOCKS and counters["refused_lossy_blocks"] >= 2 * BLOCKS
        assert counters["corrupt_blocks"] == 0


@pytest.mark.parametrize("how", each_nth(["killed", "stopped"], 2))
def test_a_restart_knows_which_copies_are_lossy(how: str, daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL, exact=False) as lossy:
        _put(lossy, 1)
        _put(lossy, 2)
        daemon.drop("host")
        assert _gets(lossy, 1, lossy=True)  # now in DRAM, which a warm restart keeps
    daemon.stop() if how == "stopped" else daemon.kill9()
    daemon.restart()
    with daemon.connect(MODEL, exact=False) as lossy, daemon.connect(MODEL) as exact:
        assert _found(exact, 1) == LOSSY_ONLY and _found(exact, 2) == LOSSY_ONLY
        assert daemon.tiers()["host"].lossy_blocks == BLOCKS
        assert _gets(lossy, 1, lossy=True) and _gets(lossy, 2, lossy=True)
        _put(exact, 1)
    daemon.stop() if how == "stopped" else daemon.kill9()
    daemon.restart()
    with daemon.connect(MODEL) as exact:
        assert _gets(exact, 1, lossy=False) and _found(exact, 2) == LOSSY_ONLY


def test_a_tenant_that_allows_it_no_more_gets_no_lossy_copy(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL, exact=False) as lossy:
        _put(lossy, 1)
        daemon.drop("host")
    daemon.stop()
    assert daemon.config is not None
    daemon.config.write_text(daemon.config.read_text().replace("lossy = true", "lossy = false"))
    daemon.restart()
    with daemon.connect(MODEL, exact=False) as session:
        assert _found(session, 1) == LOSSY_ONLY


def test_operators_see_the_form_and_the_error(daemon: RunningDaemon, capfdbinary: Any) -> None:
    kvctl = Kvctl(daemon, capfdbinary)
    with daemon.connect(MODEL, exact=False) as lossy:
        _put(lossy, 1)
        tier = daemon.tiers()["nvme"]
        assert (tier.codec, tier.lossy_blocks) == ("rounding", BLOCKS) and tier.logical_bytes > tier.stored_bytes
        assert (
            f"codec rounding, ratio {tier.logical_bytes / tier.stored_bytes:.2f}, 6 blocks lossy" in kvctl("tiers").out
        )
        listed = daemon.ask("Blocks", admin_pb2.BlocksRequest()).blocks
        assert all(dict(zip(block.tiers, block.errors, strict=True)) == {"host": 0, "nvme": 255} for block in listed)
        assert "nvme (±2.6e+02)" in kvctl("blocks").out
        explained = daemon.ask("Explain", explain_pb2.ExplainRequest(keys=[listed[0].key])).blocks[0]
        assert {copy.tier: copy.error for copy in explained.copies} == {"host": 0, "nvme": 255}
        assert "nvme (±2.6e+02)" in kvctl(f"explain {listed[0].key}").out


def test_unary_calls_say_what_they_accept(daemon: RunningDaemon) -> None:
    payloads = _payloads(3)
    chain = {"fingerprint": MODEL.canonical(), "token_ids": [int(token) for token in tokens_of(3, BLOCKS)]}
    lossy, exact = unary.Chain(**chain, accepts_lossy=True), unary.Chain(**chain)
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
        put = client.put(lossy, payloads)
        assert set(put.statuses) == {unary.KEY_STATUS_STORED}
        assert not client.get(exact).errors
        daemon.drop("host")
        assert set(client.lookup(exact).miss_reasons) == {kvstore_pb2.MISS_REASON_LOSSY_ONLY}
        missed = client.get(exact)
        assert not missed.payloads and missed.miss_reasons[0] == kvstore_pb2.MISS_REASON_LOSSY_ONLY
        got = client.get(lossy)
        assert [bytes(payload) for payload in got.payloads] == [payload.tobytes() for payload in _rounded(3)]
        assert list(got.errors) == [255.0] * BLOCKS
        assert set(client.put(exact, payloads).statuses) == {unary.KEY_STATUS_STORED}
        assert client.get(exact).payloads[0] == payloads[0].tobytes()


def test_a_tenant_that_does_not_allow_it_stores_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")
    with running_daemon(*SETTINGS) as running, running.connect(MODEL, exact=False) as session:
        _put(session, 1)
        running.drop("host")
        assert _gets(session, 1, lossy=False) and running.tiers()["nvme"].lossy_blocks == 0


def test_int8_keeps_half_of_the_bytes_and_says_how_far_its_numbers_are_off(tmp_path: Path) -> None:
    group = LayerGroup(0, layers=tuple(range(8)), bytes_per_token_per_layer=2 * 2 * 64 * 2, heads=2)
    kv = Fingerprint("made", "up", kv_dtype="f16", layout=ENGINE_ORDER, block_tokens=64, groups=(group,))
    config, chosen = tmp_path / "kvstored.toml", np.random.default_rng(3)
    config.write_text(f'[[tenant]]\nname = "chat"\nuids = [{os.getuid()}]\nlossy = true\n')
    tokens = np.arange(4 * 64, dtype=np.int32)
    put = [chosen.standard_normal(kv.payload_bytes() // 2).astype(np.float16) for _ in range(4)]
    settings = [*SETTINGS, "nvme.codec=int8", "nvme.codec_staging=8MiB"]
    with running_daemon(*settings, config=config) as running, running.connect(kv, exact=False) as session:
        receipt = session.put(tokens, payloads=[each.view(np.uint8) for each in put], wait="settled")
        assert set(receipt.durability) == {"durable"}
        tier = running.tiers()["nvme"]
        assert tier.lossy_blocks == 4 and tier.logical_bytes > 1.85 * tier.stored_bytes
        assert tier.codecs[0].name == "int8" and tier.codecs[0].ratio > 1.9 and tier.codecs[0].encoding_s > 0
        running.drop("host")
        with session.get(tokens) as lease:
            assert lease.blocks == 4
            for block, numbers in enumerate(put):
                off = np.abs(
                    lease.payload(block).view(np.float16).astype(np.float64) - numbers.astype(np.float64)
                ).max()
                assert 0 < off <= lease.error_bound(block) < 0.1


def test_a_reload_that_disallows_lossy_copies_counts_for_open_sessions(
    daemon: RunningDaemon, tmp_path: Path, capfdbinary: Any
) -> None:
    config = tmp_path / "kvstored.toml"
    with daemon.connect(MODEL, exact=False) as session:
        _put(session, 1)
        daemon.drop("host")
        assert _gets(session, 1, lossy=True)
        config.write_text(config.read_text().replace("lossy = true", "lossy = false"))
        Kvctl(daemon, capfdbinary)("reload")
        assert _found(session, 1) == LOSSY_ONLY
        _put(session, 1)
        daemon.drop("host")
        assert _gets(session, 1, lossy=False)
