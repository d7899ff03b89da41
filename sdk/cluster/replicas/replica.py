"""One replica: an ``LLM`` in a process of its own, which runs what its connection brings.

The main thread takes messages, runs a step, and sends what the step changed. Calls run in a thread
of their own, and so does making requests with structures to compile or adapters to open: a long one
does not hold up the steps. Another thread tells the other side that the process is alive, also
during a long step.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from operator import methodcaller
from typing import Any

from sdk.api.errors import EngineAsleepError, EngineClosedError, EngineDeadError, RequestError
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.cluster.replicas.calls import ReplicaCalls
from sdk.cluster.replicas.lockstep import Doorbells
from sdk.cluster.replicas.messages import (
    Abort,
    Add,
    Answer,
    Beat,
    Call,
    Lost,
    PlainJob,
    Prefill,
    Prefilled,
    Ready,
    Role,
    Update,
    packed,
    sendable,
)
from sdk.cluster.replicas.report import Reporter
from sdk.cluster.transfer import (
    EnginePages,
    HandOverReceiver,
    HandOverSender,
    SharedMemoryConnector,
    SharedMemoryListener,
)
from sdk.cluster.transfer.shared_memory import MOST_RING
from sdk.cluster.wire.local import Channel, pack
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.kernels.errors import CollectiveError
from sdk.llm import LLM
from sdk.loading.load import Loaded
from sdk.memory.demand import HAND_OVER_READ_BYTES, HAND_OVERS, hand_over_ring
from sdk.requests.driving.driver import Driver
from sdk.requests.served_engine import ServedEngine

#: Seconds between two signs of life.
BEAT_S = 0.5
_JOIN_STEP = methodcaller("join_step")
_ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Replica:
    """Serves one connection until the other side closes it."""

    def __init__(
        self,
        llm: LLM,
        loaded: Loaded,
        driver: Driver,
        role: Role,
        sock: socket.socket,
        number: int,
        bells: Doorbells | None,
    ) -> None:
        self._number = number
        self._bells = bells
        self._executor = loaded.executor
        self._llm = llm
        self._calls = ReplicaCalls(llm)
        self._driver = driver
        self._channel = Channel(sock)
        self._sending = threading.Lock()
        self._outputs: list[Output] = []
        self._failures: list[tuple[str, Exception]] = []
        self._reporter = Reporter(driver.engine.scheduler)
        self._received = 0
        self._calling = ThreadPoolExecutor(1, "sdk-replica-calls")
        self._compiling = ThreadPoolExecutor(1, "sdk-replica-requests")
        self._slow: set[str] = set()  # requests that the second of them has yet to add
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._main = threading.get_ident()
        self._sender: HandOverSender | None = None
        self._receiving: SharedMemoryListener | None = None
        self._receiver: HandOverReceiver | None = None
        if role == "prefill":
            pages = EnginePages.of(llm)
            ring = hand_over_ring(max(pages.group_bytes(pages.page_size), pages.row_bytes))
            connector = SharedMemoryConnector(ring_bytes=min(ring, MOST_RING))
            self._sender = HandOverSender(
                pages, connector, max_active=HAND_OVERS, read_bytes=HAND_OVER_READ_BYTES
            )
        elif role == "decode":
            self._receiving = SharedMemoryListener()
            self._receiver = HandOverReceiver(
                EnginePages.of(llm), self._receiving, max_active=HAND_OVERS
            )

    def run(self) -> None:
        """Serve until the engine is dead. :raises EOFError: the other side has closed."""
        address = None if self._receiving is None else self._receiving.address
        self._send(Ready(self._llm.load_warnings, address))
        threading.Thread(target=self._beat, daemon=True).start()
        poller = select.poll()
        poller.register(self._channel.socket, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        bells, number = self._bells, self._number
        bell = -1 if bells is None else bells.bell(number)
        if bells is not None:
            poller.register(bell, select.POLLIN)
        while True:
            wait = 0 if self._driver.has_work or self._outputs or self._failures else None
            for descriptor, _ in poller.poll(wait):
                if descriptor == self._woken:
                    os.eventfd_read(self._woken)
                elif bells is not None and descriptor == bell:
                    bells.answer(number)
                else:
                    self._take_all()
            try:
                if self._driver.has_work:
                    self._driver.step()
                if bells is not None and bells.is_behind(number):
                    self._take_part()
            except (EngineDeadError, EngineClosedError, CollectiveError) as error:
                self._send(Lost(f"its engine is dead: {error}"))
                return
            self._flush()

    def _take_part(self) -> None:
        try:
            self._driver.between_steps(self._join_step)
        except EngineAsleepError:  # another one runs what is pinned, before it sleeps again too
            self._driver.try_between_steps(self._join_step)

    def _join_step(self) -> None:
        """Take part in a step of other replicas, unless a step of a call has done it."""
        if self._bells is not None and self._bells.is_behind(self._number):
            self._executor.on_ranks(_JOIN_STEP)

    def close(self) -> None:
        """End hand-overs; the engine is closed next."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()

    # ---- messages --------------------------------------------------------------------------------

    def _take_all(self) -> None:
        """Act on the messages that are here: the next step runs all new requests together."""
        for message in self._channel.read():
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case Add():
                self._received += 1
                plain = self._unpacked(message)
                if plain is not None and (plain.job.params.structure or plain.lora):
                    self._slow.add(message.request_id)
                    self._compiling.submit(self._add, plain)
                elif plain is not None:
                    self._add(plain)
            case Prefill():
                self._received += 1
                self._slow.add(message.request_id)
                self._compiling.submit(self._prefill, message)
            case Abort(request_ids):
                slow = [name for name in request_ids if name in self._slow]
                if slow:  # not before they are added
                    self._compiling.submit(self._driver.abort, slow)
                    self._compiling.submit(self._wake)
                self._driver.abort(name for name in request_ids if name not in self._slow)
            case Call(first=True):
                self._call(message)
            case Call():
                self._calling.submit(self._call, message)

    def _unpacked(self, message: Add) -> PlainJob | None:
        """The request; ``None``: it was refused."""
        try:
            plain: PlainJob = pickle.loads(message.job)
        except Exception as error:
            refused = RequestError(
                "with data_parallel_size > 1 requests run in other processes, which cannot import "
                f"a part of the sampling parameters ({type(error).__name__}: {error}); put "
                "functions such as logits_processors into a module that can be imported"
            )
            self.fail(message.request_id, refused)
            return None
        return plain

    def _add(self, plain: PlainJob) -> None:
        try:
            self._driver.submit([self._compiled(plain)], self, run=False)
        except Exception as error:
            self.fail(plain.job.request_id, error)
        self._slow.discard(plain.job.request_id)
        self._wake()

    def _prefill(self, message: Prefill) -> None:
        """Run a prompt and hand it over while it runs. Its only token is not used."""
        number, name = message.number, message.request_id
        try:
            plain: PlainJob = pickle.loads(message.job)
            job = plain.job
            assert self._sender is not None
            adapter = None if plain.lora is None else self._calls.adapter(plain.lora)
            params = _ONE.clone(tenant=job.params.tenant, priority=job.params.priority)
            resolved = self._llm._job_maker.compiled(params)[0]
            only = job.with_spec(params=params, resolved=resolved)
            only = replace(only, adapter=adapter, result_bytes=0)
            self._driver.submit([only], _Nobody(), run=False)
            self._slow.discard(name)
            outcome = self._sender.hand_over(
                f"{name} {number}",
                message.destination,
                job.prompt_token_ids,
                request_id=name,
                cache_salt=job.cache_salt,
                adapter=None if adapter is None else adapter.key,
            )
        except Exception as error:
            self._slow.discard(name)
            self._driver.abort([name])
            self._send(Prefilled(number, name, f"{type(error).__name__}: {error}"))
        else:
            outcome.add_done_callback(
                lambda done: self._send(Prefilled(number, name, done.result().problem))
            )
        self._wake()

    def _compiled(self, plain: PlainJob) -> Job:
        job, maker = plain.job, self._llm._job_maker
        resolved, stops, banned = maker.compiled(job.params)
        resolved = replace(resolved, healing=job.spec.resolved.healing)
        adapter = None if plain.lora is None else self._calls.adapter(plain.lora)
        job = job.with_spec(resolved=resolved)
        return replace(job, stops=stops, banned=banned, adapter=adapter)

    def _call(self, call: Call) -> None:
        part: Any = self._calls if call.part == "calls" else self._llm
        if call.part.startswith("_"):
            part = getattr(part, call.part)
        try:
            value = getattr(part, call.method)(*call.args)
            if call.first:
                return
            data = packed(Answer(call.number, value, None))
        except Exception as error:
            data = packed(Answer(call.number, None, sendable(error)))
        with suppress(OSError), self._sending:  # the main thread finds a closed connection too
            self._channel.send(data)
        self._wake()

    # ---- outputs: the sink of all requests -------------------------------------------------------

    def deliver(self, output: Output) -> bool:
        """See :class:`sdk.requests.driving.job_driver.OutputSink`."""
        self._outputs.append(output)
        self._wake_from_elsewhere()
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        """See :class:`sdk.requests.driving.job_driver.OutputSink`."""
        if isinstance(error, EngineDeadError | EngineClosedError):
            return  # another replica runs it again
        self._failures.append((request_id, sendable(error)))
        self._wake_from_elsewhere()

    def _flush(self) -> None:
        report = self._driver.observe(lambda: self._reporter.look(self._received))
        if report is not None:
            self._reporter.taken(report)
        if self._outputs or self._failures or report is not None:
            outputs, self._outputs = list(map(_without_prompt, self._outputs)), []
            failures, self._failures = self._failures, []
            try:
                self._send(Update(outputs, failures, report))
            except RequestError:  # too large in all: one by one
                for output in outputs:
                    self._send_one(output)
                self._send(Update((), failures, report))

    def _send_one(self, output: Output) -> None:
        try:
            self._send(Update((output,), (), None))
        except RequestError as error:
            self._send(Update((), ((output.request_id, error),), None))
            self._driver.abort([output.request_id])

    # ---- the connection --------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        data = packed(message)
        with self._sending:
            self._channel.send(data)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _wake_from_elsewhere(self) -> None:
        """Another thread has run a step, for a call: the main thread may be waiting."""
        if threading.get_ident() != self._main:
            self._wake()

    def _beat(self) -> None:
        """Tell the other side that this process lives; end the process when it is gone."""
        poller = select.poll()
        poller.register(self._channel.socket, 0)  # wakes only on hang-up
        while not poller.poll(BEAT_S * 1000):
            try:
                self._send(Beat())
            except OSError:
                break
        os._exit(0)


class _Nobody:
    """The sink of prompts that are handed over."""

    def deliver(self, output: Output) -> bool:
        """See :class:`sdk.requests.driving.job_driver.OutputSink`."""
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        """See :class:`sdk.requests.driving.job_driver.OutputSink`.

        The hand-over says how far it came.
        """


def serve(
    make: Callable[[], Loaded],
    role: Role,
    sock: socket.socket,
    number: int,
    bells: Doorbells | None,
) -> int:
    """Run replica ``number`` to its end; the exit code of its process.

    ``bells``: those of the replicas with which it runs in lockstep.
    """
    try:
        loaded = make()
        served = ServedEngine(loaded)
        llm = LLM._on(served)
        replica = Replica(llm, loaded, served.driver, role, sock, number, bells)
    except Exception as error:
        traceback.print_exc()
        reason = f"it failed to start: {type(error).__name__}: {error}"
        Channel(sock).send(pack(Lost(reason, sendable(error))))
        return 1
    try:
        replica.run()
    except (EOFError, OSError):
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        replica.close()
        llm.close()
    return 0


def _without_prompt(output: Output) -> Output:
    """The other side has the prompt: 4,096 tokens take 0.3 ms to pickle and to read."""
    if isinstance(output, RequestOutput):
        return output._replace(prompt=None, prompt_token_ids=[])
    return output
