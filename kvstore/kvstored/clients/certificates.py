"""The certificate of the TCP listener for unary calls, which a reload renews without closing a connection, and the
names in its callers' certificates.

The module owns what is served: a new pair replaces it only when its files are whole and belong together, so a
half-written renewal changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import grpc

from kvstored.config import ConfigError
from kvstored.config.schema import UnarySection

_SAN_PROPERTIES = {"peer_dns": "dns", "peer_uri": "uri"}  # as gRPC calls them
_ANY_SAN, _COMMON_NAME = "x509_subject_alternative_name", "x509_common_name"


class Credentials(NamedTuple):
    """The files that the TCP listener uses, in PEM: its private key and its certificate chain, and the certificates of
    clients' authorities, None if clients need no certificate."""

    key: bytes
    chain: bytes
    client_ca: bytes | None


def names_in_certificate(properties: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Return the names of a client's verified certificate, such as "dns:a.example", from `properties`, gRPC's
    description of the connection. The common name counts only where the certificate has no subject alternative name of
    any kind."""
    found = [
        f"{kind}:{_text(value).lower() if kind == 'dns' else _text(value)}"
        for key, kind in _SAN_PROPERTIES.items()
        for value in properties.get(key, ())
    ]
    if not properties.get(_ANY_SAN):
        found += [f"cn:{_text(value)}" for value in properties.get(_COMMON_NAME, ())]
    return found


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


class Certificates:
    """The key and certificate chain of the TCP listener, read from `config`. Raises ConfigError if they
    cannot be used.
    """

    def __init__(self, config: UnarySection) -> None:
        self._prepared = self._served = read_credentials(config)

    @staticmethod
    def of(config: UnarySection) -> Certificates | None:
        """Return the certificates that `config` names, or None when it does not use TLS."""
        return Certificates(config) if config.listen and config.tls_cert is not None else None

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC server credentials. Each new connection gets the key, the certificate and the clients'
        authorities that are in force then."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            lambda: _configuration(self._served),
            require_client_authentication=self._served.client_ca is not None,
        )

    def can_renew(self, config: UnarySection) -> bool:
        """Return whether the files of `config` can be served without a restart: gRPC does not begin to want clients'
        certificates, or stop it, on an open port."""
        return config.tls_cert is not None and (config.tls_client_ca is None) == (self._served.client_ca is None)

    def prepare(self, config: UnarySection) -> None:
        """Read the files of `config` again; `renew` puts them in force. Raises ConfigError if they cannot be used."""
        if self.can_renew(config):
            self._prepared = read_credentials(config)

    def renew(self) -> None:
        """Use the key and certificate chain that `prepare` has read from their files, from the next connection on."""
        self._served = self._prepared


def read_credentials(config: UnarySection) -> Credentials:
    """Return what the files that `config` names have, as PEM. Raises ConfigError if they cannot be read, or the key and
    the certificate do not belong together, which gRPC would only report when a client connects.
    """
    assert config.tls_cert is not None and config.tls_key is not None
    import ssl  # only where it is asked for

    named = f"unary.tls_cert {config.tls_cert} and unary.tls_key {config.tls_key}"
    try:
        read = _contents(config)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # else it asks at the terminal
        if config.tls_client_ca is not None:
            named = f"unary.tls_client_ca {config.tls_client_ca}"
            context.load_verify_locations(config.tls_client_ca)
        is_same = read == _contents(config)
    except ssl.SSLError as error:
        what = "has no certificate" if "client_ca" in named else "do not make a pair"
        raise ConfigError(f"{named} {what}: {error.reason or error}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or named} cannot be read: {error.strerror}") from None
    if not is_same:
        raise ConfigError(f"{named} changed while they were read: reload again")
    return read


def _contents(config: UnarySection) -> Credentials:
    assert config.tls_cert is not None and config.tls_key is not None
    authorities = None if config.tls_client_ca is None else config.tls_client_ca.read_bytes()
    return Credentials(config.tls_key.read_bytes(), config.tls_cert.read_bytes(), authorities)


def _configuration(served: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(served.key, served.chain)], served.client_ca)
