"""The fake torch.cuda complains about what a card would do wrong, and about nothing else.

The second half removes one order from the engine at a time: the tests of other files would fail.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_card import on_a_card
from fake_cuda import POISON, Cuda, Hazard, without_a_gpu
from torch import Tensor

from sdk import LLM, LoRARequest, SamplingParams
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.run_ahead import Readback
from sdk.kernels import card as card_module
from sdk.kernels.card import Card
from sdk.kernels.errors import KernelError
from sdk.kernels.reference.linear import multiply
from sdk.kernels.sized_graphs import SizedGraphs
from sdk.testing import tiny_adapter, tiny_model
from tests.structured_answers import STRUCTURES

CUDA = "cuda:0"


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with without_a_gpu() as found:
        yield found


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


# Streams


@pytest.mark.parametrize("ordered", [True, False])
def test_work_reads_what_another_stream_wrote_only_after_it(cuda: Cuda, ordered: bool) -> None:
    x = torch.zeros(4, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x += 1
    if ordered:
        torch.cuda.current_stream().wait_stream(stream)
        assert x.tolist() == [1, 1, 1, 1]
        return
    with pytest.raises(Hazard, match="reads what another stream has not written yet"):
        x + 1


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_written_after_all_that_read_it(cuda: Cuda, ordered: bool) -> None:
    x = torch.zeros(4, device=CUDA)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x + 1
        event.record()
    if ordered:
        torch.cuda.current_stream().wait_event(event)
        x += 1
        return
    with pytest.raises(Hazard, match="writes what another stream still reads"):
        x += 1


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_another_stream_is_reused_while_it_is_read(cuda: Cuda, kept: bool) -> None:
    """As torch's allocator does, unless ``record_stream`` tells it."""
    card = Card(torch.device(CUDA))
    x = torch.zeros(64, device=CUDA)
    card.take()
    with card:
        y = x + 1
    if kept:
        card.keep(x)
    del x
    if kept:
        torch.zeros(64, device=CUDA)
    else:
        with pytest.raises(Hazard, match="still reads"):
            torch.zeros(64, device=CUDA)
    with card:
        assert y.tolist() == [1.0] * 64


def test_what_is_lent_to_the_host_comes_after_the_engine_and_before_its_next_work(
    cuda: Cuda,
) -> None:
    card = Card(torch.device(CUDA))
    before = cuda.waits
    with card:
        x = torch.zeros(4, device=CUDA)
        with card.lent():
            assert torch.cuda.current_stream() is cuda.default
            x += 1
        x += 1
    assert cuda.waits == before  # no host waited
    with pytest.raises(Hazard):
        x + 1
    cuda.hazards.clear()
    card.give()
    assert x.tolist() == [2, 2, 2, 2]


def test_a_thread_gets_its_own_stream_back_also_after_an_error(cuda: Cuda) -> None:
    card, own = Card(torch.device(CUDA)), torch.cuda.Stream()
    with torch.cuda.stream(own):
        with pytest.raises(ValueError), card, card:
            assert torch.cuda.current_stream() is card.stream
            raise ValueError
        assert torch.cuda.current_stream() is own


# Pinned memory


def test_a_copy_to_the_host_is_nonsense_until_the_host_has_waited(cuda: Cuda) -> None:
    x = torch.ones(4, dtype=torch.uint8, device=CUDA)
    host = torch.zeros(4, dtype=torch.uint8, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert host.tolist() == [POISON] * 4
    done.synchronize()
    assert host.tolist() == [1] * 4


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_written_after_the_copy_from_it(cuda: Cuda, waits: bool) -> None:
    host, x = torch.zeros(4, pin_memory=True), torch.zeros(4, device=CUDA)
    x.copy_(host, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if waits:
        done.synchronize()
    host += 1
    if waits:
        x.copy_(host, non_blocking=True)
        assert x.tolist() == [1] * 4
        return
    with pytest.raises(Hazard, match="written pinned memory before"):
        x.copy_(host, non_blocking=True)


# Captures


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda x: x.tolist(), "the host reads a tensor"),
        (lambda x: torch.cuda.synchronize(), "the host waits"),
        (lambda x: torch.zeros(4, pin_memory=True), "pinned memory is allocated"),
        (lambda x: torch.cuda.empty_cache(), "memory is returned"),
        (lambda x: x[torch.tensor([0])], "copies a tensor of the host"),
    ],
)
def test_what_a_capture_does_not_allow(cuda: Cuda, work: Any, why: str) -> None:
    card = Card(torch.device(CUDA))
    with card:
        x = torch.zeros(4, device=CUDA)
    with pytest.raises(Hazard, match=f"{why} during a capture"), card.capturing(lambda: None):
        card.begin()
        work(x)
    assert gc.isenabled() and cuda.capturing is None  # also after an error


def test_nothing_collects_garbage_during_a_capture_and_the_host_s_choice_is_restored(
    cuda: Cuda,
) -> None:
    card = Card(torch.device(CUDA))
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with card.capturing(lambda: None):
                assert not gc.isenabled()
                card.begin()
                card.end()
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    with card.capturing(lambda: None):
        card.begin()
        gc.collect()
        card.end()
    assert cuda.hazards == ["garbage is collected during a capture"]


def test_a_tensor_of_a_graph_is_gone_after_a_replay_of_another(cuda: Cuda) -> None:
    """Where they share the pool's memory, because nobody held the tensor that was there."""
    card = Card(torch.device(CUDA))
    with card:
        x = torch.ones(4, device=CUDA)
        with card.capturing(lambda: None):
            card.begin()
            between = x + 1
            place = between.memory.begin
            kept = between * 2
            del between
            first = card.end()
        with card.capturing(lambda: None):
            card.begin()
            other = x + 5
            second = card.end()
        assert other.memory.begin == place
        first.replay()
        second.replay()
        assert kept.tolist() == [4] * 4 and other.tolist() == [6] * 4
        first.replay()
        with pytest.raises(Hazard, match="after it was written as another tensor"):
            other.tolist()


def test_a_launch_of_another_thread_into_a_captured_stream_is_seen(cuda: Cuda) -> None:
    card = Card(torch.device(CUDA))
    with card:
        x = torch.zeros(4, device=CUDA)

    def launch() -> None:
        with pytest.raises(Hazard, match="another thread launches"), card:
            x.add_(1)

    with card.capturing(lambda: None):
        card.begin()
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        card.end()


def test_captures_of_two_engines_take_turns(cuda: Cuda) -> None:
    cards = [Card(torch.device(CUDA)) for _ in range(2)]
    inside: list[int] = []

    def capture(card: Card) -> None:
        with card.capturing(lambda: None):
            inside.append(1)
            assert sum(inside) == 1 and not gc.isenabled()
            inside.append(-1)

    threads = [threading.Thread(target=capture, args=(card,)) for card in cards * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 16 and gc.isenabled()


def test_the_reference_multiplies_in_float64_on_a_gpu(cuda: Cuda) -> None:
    """The host may have let torch round products of float32 numbers there."""
    seen: list[Any] = []
    dispatch = cuda.dispatch

    def noting(func: Any, args: Any, kwargs: Any) -> Any:
        if str(func).startswith("aten.mm"):
            seen.extend(x.dtype for x in args)
        return dispatch(func, args, kwargs)

    cuda.dispatch = noting  # type: ignore[method-assign]
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    found = multiply(x.to(CUDA), w.to(CUDA))
    assert torch.allclose(found.cpu(), x @ w.t(), atol=1e-5)
    assert found.dtype == torch.float32 and set(seen) == {torch.float64}


# One order of the engine less

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 24, "max_num_seqs": 4}
PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


def trace(llm: LLM) -> list[Any]:
    """Requests that start, end, draw at random and change their logits next to others."""
    lengths = [3, 17, 9, 30, 2, 21, 14, 5]
    wanted = [
        SamplingParams(
            temperature=0.8, top_k=20, seed=i, max_tokens=n, ignore_eos=True,
            logit_bias={9: 2.0} if i % 3 == 0 else None,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS * 2, wanted)]


def no_wait_of_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepInputs, "wait", lambda inputs: None)


def no_event_of_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Readback, "read", lambda readback: readback._samples.numpy())


def no_stream_of_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Card, "__enter__", lambda card: card)
    patch.setattr(Card, "__exit__", lambda *args: None)


def collector_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card_module.gc, "disable", lambda: None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fault",
    [no_wait_of_inputs, no_event_of_tokens, no_stream_of_its_own, collector_on],
)
def test_without_one_order_the_card_complains(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with LLM(path, enforce_eager=True, **LIMITS) as llm:
        wanted = trace(llm)
    found: Any = None
    seen: list[str] = []
    try:
        with on_a_card(path, **LIMITS) as (llm, cuda):
            seen = cuda.hazards
            assert trace(llm) == wanted and not cuda.hazards  # with all orders
            with monkeypatch.context() as patch:
                fault(patch)
                if fault is collector_on:
                    runner = llm._runner()

                    def again() -> None:
                        with runner.entered():
                            runner.record()
                            runner.capture_all()

                    llm._driver.between_steps(again)
                llm.reset_prefix_cache()
                found = trace(llm)
                assert found == wanted
    except Exception:
        found = None  # an engine that ended, wrong tokens, a hazard
    assert seen or found != wanted


def test_a_host_s_stream_and_an_engine_s_thread_do_not_meet(path: Path) -> None:
    """Steps driven from a thread of the host inside its stream, next to the engine's own thread."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    with LLM(path, enforce_eager=True, **LIMITS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with on_a_card(path, **LIMITS) as (llm, _):
        own = torch.cuda.Stream()
        for _ in range(2):
            assert [x.outputs[0].token_ids for x in llm.generate(PROMPTS, params)] == wanted
            names = llm.enqueue(PROMPTS, [params] * len(PROMPTS))
            done: dict[str, Any] = {}
            with torch.cuda.stream(own):
                x = torch.zeros(4, device=CUDA)
                while len(done) < len(names):
                    x += 1
                    done |= {o.request_id: o for o in llm.step() if o.finished}
                assert torch.cuda.current_stream() is own
            assert [done[name].outputs[0].token_ids for name in names] == wanted
            llm.reset_prefix_cache()


def test_a_callback_sees_its_logits_in_the_caller_s_stream(path: Path) -> None:
    seen: list[Any] = []

    def callback(token_ids: Any, logits: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream())
        return logits + torch.ones_like(logits)  # made in that stream, read by the engine

    params = SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[callback])
    with LLM(path, enforce_eager=True, **LIMITS) as llm:
        wanted = llm.generate(PROMPTS[0], params.clone(logits_processors=None))[0].outputs[0]
    with on_a_card(path, **LIMITS) as (llm, cuda):
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == wanted.token_ids
        assert set(seen) == {cuda.default}


@pytest.mark.slow
def test_adapters_pages_that_are_swapped_and_structures_meet_no_hazard(
    tmp_path: Path, golden: Path
) -> None:
    """Next to each other, driven by the engine's thread while another one packs adapters."""
    model = tiny_model(tmp_path, "q4_k_m")
    adapters = [
        LoRARequest(str(i), i, tiny_adapter(tmp_path / str(i), model, seed=i)) for i in (1, 2)
    ]
    options = {
        **LIMITS, "enable_lora": True, "max_loras": 1, "swap_space": "4MiB",
        "max_model_len": 256,
    }  # fmt: skip
    structure, is_valid = STRUCTURES["object"]
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    bound = SamplingParams(temperature=0.8, seed=3, max_tokens=80, structured_outputs=structure)

    def everything(llm: LLM) -> list[Any]:
        found = []
        for _ in range(2):  # the second time with prefixes from the swap space
            for lora in (None, *adapters, None):
                outputs = llm.generate(PROMPTS, drawn, lora_request=lora)
                found += [tuple(x.outputs[0].token_ids) for x in outputs]
            long = [[(7 * j + 31 * i) % 300 + 4 for j in range(60)] for i in range(4)]
            outputs = llm.generate(long, [drawn, bound, drawn, bound])
            assert all(is_valid(outputs[i].outputs[0].text) for i in (1, 3))
            found += [tuple(x.outputs[0].token_ids) for x in outputs]
        return found

    with LLM(model, enforce_eager=True, **options) as llm:
        pages = 20 * llm.memory_plan.page_bytes
        wanted = everything(llm)
    with on_a_card(model, kv_cache_memory_bytes=pages, **options) as (llm, cuda):
        assert everything(llm) == wanted
        numbers = llm.get_metrics()
        assert cuda.replays > 100 and numbers["num_preemptions"] > 0


def test_an_error_of_triton_names_kernel_and_card(cuda: Cuda) -> None:
    """In a step a KernelError; in a capture the reason why sizes run operator by operator."""

    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    class JITFunction:
        __name__ = "product"

        def run(self) -> None:
            raise OutOfResources("out of resource: shared memory, Required: 300000")

    card = Card(torch.device(CUDA))
    kernel = JITFunction()
    reason = "kernel product cannot run on a card that is not here: OutOfResources: out of resource"
    with pytest.raises(KernelError, match=reason), card:
        kernel.run()
    with pytest.raises(ValueError), card:
        raise ValueError
    graphs: SizedGraphs[Any] = SizedGraphs([4, 2], lambda size: f"a step of {size}")

    def capture(size: int) -> None:
        with card.capturing(lambda: None):
            card.begin()
            kernel.run()

    graphs.capture_next(capture)
    assert f"a step of 4 cannot be captured: {reason}" in graphs.failed
    assert not graphs.waits and graphs.find(4) is None and gc.isenabled()
