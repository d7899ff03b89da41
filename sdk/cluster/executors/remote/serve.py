"""A worker on another host: joins an engine, runs its steps, and waits for the next engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from sdk.api.errors import EngineDeadError, RequestError
from sdk.api.remote_workers import Address
from sdk.cluster.executors.remote.engine_codec import PROTOCOL, engine_codec
from sdk.cluster.executors.remote.link import Link, LinkLost
from sdk.cluster.executors.remote.ranks import accept_peers
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.cluster.executors.remote.world import facts_of, host_name
from sdk.cluster.wire.codec import Codec
from sdk.cluster.wire.listener import HANDSHAKE_S, Listener
from sdk.cluster.wire.stream import Stream
from sdk.cluster.wire.tls import HandshakeError, SharedToken
from sdk.engine.executor import RankCall
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.kernels.errors import CollectiveError
from sdk.models.parallel import Mesh

logger = logging.getLogger("sdk")

_RETRY_S = 1.0
_TICK_S = 0.5
_SEND_S = 30.0
#: How long to wait for rank 0 in an exchange: the link notices when it is lost.
_PATIENCE_S = 24 * 3600.0


class WorkerOptions(NamedTuple):
    """What a worker serves, and where its engines are."""

    model: str
    address: Address
    token: bytes
    num_threads: int
    rank: int | None = None
    #: Seconds to wait for an engine.
    timeout: float | None = None


class WorkerParts(NamedTuple):
    """What a worker is made of; tests have other ones."""

    codec: Codec
    build: Callable[[Any, Mesh], Any]
    #: The config for this host, from that of rank 0.
    localize: Callable[[Any, WorkerOptions], Any]


class _Refused(EngineDeadError):
    """Rank 0 does not want this worker; another try would not help."""


def engine_parts() -> WorkerParts:
    """Of a worker for real engines."""
    from sdk.engine.rank.runner import ModelRunner

    return WorkerParts(engine_codec(), ModelRunner, localized)


def localized(config: Any, options: WorkerOptions) -> RunnerConfig:
    """Rank 0's config with the files, folders and threads of this host."""
    from sdk.engine.pages.disk_space import disk_folder

    if not isinstance(config, RunnerConfig):
        raise EngineDeadError(f"rank 0 sent a {type(config).__name__} instead of a config")
    return replace(
        config,
        model=options.model,
        num_threads=options.num_threads,
        swap_path=None,
        disk_folder=disk_folder(None) if config.disk_bytes else "",
    )


def serve_engines(
    options: WorkerOptions,
    *,
    once: bool,
    parts: WorkerParts | None = None,
    on_event: Callable[[str], object] | None = None,
) -> None:
    """See :func:`sdk.run_worker`."""
    say = on_event or logger.info
    if parts is None:
        options = options._replace(model=_path_of(options.model))
        parts = engine_parts()
    token = SharedToken(options.token, PROTOCOL)
    while True:
        say(f"waiting for an engine at {options.address}")
        with _joined(options, token, parts.codec) as link:
            try:
                _serve(link, options, token, parts, say)
                say("the engine was closed")
            except _Refused:
                raise
            except Exception as error:
                why = _why_lost(link, parts.codec, error)
                if once:
                    raise EngineDeadError(why) from error
                (on_event or logger.warning)(why)
        if once:
            return


def _path_of(model: str) -> str:
    """The model's files on this host, checked."""
    from sdk.loaders.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    try:
        return str(checkpoint.path)
    finally:
        checkpoint.close()


class _Join(Link):
    """The link to rank 0. When it is lost, so is the group."""

    def __init__(self, stream: Stream, address: Address) -> None:
        self.group: TcpGroup | None = None
        self.own_host = str(stream.socket.getsockname()[0])
        super().__init__(stream, str(address), self.give_up)

    def give_up(self) -> None:
        if self.group is not None:
            self.group.give_up()


@contextlib.contextmanager
def _joined(options: WorkerOptions, token: SharedToken, codec: Codec) -> Iterator[_Join]:
    """A link to the next engine; closed afterwards."""
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    while True:
        try:
            stream = token.connect(options.address, HANDSHAKE_S)
            break
        except HandshakeError as error:
            if error.is_token:
                raise RequestError(f"{options.address}: {error}") from error
            raise EngineDeadError(f"{options.address}: {error}") from error
        except (OSError, EOFError) as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise EngineDeadError(
                    f"no engine at {options.address} within {options.timeout:g} s: {error}"
                ) from error
        time.sleep(_RETRY_S)
    with contextlib.suppress(OSError):  # if rank 0 has gone, the link says so
        hello = codec.encode(("control", host_name(), options.rank))
        stream.send_frame(hello, limit_s=HANDSHAKE_S)
    link = _Join(stream, options.address)
    try:
        yield link
    finally:
        link.close()


class _Place(NamedTuple):
    """A worker's rank, and what it needs to connect to the others."""

    rank: int
    size: int
    #: Of the engine: connections for tensors name it.
    session: bytes
    limit_s: float


def _serve(
    link: _Join,
    options: WorkerOptions,
    token: SharedToken,
    parts: WorkerParts,
    say: Callable[[str], object],
) -> None:
    """Join the engine and run its steps until it is closed."""
    talk = _Talk(link, parts.codec)
    match talk.next():
        case ("start", int() as rank, int() as size, bytes() as session, float() as limit_s, sent):
            place = _Place(rank, size, session, limit_s)
        case None:
            return
        case message:
            raise EngineDeadError(f"rank 0: expected a start, found {message!r:.100}")
    config = parts.localize(sent, options)
    found = _connections(link, token, options, parts.codec, place, config)
    link.group = group = TcpGroup(rank, found, _PATIENCE_S)
    try:
        talk.check()  # a link that was lost before did not give up the group
        say(f"rank {rank} of {size}")
        runner = parts.build(config, Mesh(rank, size, group))
        try:
            talk.say("ready")
            _run_steps(talk, runner)
        finally:
            runner.close()
    finally:
        group.close()


def _run_steps(talk: _Talk, runner: Any) -> None:
    while (message := talk.next()) is not None:
        if isinstance(message, RankCall):
            talk.say("done", message.function(runner, *message.args))
        else:
            result = runner.launch(message).result()
            # only stages are timed
            talk.say("done", dict(result.unwritten), dict(result.unencoded), 0.0)


class _Talk:
    """Messages with rank 0."""

    def __init__(self, link: Link, codec: Codec) -> None:
        self._link, self._codec = link, codec

    def next(self) -> Any:
        """Rank 0's next message, however long that takes."""
        while (data := self._link.receive(_TICK_S)) is None:
            pass
        message = self._codec.decode(data)
        if isinstance(message, tuple) and message[:1] == ("refused",):
            raise _Refused(f"{self._link.peer} refuses this worker: {message[1]}")
        return message

    def say(self, *message: object) -> None:
        self._link.send(self._codec.encode(message), _SEND_S)

    def check(self) -> None:
        """:raises LinkLost: rank 0 is lost."""
        if self._link.lost is not None:
            raise LinkLost(self._link.lost)


def _connections(
    link: _Join,
    token: SharedToken,
    options: WorkerOptions,
    codec: Codec,
    place: _Place,
    config: Any,
) -> dict[int, Stream]:
    """Compare the hosts, then connect to all lower ranks and wait for the higher ones."""
    talk = _Talk(link, codec)
    found: dict[int, Stream] = {}
    with contextlib.ExitStack() as undo:
        listener = None
        if 0 < place.rank < place.size - 1:  # at the address that reaches rank 0
            listener = Listener(Address(link.own_host, 0), token, codec.decode)
            undo.callback(listener.close)
        own = None if listener is None else tuple(listener.address)
        talk.say("joining", facts_of(getattr(config, "model", "")), own)
        match talk.next():
            case ("connect", list() as addresses) if len(addresses) == place.size:
                pass
            case message:
                raise EngineDeadError(f"rank 0: expected addresses, found {message!r:.100}")
        addresses[0] = addresses[0] or options.address
        try:
            deadline = time.monotonic() + place.limit_s
            hello = codec.encode(("tensors", place.session, place.rank))
            for other in range(place.rank):
                address = Address(*addresses[other])
                while other not in found:
                    talk.check()
                    stream = _to_lower_rank(other, address, token, hello, deadline)
                    if stream is not None:
                        found[other] = stream
            if listener is not None:
                others = set(range(place.rank + 1, place.size))
                accept_peers(listener, found, others, place.session, place.limit_s, talk.check)
        except BaseException:
            for stream in found.values():
                stream.close()
            raise
    return found


def _to_lower_rank(
    rank: int, where: Address, token: SharedToken, hello: bytes, deadline: float
) -> Stream | None:
    """A connection to a rank that listens; None after a failure that another try may mend, such as
    strangers at all places of its listener.

    :raises EngineDeadError: it is another program, or ``deadline`` has passed.
    """
    try:
        stream = token.connect(where, HANDSHAKE_S)
        stream.send_frame(hello, limit_s=HANDSHAKE_S)
        return stream
    except (OSError, EOFError) as error:
        if isinstance(error, HandshakeError) or time.monotonic() + _RETRY_S >= deadline:
            raise EngineDeadError(f"rank {rank} at {where}: {error}") from error
    time.sleep(_RETRY_S)
    return None


def _why_lost(link: _Join, codec: Codec, error: Exception) -> str:
    """Why a worker's engine ended; tells rank 0 if it is not gone itself."""
    if isinstance(error, CollectiveError):
        link.wait_closed(_TICK_S)  # perhaps rank 0 is lost, and the exchange noticed it first
    if link.lost is not None:
        return f"the engine at {link.peer} was lost: {link.lost}"
    # the type tells a cause from its effects
    failure = ("failed", f"{type(error).__name__}: {error}", type(error).__name__)
    with contextlib.suppress(OSError):
        link.send(codec.encode(failure), _SEND_S)
    return f"this rank failed: {type(error).__name__}: {error}"
