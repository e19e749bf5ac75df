"""Invitations: tokens, and the files that they and the keys are kept in."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("cryptography", reason="needs the extra net: pip install 'safari-fl[net]'")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from safari.errors import SafariError
from safari.lab.invitations import JoinError, canonical_key, open_invitations, own_key


def pem(private) -> bytes:
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def modes(folder) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_tokens_differ_by_client_and_server_and_last(tmp_path):
    here, there = (open_invitations(tmp_path / name, 3) for name in ("a", "b"))
    tokens = [invitations.token(client) for invitations in (here, there) for client in range(3)]
    assert len(set(tokens)) == 6
    assert {len(token) for token in tokens} == {32}
    # With more clients later, the first ones keep theirs.
    assert [open_invitations(tmp_path / "a", 5).token(client) for client in range(3)] == tokens[:3]


def test_a_key_is_made_once_and_others_cannot_read_it(tmp_path):
    path = tmp_path / "state" / "node.key"
    public = own_key(path)
    assert own_key(path) == public == canonical_key(public)
    assert modes(path.parent) == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert b"PRIVATE KEY" not in public


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_private_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "node.key"
    own_key(path)
    path.chmod(0o644)
    with pytest.raises(SafariError, match=r"node\.key must have mode 600, because it is a secret, got 644"):
        own_key(path)


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_secrets_where_others_can_read_or_write_are_refused(tmp_path):
    """The secret gives all tokens; anybody who can write to the folder could put their own secret there."""
    open_invitations(tmp_path / "a", 2)
    (tmp_path / "a" / "secret").chmod(0o640)
    with pytest.raises(SafariError, match=r"secret must have mode 600, because it is a secret, got 640"):
        open_invitations(tmp_path / "a", 2)
    (tmp_path / "a" / "secret").chmod(0o600)
    (tmp_path / "a").chmod(0o770)
    with pytest.raises(SafariError, match=r"a must have mode 700, because secrets lie there, got 770"):
        open_invitations(tmp_path / "a", 2)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_secrets_of_another_user_are_refused(tmp_path):
    open_invitations(tmp_path, 2)
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(SafariError, match="must belong to the user who runs this, got user id 12345"):
        open_invitations(tmp_path, 2)


def test_a_damaged_key_of_a_client_is_reported_with_its_file(tmp_path):
    invitations = open_invitations(tmp_path, 2)
    (tmp_path / "client-1.pem").write_bytes(b"")
    with pytest.raises(SafariError, match=r"client-1\.pem must be a client's public key") as found:
        invitations.keys()
    # Not what somebody who joins is told.
    assert not isinstance(found.value, JoinError)


def test_damaged_files_are_reported(tmp_path):
    (tmp_path / "node.key").write_bytes(b"nothing")
    (tmp_path / "node.key").chmod(0o600)
    with pytest.raises(SafariError, match=r"node\.key must be a private key"):
        own_key(tmp_path / "node.key")
    (tmp_path / "secret").write_bytes(b"short")
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(SafariError, match="secret must have 32 bytes, got 5"):
        open_invitations(tmp_path, 2)


def test_the_server_keeps_one_key_a_client(tmp_path):
    invitations = open_invitations(tmp_path / "here", 2)
    first, second = (pem(ec.generate_private_key(ec.SECP384R1())) for _ in range(2))
    invitations.admit(0, invitations.token(0), first)
    invitations.admit(0, invitations.token(0), first)
    with pytest.raises(JoinError, match=r"client 0 has joined with another key; .* remove client-0\.pem"):
        invitations.admit(0, invitations.token(0), second)
    with pytest.raises(JoinError, match="client 0 has this key"):
        invitations.admit(1, invitations.token(1), first)
    invitations.admit(1, invitations.token(1), second)
    assert open_invitations(tmp_path / "here", 2).keys() == {0: first, 1: second}
    assert modes(tmp_path / "here") == {0o600}


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"-----BEGIN PUBLIC KEY-----",
        pem(ed25519.Ed25519PrivateKey.generate()),
        pem(ec.generate_private_key(ec.SECP256K1())),
    ],
)
def test_other_keys_are_refused(tmp_path, key):
    invitations = open_invitations(tmp_path, 1)
    with pytest.raises(JoinError, match="the public key"):
        invitations.admit(0, invitations.token(0), key)
    assert invitations.keys() == {}
