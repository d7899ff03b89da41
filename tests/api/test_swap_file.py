"""A swap file on a disk that takes no more: pages are lost, answers and the engine are not."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.engine.plan import Swap
from sdk.engine.rank.swap_storage import SwapStorage
from sdk.kernels.kv.tiers import page_id
from tests.api.engines import settle, tokens

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
PROMPTS = [[3 + (7 + j) * i % 400 for i in range(20)] for j in range(4)]


def _small(path: Path, folder: Path, **options: Any) -> LLM:
    """Pages for two of the answers, and a swap file."""
    dtype = options.get("kv_cache_dtype", "auto")
    page = LLM.plan(path, max_model_len=128, kv_cache_dtype=dtype).page_bytes
    options = {"kv_cache_memory_bytes": 8 * page, "swap_space": 64 * page, **options}
    return LLM(
        path, max_model_len=128, max_num_batched_tokens=17, max_num_seqs=4, swap_path=folder,
        **options,
    )  # fmt: skip


@contextmanager
def _largest_file(nbytes: int) -> Iterator[None]:
    """Writes behind the first ``nbytes`` of any file fail, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> list[list[int]]:
    with LLM(tiny_path, max_model_len=128) as llm:
        return [tokens(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


@pytest.mark.parametrize("room", [0, 3], ids=["no page", "three pages"])
def test_pages_that_the_file_does_not_take_are_computed_again(
    tiny_path: Path,
    tmp_path: Path,
    alone: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    caplog.set_level(logging.WARNING, "sdk")
    with _small(tiny_path, tmp_path) as llm:
        with _largest_file(room * llm.memory_plan.page_bytes):
            for _ in range(2):
                outputs = llm.generate(PROMPTS, PARAMS)
                assert [tokens(output) for output in outputs] == alone
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)
        metrics = llm.get_metrics()
        assert metrics["swap_failed"] > 1
        assert metrics["swap_pages_used"] <= room
        [message] = [record.message for record in caplog.records]
        assert "swap_path" in message and "File too large" in message
        settle(llm)
        # there is room again
        assert [tokens(output) for output in llm.generate(PROMPTS, PARAMS)] == alone
        after = llm.get_metrics()
        assert after["swap_failed"] == metrics["swap_failed"]
        assert after["swapped_in"] > metrics["swapped_in"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pages_that_were_not_written_are_there_for_the_copies_already_decided(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Some writes of rank 0 fail, in no order that the scheduler could know."""
    calls = 0
    write = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    params = PARAMS.clone(temperature=0)
    exact = {"compute": "exact", "kv_cache_dtype": "float32"}
    with LLM(tiny_path, max_model_len=128, **exact) as llm:
        expected = [tokens(llm.generate([prompt], params)[0]) for prompt in PROMPTS]
    with _small(tiny_path, tmp_path, tensor_parallel_size=ranks, **exact) as llm:
        monkeypatch.setattr(os, "pwrite", pwrite)
        for _ in range(3):
            assert [tokens(output) for output in llm.generate(PROMPTS, params)] == expected
        metrics = llm.get_metrics()
        assert metrics["swap_failed"] > 1 and metrics["swapped_in"] > 1
        settle(llm)


def test_a_page_that_was_not_written_can_be_read_until_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = torch.arange(48, dtype=torch.uint8).view(3, 16)
    storage = SwapStorage([pages], 4, str(tmp_path))
    small = page_id(1, 5)  # a page of the second tier

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        storage.run(Swap(1, (2,), out=True))
        storage.run(Swap(page_id(1, 4), (small,), out=True))
        storage.run(Swap(0, (3,), out=True))
    storage.run(Swap(2, (3,), out=True))  # taken now: no loss
    storage.run(Swap(0, (2,), out=False))
    storage.run(Swap(page_id(1, 2), (small,), out=False))
    assert pages[0].tolist() == list(range(16, 32))
    assert pages[1].tolist() == [*range(32, 40), *range(24, 32)]
    assert storage.unwritten().keys() == {2, small}
    assert storage.unwritten() == {} and not storage._kept
    storage.run(Swap(0, (3,), out=False))
    assert pages[0].tolist() == list(range(32, 48))
    storage.close()
