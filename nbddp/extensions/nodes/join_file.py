"""The join file: the listener's address, and the secret that both sides must prove.

Only this file must be copied to another machine. With it, a process can run code in the notebook's
ranks, so only its owner may read it. Its content is never put into an argument, an environment
variable or a log.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from nbddp.errors import RequestError, as_request_error

SECRET_BYTES = 32
FOLDER = ".nbddp/join"  # in the home folder, which the machines of a cluster often share


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFile:
    """The address of a listener and the secret for it.

    Attributes:
        address: the notebook's address, as seen from the node; ``127.0.0.1`` through a tunnel.
        port: the port of the listener.
        run: the name of the join file.
        secret: 32 random bytes.

    >>> join = JoinFile.new("10.0.0.5", 29400)
    >>> JoinFile.from_token(join.token()) == join
    True
    """

    address: str
    port: int
    run: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, address: str, port: int) -> JoinFile:
        """Return a join file with a new secret."""
        return cls(
            address=address,
            port=port,
            run=secrets.token_hex(4),
            secret=secrets.token_bytes(SECRET_BYTES),
        )

    def token(self) -> str:
        """Return the content as one line, to type or paste at a prompt."""
        facts = [self.address, self.port, self.run, base64.b64encode(self.secret).decode()]
        return base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()

    @classmethod
    def from_token(cls, token: str) -> JoinFile:
        """Parse such a line.

        Raises:
            RequestError: the line is not valid.
        """
        try:
            address, port, run, secret = json.loads(base64.urlsafe_b64decode(token.strip()))
            key = base64.b64decode(secret)
            if len(key) != SECRET_BYTES:
                raise ValueError
            return cls(address=str(address), port=int(port), run=str(run), secret=key)
        except (ValueError, TypeError):
            raise RequestError("this is not what `%ddp nodes` wrote into its join file") from None

    @property
    def path(self) -> Path:
        """The default path of the file."""
        return Path.home() / FOLDER / self.run

    def save(self, folder: Path | None = None) -> Path:
        """Write a file that only its owner can read. Return its path.

        Raises:
            RequestError: the file cannot be written.
        """
        path = self.path if folder is None else folder / self.run
        way_out = "; set HOME to a folder that you can write to, for example `%env HOME=/tmp/me`"
        with as_request_error(f"cannot write the join file {path}", way_out):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(opened, "w") as file:
                file.write(self.token() + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> JoinFile:
        """Read a join file.

        Raises:
            RequestError: there is no such file, others can read it, or its content is not valid.
        """
        with as_request_error(f"no join file at {path}"), path.open() as file:
            facts = os.fstat(file.fileno())
            token = file.read()
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RequestError(f"others can read {path}: `chmod 600 {path}` first")
        return cls.from_token(token)
