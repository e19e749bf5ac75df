"""Invitations: a token for each client, good for one public key, and the keys that have joined with theirs.

A client makes its key where it stays. It shows the token, which the operator handed over, together with its public
key, over a TLS connection to the server whose fingerprint it knows. From then on the token is worth nothing with
another key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from safari.errors import SafariError

_SECRET_BYTES = 32
# 128 bits, in hexadecimal.
_TOKEN_LENGTH = 32


class JoinError(SafariError):
    """Somebody asked to join who may not."""


@dataclass(frozen=True)
class Invitations:
    """The server's side: which token belongs to which client, and which key came with it.

    Args:
        folder: Where the public keys of those that have joined are, one file a client.
        clients: How many are invited; they are numbered from 0.
        secret: What the tokens are derived from.
    """

    folder: Path
    clients: int
    secret: bytes

    def token(self, client: int) -> str:
        """Token with which a client proves that it is invited."""
        return hmac.digest(self.secret, f"safari invitation {client}".encode(), "sha256").hex()[
            :_TOKEN_LENGTH
        ]

    def keys(self) -> dict[int, bytes]:
        """The public keys (PEM) of those that have joined, by client."""
        found = {client: self._path(client) for client in range(self.clients)}
        return {client: _kept_key(path) for client, path in found.items() if path.exists()}

    def admit(self, client: int, token: str, key: bytes) -> bytes:
        """Take note of a client's public key (PEM), and return it in the form in which it is compared.

        JoinError: without the client's token, or where it has come with another key before.
        """
        if not 0 <= client < self.clients:
            raise JoinError(f"client must lie between 0 and {self.clients - 1}, got {client}")
        if not hmac.compare_digest(token.encode(errors="replace"), self.token(client).encode()):
            raise JoinError(
                f"the token is not that of client {client}: use the line that the server printed for it"
            )
        key = canonical_key(key)
        for other, known in self.keys().items():
            if (other == client) != (known == key):
                taken = (
                    "client {} has joined with another key" if other == client else "client {} has this key"
                )
                raise JoinError(
                    f"{taken.format(other)}; to invite it anew, remove {self._path(other).name} from the server's "
                    f"folder {self.folder.name!r} and start the server again"
                )
        write_private(self._path(client), key)
        return key

    def _path(self, client: int) -> Path:
        return self.folder / f"client-{client}.pem"


def open_invitations(folder: Path, clients: int) -> Invitations:
    """Open the invitations of a server's folder: its secret is created at the first call, and then stays."""
    path = folder / "secret"
    if not path.exists():
        write_private(path, secrets.token_bytes(_SECRET_BYTES))
    for place in (folder, path):
        _refuse_shared(place)
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise SafariError(
            f"{path} must have {_SECRET_BYTES} bytes, got {len(secret)}: remove it to invite everyone anew"
        )
    return Invitations(folder, clients, secret)


def canonical_key(key: bytes) -> bytes:
    """A public key (PEM) as Flower writes it; JoinError where it is none on the curve P-384."""
    try:
        found = serialization.load_pem_public_key(key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise JoinError(f"the public key cannot be read: {error}") from error
    if not isinstance(found, ec.EllipticCurvePublicKey) or not isinstance(found.curve, ec.SECP384R1):
        raise JoinError("the public key must be one on the curve P-384")
    return _public_bytes(found)


def own_key(path: Path) -> bytes:
    """The client's side: its public key (PEM).

    The private one lies in this file, readable by this user alone, and is made where there is none.
    """
    if not path.exists():
        private = ec.generate_private_key(ec.SECP384R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        write_private(path, private)
    for place in (path.parent, path):
        _refuse_shared(place)
    try:
        found = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SafariError(f"{path} must be a private key: {error}; remove it to make another") from error
    return _public_bytes(found.public_key())


def write_private(path: Path, data: bytes) -> None:
    """Write a file that this user alone can read, whole or not at all; SafariError where that cannot be."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp: mode 600 from the beginning, under a name that nobody can have prepared.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SafariError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_shared(path: Path) -> None:
    """SafariError where others can read a secret's file, write to its folder, or have made either of them."""
    if not hasattr(os, "geteuid"):
        return
    about = path.stat()
    if about.st_uid != os.geteuid():
        raise SafariError(f"{path} must belong to the user who runs this, got user id {about.st_uid}")
    mode, is_folder = about.st_mode & 0o777, path.is_dir()
    if mode & (0o022 if is_folder else 0o077):
        what = "700, because secrets lie there" if is_folder else "600, because it is a secret"
        raise SafariError(f"{path} must have mode {what}, got {mode:o}")


def _kept_key(path: Path) -> bytes:
    try:
        return canonical_key(path.read_bytes())
    except (OSError, JoinError) as error:
        raise SafariError(f"{path} must be a client's public key: {error}") from error


def app_digest(content: bytes) -> str:
    """Identifier of an app (FAB): its SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _public_bytes(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SafariError("the key must be one on the curve P-384")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
