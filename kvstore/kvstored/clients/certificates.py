"""The certificate of the TCP listener for unary calls, which a reload renews without closing a connection.

The module owns the pair that is served: a new pair replaces it only when its files are whole and belong together, so a
half-written renewal changes nothing.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from kvstored.config import ConfigError
from kvstored.config.schema import UnarySection

Pair = tuple[bytes, bytes]  # private key, certificate chain; PEM


class Certificates:
    """The key and certificate chain of the TCP listener, read from `config`. Raises ConfigError if they
    cannot be used.
    """

    def __init__(self, config: UnarySection) -> None:
        self._prepared = self._served = read_pair(config)

    @staticmethod
    def of(config: UnarySection) -> Certificates | None:
        """Return the certificates that `config` names, or None when it does not use TLS."""
        return Certificates(config) if config.listen and config.tls_cert is not None else None

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC server credentials. Each new connection gets the key and certificate that are in force then."""
        return grpc.dynamic_ssl_server_credentials(_configuration(self._served), lambda: _configuration(self._served))

    def prepare(self, config: UnarySection) -> None:
        """Read the files of `config` again; `renew` puts them in force. Raises ConfigError if they cannot be used."""
        self._prepared = read_pair(config) if config.tls_cert is not None else self._served

    def renew(self) -> None:
        """Use the key and certificate chain that `prepare` has read from their files, from the next connection on."""
        self._served = self._prepared


def read_pair(config: UnarySection) -> Pair:
    """Return the private key and the certificate chain that `config` names, as PEM. Raises ConfigError if they cannot
    be read or do not belong together, which gRPC would only report when a client connects.
    """
    assert config.tls_cert is not None and config.tls_key is not None
    named = f"unary.tls_cert {config.tls_cert} and unary.tls_key {config.tls_key}"
    try:
        pair = _bytes_of(config.tls_key, config.tls_cert)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # else it asks at the terminal
        is_same = pair == _bytes_of(config.tls_key, config.tls_cert)
    except ssl.SSLError as error:
        raise ConfigError(f"{named} do not make a pair: {error.reason or error}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or named} cannot be read: {error.strerror}") from None
    if not is_same:
        raise ConfigError(f"{named} changed while they were read: reload again")
    return pair


def _bytes_of(key: Path, chain: Path) -> Pair:
    return key.read_bytes(), chain.read_bytes()


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pair])
