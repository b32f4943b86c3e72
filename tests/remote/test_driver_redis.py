"""The driver of redis and Valkey against real servers on Unix sockets: contract, limits, and servers that fail."""

from __future__ import annotations

import datetime
import ipaddress
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the extra remote is not installed: redis")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvstore_tiers.remote.driver import Driver, Placed, WriteResult
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.testing.driver_contract import MIB, DriverContract, Lent, new_name, new_names, noise
from tests.reference.remote_servers import REDIS_BINARIES, RedisServer, redis_binary, redis_server
from tests.reference.running_daemon import free_port

TIMEOUT_S = 5.0


def opened(server: RedisServer, query: str = "", timeout_s: float = TIMEOUT_S, **credentials: str) -> Driver:
    return open_driver(server.url + query, timeout_s=timeout_s, threads=2, credentials=credentials)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def certificates(folder: Path) -> tuple[str, str, str]:
    """Paths of an authority's certificate, of one for 127.0.0.1 that it signed (itself), and of the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(paths[0]), str(paths[0]), str(paths[1])


class TestRedisDriver(DriverContract):
    server: RedisServer

    @pytest.fixture(autouse=True, scope="class", params=REDIS_BINARIES)
    @classmethod
    def _server(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with redis_server(tmp_path_factory.mktemp("redis"), redis_binary(request.param)) as cls.server:
            yield

    def make_driver(self) -> Driver:
        return opened(self.server)


def test_a_driver_opens_before_its_server(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, redis_binary())
    with closing(opened(server)) as driver:
        with pytest.raises(ConnectionError, match=r"redis at unix://.*redis\.sock"):
            driver.probe()
        with redis_server(tmp_path):
            driver.probe()


def test_a_killed_server_is_found_again(server: RedisServer) -> None:
    with closing(opened(server)) as driver:
        lent, name = Lent(driver), new_name()
        assert lent.write(name, noise(100)) is WriteResult.STORED
        server.kill()
        for call in (driver.probe, lambda: driver.sizes([name]), lambda: lent.read(name, 100)):
            with pytest.raises(ConnectionError):
                call()
        with pytest.raises(ConnectionError):
            lent.write(name, noise(100))
        server.start()
        assert lent.read(name, 100) is None
        assert lent.write(name, noise(100)) is WriteResult.STORED


def test_a_server_that_was_restarted_between_two_calls_is_not_noticed(server: RedisServer) -> None:
    with closing(opened(server)) as driver:
        driver.probe()
        server.kill()
        server.start()
        assert driver.sizes(new_names(2)) == [0, 0]


def test_a_frozen_server_is_given_up_in_time(server: RedisServer) -> None:
    with closing(opened(server, timeout_s=0.3)) as driver:
        lent, name = Lent(driver, 256 << 20), new_name()
        assert lent.write(name, noise(100)) is WriteResult.STORED
        server.freeze()
        for call in (
            driver.probe,
            lambda: driver.sizes([name]),
            lambda: lent.read(name, 100),
            lambda: lent.write_all(new_names(16), [noise(2 * MIB)] * 16),
            lambda: driver.remove([name]),
        ):
            with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
                call()
        server.thaw()
        with closing(opened(server)) as patient:
            patient.probe()
        assert lent.read(name, 100) in (noise(100), None)  # the removal may have been in its queue
        assert lent.write(new_name(), noise(100)) is WriteResult.STORED


def test_a_server_that_freezes_in_the_middle_is_given_up_in_time(server: RedisServer) -> None:
    """The bound is of the call, not of each piece: reads go on until the freeze, and the last one ends."""
    with closing(opened(server, timeout_s=1.0)) as driver, ThreadPoolExecutor(1) as pool:
        lent = Lent(driver, 512 << 20)
        names = new_names(8)
        assert set(lent.write_all(names, [noise(2 * MIB)] * 8)) == {WriteResult.STORED}

        def read_on() -> None:
            places = [lent.piece(2 * MIB) for _ in names]
            while True:
                driver.read([Placed(name, place) for name, place in zip(names, places, strict=True)])

        reading = pool.submit(read_on)
        time.sleep(0.05)  # somewhere within a reply
        server.freeze()
        assert isinstance(reading.exception(timeout=30), TimeoutError)
        server.thaw()
        assert driver.sizes(names) == [2 * MIB] * 8


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru"])
def test_a_full_server_refuses(tmp_path: Path, policy: str) -> None:
    with redis_server(tmp_path, maxmemory="24mb", maxmemory_policy=policy) as server, closing(opened(server)) as driver:
        assert driver.evicts is False
        lent, names = Lent(driver, 128 << 20), new_names(40)
        written = lent.write_all(names, [noise(MIB, number) for number in range(40)])
        assert set(written) == {WriteResult.STORED, WriteResult.NO_ROOM}
        assert written[0] is WriteResult.STORED and written[-1] is WriteResult.NO_ROOM
        stored = [name for name, was in zip(names, written, strict=True) if was is WriteResult.STORED]
        assert lent.read(stored[0], MIB) == noise(MIB, names.index(stored[0]))
        driver.remove(stored)
        assert lent.write(names[-1], noise(MIB)) is WriteResult.STORED


def test_a_full_server_that_evicts_takes_all(tmp_path: Path) -> None:
    settings = {"maxmemory": "24mb", "maxmemory_policy": "allkeys-lru"}
    with redis_server(tmp_path, **settings) as server, closing(opened(server)) as driver:
        assert driver.evicts is True
        lent, names = Lent(driver), new_names(40)
        assert lent.write_all(names, [noise(MIB, number) for number in range(40)]) == [WriteResult.STORED] * 40
        sizes = driver.sizes(names)
        assert sizes[-1] == MIB and 0 in sizes


def test_a_policy_without_a_limit_evicts_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory_policy="allkeys-lru") as server, closing(opened(server)) as driver:
        assert driver.evicts is False


def test_a_policy_is_asked_for_again_after_a_restart(tmp_path: Path) -> None:
    binary = redis_binary()
    full = {"maxmemory": "24mb", "maxmemory_policy": "allkeys-lru"}
    with closing(opened(RedisServer(tmp_path, binary))) as driver:
        with redis_server(tmp_path, binary):
            assert driver.evicts is False
        with redis_server(tmp_path, binary, **full):
            assert driver.evicts is True


def test_a_password_is_given(tmp_path: Path) -> None:
    with redis_server(tmp_path, requirepass="let me in") as server:
        with closing(opened(server, password="let me in")) as driver:
            assert Lent(driver).write(new_name(), noise(MIB)) is WriteResult.STORED
        for credentials, answer in (({"password": "wrong"}, "WRONGPASS"), ({}, "NOAUTH")):
            with closing(opened(server, **credentials)) as driver:
                with pytest.raises(PermissionError, match=f"refuses the credentials: {answer}"):
                    Lent(driver).write(new_name(), noise(MIB))
                with pytest.raises(PermissionError):
                    driver.probe()


def test_databases_and_prefixes_are_apart(server: RedisServer) -> None:
    name = new_name()
    for query in ("", "?db=3", "?prefix=a:", "?db=3&prefix=a:"):
        with closing(opened(server, query)) as driver:
            lent = Lent(driver)
            assert lent.read(name, 100) is None
            assert lent.write(name, query.encode() or b"-") is WriteResult.STORED
    for query in ("?db=3", "?db=3&prefix=a:"):
        with closing(opened(server, query)) as driver:
            assert Lent(driver).read(name, 100) == query.encode()


def test_a_key_of_another_application_is_no_value(server: RedisServer) -> None:
    name, other = new_name(), new_name()
    server.ask(f"RPUSH kvstored:{name} another-application")
    with closing(opened(server)) as driver:
        lent = Lent(driver)
        assert lent.write(other, noise(100)) is WriteResult.STORED
        assert driver.sizes([name, other]) == [0, 100]
        assert lent.read_all([name, other], [100, 100]) == [None, noise(100)]
        assert lent.write(name, noise(100)) is WriteResult.EXISTS


def test_the_servers_settings_are_never_set(server: RedisServer) -> None:
    with closing(opened(server)) as driver:
        lent, name = Lent(driver), new_name()
        lent.write(name, noise(100))
        lent.read(name, 100)
        assert driver.sizes([name]) == [100] and not driver.evicts
        driver.remove([name])
    commands = set(re.findall(r"cmdstat_([^:]+):", server.ask("INFO commandstats")))
    commands.discard("config|get")  # Valkey asks itself as it starts
    assert commands == {"ping", "client|setinfo", "client|id", "set", "get", "strlen", "unlink", "info"}


def test_tls_needs_a_server_that_its_authority_signed(tmp_path: Path) -> None:
    binary, port = redis_binary("redis-server"), free_port()
    ca, certificate, key = certificates(tmp_path)
    settings = {"tls_port": str(port), "tls_cert_file": certificate, "tls_key_file": key, "tls_auth_clients": "no"}
    server = RedisServer(tmp_path, binary, bind="127.0.0.1", **settings)
    try:
        server.start()
    except AssertionError:
        if "tls-port" in server.log:  # a directive that it does not know
            pytest.skip("redis-server was built without TLS")
        raise
    with ExitStack() as stack:
        stack.callback(server.stop)
        for query, credentials in ((f"?ca={ca}", {}), ("", {"ca": ca})):
            url = f"rediss://127.0.0.1:{port}{query}"
            with closing(open_driver(url, timeout_s=TIMEOUT_S, threads=1, credentials=credentials)) as driver:
                lent, name = Lent(driver), new_name()
                assert lent.write(name, noise(MIB)) is WriteResult.STORED
                assert lent.read(name, MIB) == noise(MIB)
                driver.probe()
        url = f"rediss://127.0.0.1:{port}"
        driver = open_driver(url, timeout_s=TIMEOUT_S, threads=1, credentials={})
        with closing(driver), pytest.raises(ConnectionError, match="certificate"):
            driver.probe()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://", "has no host"),
        ("unix://relative/path", "has no path"),
        ("redis://host/zero", "no database"),
        ("redis://host?db=-1", "no database"),
        ("redis://host?size=1", "takes no 'size'"),
        ("redis://user:secret@host", "not in the URL"),
        ("redis://host:port", "[Pp]ort"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        open_driver(url, timeout_s=1, threads=1, credentials={})
    assert "secret" not in str(refused.value)


def test_an_unknown_credential_is_refused() -> None:
    with pytest.raises(ValueError, match="no credential 'pasword'"):
        open_driver("redis://host", timeout_s=1, threads=1, credentials={"pasword": "x"})


@pytest.mark.parametrize("by", ["the same process", "the next process"])
def test_a_write_that_was_given_up_does_not_come_back_after_a_removal(tmp_path: Path, by: str) -> None:
    """The server was stopped: the bytes of the write wait in a connection that was closed."""
    port = free_port()
    with ExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path, port=str(port), bind="127.0.0.1"))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        drivers = [
            stack.enter_context(
                closing(open_driver(f"redis://127.0.0.1:{port}/0", timeout_s=1.0, threads=4, credentials={}))
            )
            for _ in range(2)
        ]
        for generation, driver in enumerate(drivers):
            driver.follow("test", generation)
        writer, remover = drivers[0], drivers[by == "the next process"]
        names, value = new_names(3), memoryview(bytearray(noise(64 << 10, 1)))
        large = [memoryview(bytearray(8 * MIB)) for _ in range(2)]
        writer.write([Placed(name, memory) for name, memory in zip(names[1:], large, strict=True)])
        for driver in {writer, remover}:  # two connections of each
            list(threads.map(lambda at, of=driver: of.read([Placed(names[1 + at], large[at])]), range(2)))
        server.freeze()
        with pytest.raises(TimeoutError):
            writer.write([Placed(names[0], value)])
        removed = threads.submit(remover.remove, names[:1])
        time.sleep(0.2)  # the bytes of the removal are with the stopped server, too
        server.thaw()
        removed.result()
        for _ in range(50):
            assert remover.sizes(names[:1]) == [0]


def test_a_server_that_started_again_ends_no_connection_of_another_node(tmp_path: Path) -> None:
    """The server numbers connections from the beginning: what one node lost before has the number of another's now."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))
        with redis_server(tmp_path) as server:
            node, other = (stack.enter_context(closing(opened(server, timeout_s=1.0))) for _ in range(2))
            list(threads.map(node.sizes, [new_names(200)] * 8))  # several connections
            server.freeze()
            for lost in [threads.submit(node.probe) for _ in range(8)]:
                with pytest.raises(TimeoutError):
                    lost.result()
            server.thaw()
        with redis_server(tmp_path) as server:
            list(threads.map(other.sizes, [new_names(200)] * 8))
            before = set(re.findall(r"id=(\d+) .*cmd=strlen", server.ask("CLIENT LIST")))  # whose order changes
            node.remove(new_names(1))
            assert before and set(re.findall(r"id=(\d+) .*cmd=strlen", server.ask("CLIENT LIST"))) == before
