"""GET /metrics of a live daemon: the figures that kvctl shows, in a format that Prometheus' own parser reads."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.metrics import MetricsSnapshot, families
from kvstored.admin.sampler import NAMED_TENANTS, OTHER_TENANTS
from kvstored.lifecycle import Cause
from kvstored.telemetry.counters import COUNTERS
from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.running_daemon import DaemonDied, RunningDaemon, free_port, running_daemon

BLOCKS = 6


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def daemon(port: int) -> Iterator[RunningDaemon]:
    with running_daemon(f"metrics.listen=127.0.0.1:{port}") as running:
        yield running


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name, then by labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_it_shows_what_kvctl_shows(daemon: RunningDaemon, port: int) -> None:
    with daemon.connect() as session:
        put_conversation(session, 1, BLOCKS, wait="settled")
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert len(lease) == BLOCKS
        assert session.lookup(tokens_of(2, BLOCKS)).blocks == 0
        found = scrape(port)
        status = daemon.ask("Status", pb.StatusRequest())
        tiers = daemon.ask("Tiers", pb.TiersRequest()).tiers
    for name in COUNTERS:
        assert found[f"kvstored_{name}_total"] == {(): status.counters[name]}, name
    assert found["kvstored_clients"] == {(): 1}
    assert found["kvstored_serving"] == {(): 1}
    for tier in tiers:
        labels = (("kind", tier.kind), ("tier", tier.name))
        assert found["kvstored_tier_used_bytes"][labels] == tier.used_bytes
        assert found["kvstored_tier_blocks"][labels] == tier.blocks == BLOCKS
        assert found["kvstored_tier_hits_total"][labels] == tier.hits
    missed = {dict(labels)["cause"]: value for labels, value in found["kvstored_missed_blocks_total"].items()}
    assert missed == dict.fromkeys((cause.name.lower() for cause in Cause), 0) | {"never_stored": BLOCKS}
    assert found["kvstored_acquired_tokens_total"] == {(): BLOCKS * model().block_tokens}
    assert found["kvstored_warnings"] == {(): len(status.warnings)}
    [tenant] = daemon.ask("Tenants", pb.TenantsRequest()).tenants
    assert found["kvstored_tenant_hit_blocks_total"] == {(("tenant", tenant.name),): BLOCKS}


def test_request_times_are_a_histogram_by_verb(daemon: RunningDaemon, port: int) -> None:
    with daemon.connect() as session:
        for _ in range(5):
            session.lookup(tokens_of(1, 1))
        found = scrape(port)
    buckets = {
        dict(labels)["le"]: value
        for labels, value in found["kvstored_request_seconds_bucket"].items()
        if dict(labels)["verb"] == "lookup"
    }
    counts = [buckets[edge] for edge in sorted(buckets, key=float)]
    assert counts == sorted(counts) and counts[-1] == 5
    assert found["kvstored_request_seconds_count"][(("verb", "lookup"),)] == 5
    assert 0 < found["kvstored_request_seconds_sum"][(("verb", "lookup"),)] < 5


def test_the_port_closes_with_the_daemon(daemon: RunningDaemon, port: int) -> None:
    scrape(port)
    daemon.stop()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(DaemonDied, match="cannot listen on metrics.listen " + address),
            running_daemon(f"metrics.listen={address}"),
        ):
            pass


def test_many_tenants_add_no_series() -> None:
    """The first have their own, the others are summed up."""
    tenants = pb.TenantsReply()
    for number in range(NAMED_TENANTS + 3):
        tenants.tenants.add(name=f"t{number}", blocks=1, lookups=2)
    snapshot = MetricsSnapshot(pb.StatusReply(), pb.TiersReply(), tenants, {}, {})
    [blocks] = [family for family in families(snapshot) if family.name == "kvstored_tenant_blocks"]
    by_tenant = {sample.labels["tenant"]: sample.value for sample in blocks.samples}
    assert len(by_tenant) == NAMED_TENANTS + 1 and by_tenant[OTHER_TENANTS] == 3
