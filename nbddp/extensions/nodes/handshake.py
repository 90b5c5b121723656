"""Accept connections at the notebook's address, and admit those that prove the secret.

Anyone who reaches the port can try, so an attempt must be cheap: the number of pending connections
is limited, per address and in total. Further connections are closed at once.

Both sides prove over TLS that they have the join file's secret. From the secret, each side derives
the same two Ed25519 keys, one for the listener and one for the nodes, and their certificates (HKDF,
RFC 5869; Ed25519 signatures are deterministic, RFC 8032). Each side accepts only the other
certificate. TLS 1.3 uses a fresh key for each connection: recorded traffic cannot be decrypted if
the secret leaks later, and cannot be replayed.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING

from nbddp.errors import RequestError
from nbddp.extensions.nodes.node_connection import (
    BUFFER,
    FRAME_ERRORS,
    Frame,
    FrameConnection,
    accept_all,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 20.0  # seconds for TLS and the first frame
MAX_PENDING_PER_ADDRESS = 64  # pending connections of one address
MAX_PENDING = 512  # pending connections of all addresses
BACKLOG = 512


class Handshake:
    """Listens on one address, in an event loop.

    Args:
        context: the TLS context, with certificates for both sides.
        admit: gets a connection and its first frame; raises WireError to refuse it.
    """

    def __init__(
        self, context: ssl.SSLContext, admit: Callable[[FrameConnection, Frame], None]
    ) -> None:
        self._context = context
        self._admit = admit
        self._pending: dict[asyncio.Task[None], str] = {}  # the address of each connection
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.refused = 0  # number of connections that were not admitted

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Start to listen. Return the address and the port.

        Raises:
            RequestError: the address does not belong to this machine, or the port is in use.
        """
        loop = asyncio.get_running_loop()
        try:
            [(family, *_, address), *_] = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            self._listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            where = f"{host}:{port}" if port else host
            raise RequestError(f"cannot listen on {where}: {error.strerror or error}") from error
        self._accepting = loop.create_task(accept_all(self._listener, self._start))
        name = self._listener.getsockname()
        return str(name[0]), int(name[1])

    def _start(self, sock: socket.socket, address: str) -> None:
        waiting = list(self._pending.values())
        if len(waiting) >= MAX_PENDING or waiting.count(address) >= MAX_PENDING_PER_ADDRESS:
            self.refused += 1
            sock.close()
        else:
            task = asyncio.get_running_loop().create_task(self._handshake(sock))
            self._pending[task] = address
            task.add_done_callback(self._pending.pop)

    async def _handshake(self, sock: socket.socket) -> None:
        try:
            connection, frame = await asyncio.wait_for(
                self._read_first_frame(sock), HANDSHAKE_TIMEOUT
            )
        except (TimeoutError, *FRAME_ERRORS) as error:
            logger.debug("not admitted: %s", error)
            clear_frames(error.__traceback__)  # else a cycle keeps 256 KB of asyncio's buffers
            self.refused += 1
            return
        try:
            self._admit(connection, frame)
        except FRAME_ERRORS as error:
            logger.debug("not admitted: %s", error)
            connection.close()
            self.refused += 1

    async def _read_first_frame(self, sock: socket.socket) -> tuple[FrameConnection, Frame]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(BUFFER)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        connection = FrameConnection(reader, writer)
        try:
            return connection, await connection.read()
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        """Stop listening, and close all pending connections."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        for task in self._pending:
            task.cancel()


_LISTENER, _NODE = "nbddp listener", "nbddp node"
_VALID_FROM = datetime.datetime(2000, 1, 1)
_VALID_UNTIL = datetime.datetime(2100, 1, 1)
MISSING_CRYPTOGRAPHY = "nodes need the package cryptography: `pip install 'nbddp[nodes]'`"


def listener_context(secret: bytes) -> ssl.SSLContext:
    """Return the TLS context of the listener."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, secret, name=_LISTENER, peer=_NODE)
    context.num_tickets = 0  # no session resumption: each connection needs the full proof
    return context


def node_context(secret: bytes) -> ssl.SSLContext:
    """Return the TLS context of a node."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, secret, name=_NODE, peer=_LISTENER)


def _context(protocol: int, secret: bytes, *, name: str, peer: str) -> ssl.SSLContext:
    try:
        key, key_of_peer = _key_and_certificate(secret, name), _key_and_certificate(secret, peer)
    except ImportError:
        raise RequestError(MISSING_CRYPTOGRAPHY) from None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key identifies the peer, not the host name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key_of_peer[1].decode())
    with tempfile.TemporaryDirectory() as folder:  # mode 0700; ssl loads keys from files only
        path = Path(folder) / "own.pem"
        path.touch(0o600)
        path.write_bytes(b"".join(key))
        context.load_cert_chain(path)
    return context


def _key_and_certificate(secret: bytes, name: str) -> tuple[bytes, bytes]:
    """Return the key of this name and its certificate, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    key = _derive_key(secret, name)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, builder.sign(key, None).public_bytes(pem)


def _derive_key(secret: bytes, name: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derive = HKDF(algorithm=SHA256(), length=32, salt=None, info=name.encode())
    return Ed25519PrivateKey.from_private_bytes(derive.derive(secret))
