"""The server's certificate, taken from its files anew when they change."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.auth.config import TlsConfig
from draftgate.gateway.auth.files import stamp

__all__ = ["ServerCertificates", "tls_problems"]

_log = logging.getLogger(__name__)


class ServerCertificates:
    """gRPC asks at every handshake, on a thread of its own, whether there is a new certificate."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) naming the file at fault."""
        self._config = config
        self._files = [config.cert_file, config.key_file]
        self._files += [config.client_ca_file] if config.client_ca_file else []
        self._lock = threading.Lock()
        self._stamp = self._look()
        # gRPC calls back into it for as long as the server lives.
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._changed,  # type: ignore[arg-type]  # None is no change, the stubs forgot it
            require_client_authentication=config.client_ca_file is not None,
        )

    def check(self) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) if the files would be of no use now."""
        self._read()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            now = self._look()
            if now == self._stamp:
                return None
            # Also if they are of no use: it is said once, and they are read when they change again.
            self._stamp = now
            try:
                found = self._read()
            except DraftgateError as error:
                _log.error("the certificate stays as it was: %s", error.message)
                return None
            _log.info("the certificate has been read again")
            return found

    def _look(self) -> tuple[object, ...]:
        return tuple(stamp(path) for path in self._files)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        for problem in tls_problems(config):
            raise problem
        pair = _content("key_file", config.key_file), _content("cert_file", config.cert_file)
        ca_file = config.client_ca_file
        roots = _content("client_ca_file", ca_file) if ca_file else None
        return grpc.ssl_server_certificate_configuration([pair], roots)


def tls_problems(config: TlsConfig) -> Iterator[DraftgateError]:
    """What is wrong with the files: a DraftgateError(FAILED_PRECONDITION) for each.

    gRPC would say only at the next handshake that they are of no use, and to nobody.
    """
    files = {"cert_file": config.cert_file, "key_file": config.key_file}
    if config.client_ca_file:
        files["client_ca_file"] = config.client_ca_file
    unreadable = set()
    for field, path in files.items():
        try:
            _content(field, path)
        except DraftgateError as error:
            unreadable.add(field)
            yield error
    if not unreadable & {"cert_file", "key_file"}:
        yield from _pair_problems(config)
    if config.client_ca_file and "client_ca_file" not in unreadable:
        try:
            _context().load_verify_locations(config.client_ca_file)
        except ssl.SSLError:
            yield _unusable("client_ca_file", config.client_ca_file, "no certificate")


def _pair_problems(config: TlsConfig) -> Iterator[DraftgateError]:
    try:
        _context().load_cert_chain(config.cert_file, config.key_file, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"it is not the private key of {config.cert_file}"
            yield _unusable("key_file", config.key_file, problem)
        else:
            problem = f"it or {config.key_file} is not in PEM, or the key is encrypted"
            yield _unusable("cert_file", config.cert_file, problem)


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _no_password() -> bytes:
    # Else OpenSSL would ask for one at the terminal.
    return b""


def _content(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(field, path, error.strerror or "it cannot be read") from error


def _unusable(field: str, path: Path, problem: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{field}: {path}: {problem}")
