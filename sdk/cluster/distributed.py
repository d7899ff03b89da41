"""Programs on several machines: workers, and programs that a launcher starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.api.remote_workers import RemoteWorkers, parse_address, read_token
from sdk.kernels.packages import check_installed
from sdk.kernels.system import SYSTEM
from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.llm import LLM


def run_worker(
    model: str | os.PathLike[str],
    *,
    connect: str,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    num_threads: int | None = None,
    rank: int | None = None,
    once: bool = False,
    timeout: float | None = None,
    on_event: Callable[[str], object] | None = None,
) -> None:
    """Serve one rank of engines whose rank 0 listens at another host; one engine after the other.

    Blocks until interrupted. While no engine waits at the address, it tries again every second.
    When the engine is closed or lost, the model is freed, and the worker waits for the next engine.

    :param model: the same model as that of the ``LLM``: a path on this host, or a name on the hub.
    :param connect: ``"host:port"``: the ``listen`` of :class:`RemoteWorkers`.
    :param token: the same token; or ``token_file``, a file that contains it.
    :param num_threads: threads of the CPU kernels; by default the CPUs of this process.
    :param rank: which rank to be; by default rank 0 decides.
    :param once: return when the first engine is closed, and raise an error if it is lost.
    :param timeout: seconds to wait for an engine; by default there is no limit.
    :param on_event: called with a line of text when something happens; by default that is logged.

    :raises sdk.RequestError: an option is not valid, or the other side has another token.
    :raises sdk.EngineDeadError: rank 0 refuses this worker (its message says why), no engine came
        within ``timeout``, or (``once``) the engine was lost.
    """
    check_installed("torch", "run_worker needs")
    from sdk.cluster.executors.remote.serve import WorkerOptions, serve_engines

    if num_threads is not None and not (isinstance(num_threads, int) and num_threads > 0):
        raise RequestError(f"num_threads: expected a number, found {safe_repr(num_threads)}")
    if rank is not None and not (isinstance(rank, int) and rank > 0):
        raise RequestError(f"rank: expected 1 or more, found {safe_repr(rank)}")
    if timeout is not None and not timeout > 0:
        raise RequestError(f"timeout: expected seconds, found {safe_repr(timeout)}")
    options = WorkerOptions(
        model=os.fspath(model),
        address=parse_address(connect, "connect"),
        token=read_token(token, token_file),
        num_threads=num_threads or SYSTEM.num_cpus(),
        rank=rank,
        timeout=timeout,
    )
    serve_engines(options, once=once, on_event=on_event)


def launched_llm(
    model: str | os.PathLike[str],
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    port: int | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> LLM | None:
    """For one program that a launcher such as ``torchrun`` starts on all hosts.

    Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` from the environment. Rank 0
    gets an ``LLM`` with all ranks. The others serve it and return None when it is closed::

        llm = launched_llm("model.gguf", token_file="token")
        if llm is not None:
            with llm:
                ...

    :param port: where rank 0 listens at ``MASTER_ADDR``; by default ``MASTER_PORT`` + 1, because
        ``torchrun`` uses that port itself.
    :param timeout: seconds that the ranks wait for each other.
    :param options: of the ``LLM``. ``num_threads`` counts for every rank.

    :raises sdk.RequestError: a variable is missing, or no number.
    """
    from sdk.llm import LLM

    rank, size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    host = os.environ.get("MASTER_ADDR", "")
    if not host:
        raise RequestError("launched_llm: MASTER_ADDR is not set; start this with torchrun")
    address = f"{_bracketed(host)}:{port or _variable('MASTER_PORT', 1) + 1}"
    if size == 1:
        return LLM(model, **options)
    if rank:
        run_worker(
            model,
            connect=address,
            token=token,
            token_file=token_file,
            num_threads=options.get("num_threads"),
            rank=rank,
            once=True,
            timeout=timeout,
        )
        return None
    workers = RemoteWorkers(listen=address, token=token, token_file=token_file, timeout=timeout)
    return LLM(model, tensor_parallel_size=size, remote_workers=workers, **options)


def _variable(name: str, least: int) -> int:
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise RequestError(
            f"launched_llm: {name}: expected a number from {least} on, found {text!r}; start this "
            "with torchrun"
        )
    return int(text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
