"""The messages between an ``LLM``, the parent of its replicas, and the replicas.

They are pickled and cross unnamed socket pairs, both ends of which are this program
(:mod:`sdk.cluster.wire.local`).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.api.lora import LoRARequest
from sdk.cluster.wire.local import pack
from sdk.cluster.wire.stream import MAX_FRAME
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.sampling.resolved import ResolvedParams

#: A request with what surrounds it fits one message.
_MOST_JOB = MAX_FRAME - 4096
#: What a replica does: everything; only prompts, whose keys and values it hands over; or the rest
#: of prompts that others computed, and all answers.
Role = Literal["both", "prefill", "decode"]

# ---- to the parent -----------------------------------------------------------------------------


class Load(NamedTuple):
    """Read the model; answers: :class:`Progress`, then :class:`ModelRead` or :class:`Failed`."""

    config: EngineConfig
    num_threads: int  # while the weights are packed
    num_replicas: int = 1
    #: Replicas share the experts, of which this many are copies; ``None``: each runs alone.
    lockstep_redundant: int | None = None


class Fork(NamedTuple):
    """Start a replica. Its end of a socket pair comes over the second socket. ``launch``: a number
    of its own for each start. ``number``: of the replica."""

    launch: int
    role: Role
    number: int


class Kill(NamedTuple):
    """Kill a replica, whatever it does."""

    launch: int


# ---- from the parent ---------------------------------------------------------------------------


class Progress(NamedTuple):
    """Bytes of the model's files that were read."""

    done: int
    total: int


class ModelRead(NamedTuple):
    """The model was read: replicas can be started."""


class Failed(NamedTuple):
    """The model could not be read."""

    error: Exception


class Forked(NamedTuple):
    """A replica has a process."""

    launch: int
    pid: int


class Ended(NamedTuple):
    """The process of a replica has ended, or could not be started. ``how``: "was killed"."""

    launch: int
    how: str


# ---- to a replica ------------------------------------------------------------------------------


class Add(NamedTuple):
    """A new request, from :func:`packed_job`."""

    request_id: str
    job: bytes


class Prefill(NamedTuple):
    """Compute a prompt and hand its keys and values over to ``destination``. The answer is
    :class:`Prefilled`. ``number``: of this attempt."""

    number: int
    request_id: str
    job: bytes  # from packed_job
    destination: str


class Abort(NamedTuple):
    """End requests."""

    request_ids: tuple[str, ...]


class Call(NamedTuple):
    """``part.method(*args)``. ``part``: "" for the replica's ``LLM``, the name of one of its
    private parts, or "calls" for its :class:`sdk.cluster.replicas.calls.ReplicaCalls`.

    ``first``: it runs before messages that come later, and only a failure is answered."""

    number: int
    part: str
    method: str
    args: tuple[Any, ...]
    first: bool = False


# ---- from a replica ----------------------------------------------------------------------------


class Ready(NamedTuple):
    """The engine runs. ``address``: where keys and values can be handed over to."""

    warnings: tuple[str, ...]
    address: str | None = None


class Update(NamedTuple):
    """What a step changed."""

    outputs: Sequence[Output]
    failures: Sequence[tuple[str, Exception]]
    report: Any


class Prefilled(NamedTuple):
    """A hand-over has ended. ``problem``: why not all of it came; the rest is computed there."""

    number: int
    request_id: str
    problem: str | None


class Answer(NamedTuple):
    """The result of a :class:`Call`, or the exception that it raised."""

    number: int
    value: Any
    error: Exception | None


class Beat(NamedTuple):
    """The process is alive. A long step does not delay it."""


class Lost(NamedTuple):
    """The engine is dead or did not start, and the process ends."""

    reason: str
    error: Exception | None = None


class PlainJob(NamedTuple):
    """A job without what was compiled for it: each replica compiles structures, stop strings and
    banned strings itself, and opens adapters itself."""

    job: Job
    lora: LoRARequest | None

    @classmethod
    def of(cls, job: Job) -> PlainJob:
        lora = None if job.adapter is None else job.adapter.lora_request
        resolved = ResolvedParams(healing=job.spec.resolved.healing)
        job = job.with_spec(resolved=resolved)
        plain = replace(job, stops=None, banned=None, adapter=None)
        return cls(plain, lora)


def packed_job(job: Job) -> bytes:
    """The pickled :class:`PlainJob`.

    :raises RequestError: a part of it cannot be pickled.
    """
    try:
        data = pickle.dumps(PlainJob.of(job), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RequestError(
            "with data_parallel_size > 1 requests run in other processes, so sampling parameters "
            "must be picklable (functions at the top of a module, no lambdas in "
            f"logits_processors): {type(error).__name__}: {error}"
        ) from error
    if len(data) > _MOST_JOB:
        raise RequestError(
            f"with data_parallel_size > 1 a request has at most {_MOST_JOB} bytes, found "
            f"{len(data)}; use data_parallel_size=1"
        )
    return data


def packed(message: object) -> bytes:
    """:func:`~sdk.cluster.wire.local.pack`. :raises RequestError: it is too large."""
    try:
        return pack(message)
    except ValueError as error:
        raise RequestError(
            f"with data_parallel_size > 1 requests, results and snapshots cross processes, at most "
            f"{MAX_FRAME} bytes at a time; use data_parallel_size=1, or a file for a snapshot "
            f"({error})"
        ) from error


def sendable(error: Exception) -> Exception:
    """The exception, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RequestError(f"{type(error).__name__}: {error}")
    return error
