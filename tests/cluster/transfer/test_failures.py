"""Whatever goes wrong in a hand-over, the receiver computes the rest, with the same answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sdk import LLM
from sdk.api.errors import TransferError
from sdk.cluster.transfer import EnginePages, KVConnector, KVListener, TcpConnector
from sdk.cluster.transfer.connector import Offer, Part, Sending
from sdk.testing import tiny_model
from tests.cluster.transfer.pairs import (
    CONNECTORS,
    LIMIT,
    PREFILL,
    PROMPT,
    USABLE,
    Pair,
    answer,
    check,
    facts,
    pair,
    shared_memory,
    tcp,
)

Fault = Callable[[Sending, list[Part]], None]


class FaultySending:
    """Collects all parts and sends them the way ``fault`` does."""

    def __init__(self, sending: Sending, fault: Fault) -> None:
        self._sending, self._fault = sending, fault
        self._parts: list[Part] = []
        self.num_known, self.unit = sending.num_known, sending.unit
        self.most_bytes = 1  # each page is a group

    def send(self, part: Part) -> None:
        self._parts.append(part)

    def keep_alive(self) -> None:
        self._sending.keep_alive()

    def finish(self, num_tokens: int) -> int:
        self._fault(self._sending, self._parts)
        return self._sending.finish(num_tokens)

    def close(self) -> None:
        self._sending.close()


class FaultyConnector:
    """A connector that injects a fault into each hand-over."""

    def __init__(self, connector: KVConnector, fault: Fault) -> None:
        self._connector, self._fault = connector, fault

    def open(self, offer: Offer, destination: str) -> FaultySending:
        return FaultySending(self._connector.open(offer, destination), self._fault)

    def close(self) -> None:
        self._connector.close()


def _send(sending: Sending, parts: list[Part]) -> None:
    for part in parts:
        sending.send(part)


def _repeat(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:3], *parts[2:]])


def _swap_layers(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], parts[3], parts[2], *parts[4:]])


def _swap_pages(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], *parts[4:6], *parts[2:4], *parts[6:]])


def _drop(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:3], *parts[4:]])


def _stop_early(sending: Sending, parts: list[Part]) -> None:
    _send(sending, parts[:3])


def _die(sending: Sending, parts: list[Part]) -> None:
    _send(sending, parts[:3])
    sending.close()


def _other_prompt(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], *(part._replace(digest=bytes(32)) for part in parts[2:])])


def _too_many_tokens(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], parts[2]._replace(rows=parts[2].rows[:15])])


def _unknown_layer(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], parts[2]._replace(layer=2)])


def _narrow_rows(sending: Sending, parts: list[Part]) -> None:
    _send(sending, [*parts[:2], parts[2]._replace(rows=parts[2].rows[:, :, :-1])])


FAULTS: dict[Fault, str] = {
    _repeat: "a part is missing, repeated or out of order",
    _swap_layers: "a part is missing, repeated or out of order",
    _swap_pages: "a part is missing, repeated or out of order",
    _drop: "a part is missing, repeated or out of order",
    _stop_early: "it sent 64 tokens; 16 arrived",
    _die: "connection",
    _other_prompt: "the part from token 16 on belongs to another prompt",
    _too_many_tokens: "expected multiples of 16 up to 64",
    _unknown_layer: "a part of layer 2; expected layers below 2",
    _narrow_rows: "a part of 16 tokens in ",
}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__[1:])
def test_a_prompt_whose_hand_over_goes_wrong_is_computed_by_the_receiver(
    engines: tuple[LLM, LLM], fault: Fault, connector: str
) -> None:
    a, b = engines
    for llm in engines:
        llm.reset_prefix_cache()
    alone = facts(answer(b))
    b.reset_prefix_cache()
    inner, listener = CONNECTORS[connector]()
    two = Pair(a, b, FaultyConnector(inner, fault), listener)
    answer(a, PROMPT, PREFILL)
    result = two.end(two.begin())
    assert result.problem is not None and FAULTS[fault] in result.problem
    assert result.num_tokens == 16  # of the group before the fault
    assert two.last.result(LIMIT).problem is not None
    output = answer(b)
    assert output.num_cached_tokens == 16 and facts(output) == alone
    two.close()


@contextmanager
def _proxy(address: str, change: Callable[[int, bytes], bytes | None]) -> Iterator[str]:
    """Passes on what comes, after ``change(position, bytes)`` of what goes to ``address``.
    ``None`` ends the connection.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    host, _, port = address.rpartition(":")

    def pump(source: socket.socket, target: socket.socket, changed: bool) -> None:
        at = 0
        while data := source.recv(1 << 16):
            passed = change(at, data) if changed else data
            if passed is None:
                break
            target.sendall(passed)
            at += len(data)

    def run(source: socket.socket, target: socket.socket, changed: bool) -> None:
        with suppress(OSError):
            pump(source, target, changed)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with (
            listening,
            listening.accept()[0] as client,
            socket.create_connection((host, int(port))) as server,
        ):
            back = threading.Thread(target=run, args=(server, client, False))
            back.start()
            run(client, server, True)
            back.join()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    thread.join(LIMIT)
    assert not thread.is_alive()


def _flip(where: int) -> Callable[[int, bytes], bytes | None]:
    def change(at: int, data: bytes) -> bytes:
        if at <= where < at + len(data):
            changed = bytearray(data)
            changed[where - at] ^= 0x10
            return bytes(changed)
        return data

    return change


def _cut(where: int) -> Callable[[int, bytes], bytes | None]:
    return lambda at, data: None if at + len(data) > where else data


#: Into the proof, a header, a head, the offer's tokens, and rows of a later part.
PLACES = (40, 64 + 5, 64 + 50, 1000, 30_000)


@pytest.mark.parametrize("change", [_flip, _cut])
@pytest.mark.parametrize("place", PLACES)
def test_a_network_that_damages_or_ends_a_connection_changes_no_answer(
    engines: tuple[LLM, LLM], change: Callable[[int], Callable[..., bytes]], place: int
) -> None:
    a, b = engines
    b.reset_prefix_cache()
    alone = facts(answer(b))
    b.reset_prefix_cache()
    answer(a, PROMPT, PREFILL)
    two = Pair(a, b, *tcp(timeout=5))
    with _proxy(two.listener.address, change(place)) as address:
        outcome = two.sender.hand_over("damaged", address, PROMPT)
        assert outcome.result(LIMIT).problem is not None
    output = answer(b)
    assert output.num_cached_tokens < USABLE and facts(output) == alone
    two.close()


def test_a_sender_that_says_nothing_is_left_alone(engines: tuple[LLM, LLM]) -> None:
    a, b = engines
    b.reset_prefix_cache()
    answer(a, PROMPT, PREFILL)
    connector, listener = tcp(timeout=1)
    left = threading.Event()
    two = Pair(a, b, FaultyConnector(connector, lambda sending, parts: left.wait(LIMIT)), listener)
    result = two.end(two.begin())
    left.set()
    assert result.problem == "the other side made no progress within 1 s"
    assert answer(b).num_cached_tokens == 0
    two.close()


@pytest.mark.parametrize("connect", CONNECTORS.values(), ids=CONNECTORS)
def test_a_receiver_that_is_not_there(
    engines: tuple[LLM, LLM], connect: Callable[[], tuple[KVConnector, KVListener]]
) -> None:
    a, b = engines
    answer(a, PROMPT, PREFILL)
    two = Pair(a, b, *connect())
    two.receiver.close()
    two.begin()
    problem = two.last.result(LIMIT).problem
    assert problem is not None and f"{two.listener.address}: no connection" in problem
    two.close()


def test_another_token_is_refused(engines: tuple[LLM, LLM]) -> None:
    a, b = engines
    b.reset_prefix_cache()
    answer(a, PROMPT, PREFILL)
    two = Pair(a, b, TcpConnector("another token of the tests"), tcp()[1])
    two.begin()
    assert "it has another token" in (two.last.result(LIMIT).problem or "")
    assert answer(b).num_cached_tokens == 0
    two.close()


def test_both_sides_are_closed_while_a_prompt_is_handed_over(tiny_path: Path) -> None:
    """The request goes on; whoever waits for the hand-over is told."""
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    for side in ("sender", "receiver"):
        with pair(tiny_path, first=options) as two:
            [request_id] = two.a.enqueue([PROMPT], PREFILL)
            transfer_id = two.begin(request_id=request_id)
            two.a.step()
            getattr(two, side).close()
            two.a.wait_for_completion()
            assert two.last.result(LIMIT).problem is not None
            two.receiver.close()
            assert two.end(transfer_id).problem is not None


def test_a_request_that_is_aborted_ends_its_hand_over(tiny_path: Path) -> None:
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with pair(tiny_path, first=options) as two:
        [request_id] = two.a.enqueue([PROMPT], PREFILL)
        transfer_id = two.begin(request_id=request_id)
        two.a.step()
        two.a.step()
        two.a.abort(request_id)
        two.a.step()
        result = two.end(transfer_id)
        assert result.num_tokens < USABLE
        assert result.problem == f"the sender had only {result.num_tokens} of 64 tokens"
        assert answer(two.b).num_cached_tokens == result.num_tokens


def test_a_receiver_without_unused_pages_takes_what_fits(tiny_path: Path) -> None:
    options = {"max_model_len": 128, "max_num_seqs": 4}
    size = LLM.plan(tiny_path, **options).page_bytes
    with pair(tiny_path, second={**options, "kv_cache_memory_bytes": 9 * size}) as two:
        alone = facts(answer(two.b))
        two.b.reset_prefix_cache()
        [_] = two.b.enqueue([[9] * 90], PREFILL.clone(max_tokens=4, ignore_eos=True))
        two.b.step()  # it has 6 of 9 pages
        answer(two.a, PROMPT, PREFILL)
        result = two.end(two.begin())
        assert result.num_tokens == 48
        assert result.problem is not None and "no room for more than 48 tokens" in result.problem
        two.b.wait_for_completion()
        output = answer(two.b)
        assert output.num_cached_tokens == 48 and facts(output) == alone


def test_pages_that_are_evicted_before_they_are_used_are_computed(tiny_path: Path) -> None:
    options = {"max_model_len": 128, "max_num_seqs": 4}
    size = LLM.plan(tiny_path, **options).page_bytes
    with pair(tiny_path, second={**options, "kv_cache_memory_bytes": 9 * size}) as two:
        alone = facts(answer(two.b))
        two.b.reset_prefix_cache()
        assert two.hand_over().num_tokens == USABLE
        answer(two.b, [9] * 90, PREFILL)  # six of nine pages
        output = answer(two.b)
        assert 0 < output.num_cached_tokens < USABLE  # the first ones are evicted last
        assert facts(output) == alone


def test_pages_that_are_evicted_while_others_arrive_are_computed(
    engines: tuple[LLM, LLM],
) -> None:
    a, b = engines
    b.reset_prefix_cache()
    alone = facts(answer(b))
    b.reset_prefix_cache()
    pages = EnginePages.of(b)
    keys = pages.kept.keys(PROMPT[:USABLE], None)

    def evict(sending: Sending, parts: list[Part]) -> None:
        _send(sending, parts)
        while pages.kept.num_cached(keys) < len(keys):
            time.sleep(0.001)  # the timeout of the test ends this
        b.reset_prefix_cache()

    connector, listener = shared_memory()
    answer(a, PROMPT, PREFILL)
    two = Pair(a, b, FaultyConnector(connector, evict), listener)
    result = two.end(two.begin())
    assert result.problem == "all tokens but the first 0 have been evicted again"
    sent = two.last.result(LIMIT)
    assert sent.num_tokens == 0
    assert sent.problem == "the receiver has only 0 of 64 tokens that it got"
    assert facts(answer(b)) == alone
    two.close()


def test_pages_that_follow_an_evicted_one_are_not_written(engines: tuple[LLM, LLM]) -> None:
    a, b = engines
    b.reset_prefix_cache()
    alone = facts(answer(b))
    b.reset_prefix_cache()
    pages = EnginePages.of(b)
    keys = pages.kept.keys(PROMPT[:32], None)

    def evict(sending: Sending, parts: list[Part]) -> None:
        _send(sending, parts[:4])  # two pages
        while pages.kept.num_cached(keys) < len(keys):
            time.sleep(0.001)  # the timeout of the test ends this
        b.reset_prefix_cache()
        _send(sending, parts[4:])

    connector, listener = shared_memory()
    answer(a, PROMPT, PREFILL)
    two = Pair(a, b, FaultyConnector(connector, evict), listener)
    result = two.end(two.begin())
    assert result.problem == "the first pages have been evicted again"
    assert result.num_tokens == 0
    assert two.last.result(LIMIT).problem is not None
    assert facts(answer(b)) == alone
    two.close()


def test_pages_that_the_sender_has_evicted_are_not_sent(two: Pair) -> None:
    assert two.end(two.begin()).problem == "the sender had only 0 of 64 tokens"
    answer(two.a, PROMPT[:40], PREFILL)
    assert two.end(two.begin()).num_tokens == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: the sender has int8, this engine float16"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: the sender has int4, this engine float16"),
        ({"block_size": 8, "second": {"block_size": 128}}, "64 tokens in pages of 8 are less than"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason(
    tiny_path: Path, options: dict[str, object], message: str
) -> None:
    second = options.pop("second", None)
    with pair(tiny_path, first=options, second=second) as two:
        answer(two.a, PROMPT, PREFILL)
        result = two.end(two.begin())
        assert result.num_tokens == 0
        assert result.problem is not None and message in result.problem
        told = two.last.result(LIMIT).problem
        assert told == f"the receiver refused: {result.problem}"
        assert answer(two.b).num_cached_tokens == 0


def test_the_keys_and_values_of_another_model_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path, "float16")
    with LLM(other, max_model_len=128) as a, LLM(tiny_path, max_model_len=128) as b:
        prompt = [x % 384 for x in PROMPT]
        answer(a, prompt, PREFILL)
        two = Pair(a, b, *shared_memory())
        result = two.end(two.begin(prompt))
        assert result.problem is not None and "but this engine runs model.gguf" in result.problem
        two.close()


def test_offers_that_contradict_themselves_are_refused(engines: tuple[LLM, LLM]) -> None:
    pages = EnginePages.of(engines[1])
    offer = pages.offer("x", PROMPT, None, None)
    pages.check(offer)
    with pytest.raises(TransferError, match=r"another shape: layers.*\(3, "):
        pages.check(replace(offer, spec=replace(offer.spec, num_layers=3)))
    with pytest.raises(TransferError, match="another kv_policy or other centres of keys"):
        pages.check(replace(offer, numerics=bytes(32)))
    capacity = pages.scheduler.pool.capacity * 16
    with pytest.raises(TransferError, match=f"does not fit into a KV cache of {capacity}"):
        pages.check(replace(offer, token_ids=(1,) * (capacity + 16)))


def test_an_engine_that_was_closed_ends_its_hand_overs(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as a:
        answer(a, PROMPT, PREFILL)
        b = LLM(tiny_path, max_model_len=128)
        two = Pair(a, b, *shared_memory())
        b.close()
        assert two.end(two.begin()).problem == "this LLM was closed"
        two.sender.close()
        two.receiver.close()


def test_a_system_without_threads_is_an_error_and_a_refusal(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(two.a, PROMPT, PREFILL)
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "sdk-hand-over" and limit.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    limit = [False, True]
    with pytest.raises(TransferError, match="no thread for a hand-over"):
        two.begin()
    limit = [True, False]
    two.begin()
    assert two.last.result(LIMIT).problem is not None  # the receiver has none
    limit = [False, False]
    assert two.end(two.begin()).num_tokens == USABLE


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("connect", CONNECTORS.values(), ids=CONNECTORS)
def test_200_hand_overs_leave_nothing_behind(
    engines: tuple[LLM, LLM], connect: Callable[[], tuple[KVConnector, KVListener]]
) -> None:
    """No page, thread, descriptor or shared memory; half of them break off in the middle."""
    a, b = engines
    before = None
    for round_ in range(2):
        threads = threading.active_count()
        for fault in (_send, _die):
            connector, listener = connect()
            two = Pair(a, b, FaultyConnector(connector, fault), listener)
            for seed in range(10 if round_ == 0 else 100):
                prompt = [3 + (seed * 37 + i * 11) % 400 for i in range(70)]
                answer(a, prompt, PREFILL)
                assert two.end(two.begin(prompt)).num_tokens >= 16
                two.last.result(LIMIT)
            two.close()
        assert threading.active_count() == threads
        found = _open_files(), _rings()
        if before is None:
            before = found
    assert found == before and found[1] == 0
    for llm in engines:
        check(llm)


def _rings() -> int:
    """Mappings of the memory of hand-overs in this process."""
    return Path("/proc/self/maps").read_text().count("embedlm-kv-")
