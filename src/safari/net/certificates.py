"""Certificates for the lab example: a certificate authority and a server certificate signed by it.

For networks without a PKI. The authority's key is discarded after signing; clients need the authority's
certificate, which they can verify by its fingerprint.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safari.errors import MissingExtraError, SafariError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ImportError as error:
    raise MissingExtraError("cryptography", "net", "certificates") from error

_DAYS = 365
_SECONDS = 10.0


@dataclass(frozen=True)
class Certificates:
    """Three files (PEM): the authority's certificate, the server's, and the server's key."""

    authority: Path
    server: Path
    key: Path


def make_certificates(folder: Path, hosts: Sequence[str]) -> Certificates:
    """An authority and a server's certificate for these names and addresses, written into a folder."""
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name, name = _named("safari lab authority"), _named(hosts[0])

    def begin(subject: x509.Name, public: ec.EllipticCurvePublicKey, ca: bool) -> x509.CertificateBuilder:
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + _DAYS * day)
            .add_extension(identifier, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    authority = begin(ca_name, ca_key.public_key(), True).add_extension(usage, critical=True)
    server = begin(name, key.public_key(), False).add_extension(
        x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
    )
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    folder.mkdir(parents=True, exist_ok=True)
    pem = serialization.Encoding.PEM
    signed = authority.sign(ca_key, hashes.SHA256()).public_bytes(pem)
    # The chain, so that a client can find the authority by its fingerprint.
    chain = server.sign(ca_key, hashes.SHA256()).public_bytes(pem) + signed
    private = key.private_bytes(
        pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    for path, data, mode in (
        (files.key, private, 0o600),
        (files.server, chain, 0o644),
        (files.authority, signed, 0o644),
    ):
        _put(path, data, mode)
    return files


def _put(path: Path, data: bytes, mode: int) -> None:
    """Write a file completely or not at all, replacing what has the name: a link there is not followed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def fingerprint(certificate: bytes) -> str:
    """The SHA-256 of a certificate (PEM), in hexadecimal."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise SafariError(f"the certificate cannot be read: {error}") from error
    return hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()


def fetch_authority(host: str, port: int, wanted: str) -> bytes:
    """The authority's certificate (PEM) that a server shows, when its fingerprint is the one wanted.

    The connection is not trusted before: a man in the middle can present any certificate, but none with this
    fingerprint.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _SECONDS) as plain:
            plain.settimeout(_SECONDS)
            with context.wrap_socket(plain, server_hostname=host) as channel:
                chain = _chain(channel)
    except OSError as error:
        raise SafariError(f"no certificate can be had from {host}:{port}: {error}") from error
    wanted = wanted.replace(":", "").lower()
    for certificate in chain:
        pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
        if fingerprint(pem) == wanted:
            return pem
    found = ", ".join(hashlib.sha256(c).hexdigest()[:16] + "…" for c in chain) or "none"
    raise SafariError(
        f"fingerprint must be of a certificate that {host}:{port} shows, got {wanted[:16]}…; it shows {found}"
    )


def _chain(channel: ssl.SSLSocket) -> list[bytes]:
    # Public from Python 3.13 on, and there under this name before.
    inner = channel if hasattr(channel, "get_unverified_chain") else channel._sslobj  # type: ignore[attr-defined]
    found = inner.get_unverified_chain() or []
    return [c if isinstance(c, bytes) else _der(c) for c in found]


def _der(certificate: object) -> bytes:
    found = certificate.public_bytes(ssl._ssl.ENCODING_DER)  # type: ignore[attr-defined]
    return bytes(found)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
