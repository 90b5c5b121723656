"""TLS between the door and the nodes: both sides prove that they have the join file's secret.

From the secret each side derives the same two Ed25519 keys, the door's and the nodes', with their
certificates (HKDF, RFC 5869; Ed25519 signs the same bytes in the same way, RFC 8032). Each accepts
the other's alone. TLS 1.3 does the rest: a fresh key for every connection, so that what was
recorded cannot be read when the secret is lost later, nor played again.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import RequestError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_DOOR, _NODE = "nbddp door", "nbddp node"
_BEGIN = datetime.datetime(2000, 1, 1)
_END = datetime.datetime(2100, 1, 1)
MISSING = "many machines need the package cryptography: `pip install 'nbddp[nodes]'`"


def at_the_door(secret: bytes) -> ssl.SSLContext:
    """What the notebook's side listens with."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, secret, mine=_DOOR, theirs=_NODE)
    context.num_tickets = 0  # nobody comes in a second time without a proof
    return context


def at_a_node(secret: bytes) -> ssl.SSLContext:
    """What a node dials with."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, secret, mine=_NODE, theirs=_DOOR)


def _context(protocol: int, secret: bytes, *, mine: str, theirs: str) -> ssl.SSLContext:
    try:
        own, other = _pair(secret, mine), _pair(secret, theirs)
    except ImportError:
        raise RequestError(MISSING) from None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who has the key is meant, whatever the machine's name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=other[1].decode())
    with tempfile.TemporaryDirectory() as folder:  # 0700; ssl takes a key from a file alone
        path = Path(folder) / "own.pem"
        path.touch(0o600)
        path.write_bytes(b"".join(own))
        context.load_cert_chain(path)
    return context


def _pair(secret: bytes, name: str) -> tuple[bytes, bytes]:
    """A key and its certificate, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    key = _key(secret, name)
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, builder.sign(key, None).public_bytes(pem)


def _key(secret: bytes, name: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derive = HKDF(algorithm=SHA256(), length=32, salt=None, info=name.encode())
    return Ed25519PrivateKey.from_private_bytes(derive.derive(secret))
