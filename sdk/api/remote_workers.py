"""Where an engine waits for its ranks on other machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

#: A shorter token could be guessed from a handshake that somebody has recorded.
MIN_TOKEN = 16


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class RemoteWorkers:
    """Where an ``LLM`` with ``tensor_parallel_size`` N waits for its other N - 1 ranks.

    The calling process is rank 0. The others are started on their hosts with ``embedlm worker`` or
    :func:`sdk.run_worker`, before or after, and connect through TLS 1.3. Both sides prove that they
    know the token (``docs/security.md``).

    :param listen: ``"host:port"``: the address of this machine at which rank 0 listens while it
        waits. Only that address is bound; ``"127.0.0.1:29500"`` is not reachable from outside.
    :param token: the shared secret, at least 16 characters that nobody can guess, such as the
        output of ``openssl rand -hex 32``. Pass it or ``token_file``.
    :param token_file: a file that contains the token; blanks and newlines around it do not count.
    :param timeout: seconds to wait for all workers.
    :param tensor_address: another address of this machine, to which the workers connect for tensors
        (a faster network); by default that of ``listen``.

    :raises sdk.RequestError: a value is not valid.
    """

    listen: str
    token: str | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    timeout: float = 300.0
    tensor_address: str | None = None

    def __post_init__(self) -> None:
        _ = self.address
        timeout: object = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise RequestError(
                f"remote_workers: timeout: expected seconds, found {safe_repr(timeout)}"
            )
        if self.tensor_address is not None:
            parse_address(f"{self.tensor_address}:1", "remote_workers: tensor_address")
        read_token(self.token, self.token_file)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RemoteWorkers:
        """From a JSON object. :raises RequestError: a name is not known, or a value not valid."""
        names = {one.name for one in fields(cls)}
        for name in values:
            if name not in names:
                raise RequestError(
                    f"remote_workers: expected {', '.join(sorted(names))}, found {safe_repr(name)}"
                )
        if "listen" not in values:
            raise RequestError("remote_workers: listen is missing")
        return cls(**values)

    @property
    def address(self) -> Address:
        """``listen`` as host and port."""
        return parse_address(self.listen, "remote_workers: listen")

    def secret(self) -> bytes:
        """The token. :raises RequestError: its file cannot be read any more."""
        return read_token(self.token, self.token_file)


def parse_address(text: object, name: str) -> Address:
    """``"host:port"`` or ``"[::1]:port"``. :raises RequestError: it is none."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise RequestError(
            f"{name}: expected host:port, such as 10.0.0.1:29500, found {safe_repr(text)}"
        )
    return Address(host, int(port))


def read_token(token: object, file: str | os.PathLike[str] | None) -> bytes:
    """The token as bytes. :raises RequestError: there is none, or it is too short."""
    if (token is None) == (file is None):
        raise RequestError("token: expected a token or a token_file, and not both")
    if file is not None:
        from sdk.api.input_files import read_text

        token = read_text("token_file", file, "a file with a token").strip()
    if not isinstance(token, str) or len(token) < MIN_TOKEN:
        raise RequestError(
            f"token: expected at least {MIN_TOKEN} characters that nobody can guess; "
            "`openssl rand -hex 32` makes some"
        )
    return token.encode("utf-8", "surrogatepass")
