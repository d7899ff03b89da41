"""Keys and values that outlive their engine: same answers, whatever takes them back."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    OutOfMemoryError,
    RequestError,
    RequestOutput,
    SamplingParams,
    Snapshot,
    SnapshotError,
)

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=20, logprobs=2, ignore_eos=True)
PROMPT = [3 + 7 * i % 400 for i in range(70)]
KEPT = 64  # tokens of it in whole pages


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


def _answer(llm: LLM) -> RequestOutput:
    [output] = llm.generate([PROMPT], PARAMS)
    return output


@pytest.fixture(scope="module")
def saved(tiny: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots") / "prompt.kv"
    tiny.snapshot(PROMPT).save(path)
    return path


@pytest.mark.parametrize(
    "dtype", ["float16", "int16", "int8", "fp8", "k8v4", "int4", "int4:skip=1"]
)
def test_an_answer_after_a_restore_is_the_same_bits(
    tiny_path: Path, tmp_path: Path, dtype: str
) -> None:
    with LLM(tiny_path, max_model_len=128, kv_cache_dtype=dtype) as llm:
        alone = _facts(_answer(llm))
        llm.snapshot(PROMPT).save(tmp_path / "prompt.kv")
    with LLM(tiny_path, max_model_len=128, kv_cache_dtype=dtype, block_size=8) as other:
        assert other.restore(tmp_path / "prompt.kv") == KEPT
        output = _answer(other)
        assert output.num_cached_tokens == KEPT
        assert _facts(output) == alone
        assert other.get_metrics()["restored"] == KEPT // 8


def test_a_snapshot_equals_itself_alone_and_survives_pickling(saved: Path, tmp_path: Path) -> None:
    one, other = Snapshot.load(saved), pickle.loads(pickle.dumps(Snapshot.load(saved)))
    assert one == one and one != other and len({one, other}) == 2
    other.save(tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == saved.read_bytes()


def test_layers_with_sliding_windows_are_in_a_snapshot(golden: Path, tmp_path: Path) -> None:
    path, ids = golden / "arch-gemma3" / "hf", [3 + 7 * i % 200 for i in range(70)]
    with LLM(path, max_model_len=128) as llm:
        [alone] = llm.generate([ids], PARAMS)
        llm.snapshot(ids).save(tmp_path / "prompt.kv")
    with LLM(path, max_model_len=128, block_size=32) as llm:
        assert llm.restore(tmp_path / "prompt.kv") == KEPT
        [output] = llm.generate([ids], PARAMS)
        assert output.num_cached_tokens == KEPT and _facts(output) == _facts(alone)
    layers = Snapshot.load(tmp_path / "prompt.kv").kv.layers
    assert [len(layer.rows) for layer in layers] == [16] * 5 + [KEPT]  # a window of 8 tokens
    with LLM(path, max_model_len=128, enable_chunked_prefill=False) as llm:
        with pytest.raises(SnapshotError, match="the last 16 of 64 tokens of layer 0, which has a"):
            llm.restore(tmp_path / "prompt.kv")
        llm.snapshot(ids).save(tmp_path / "whole.kv")
    with LLM(path, max_model_len=128) as llm:
        assert llm.restore(tmp_path / "whole.kv", pin=True) == KEPT
        [output] = llm.generate([ids], PARAMS)
        assert output.num_cached_tokens == KEPT and _facts(output) == _facts(alone)


@pytest.mark.parametrize(
    ("source", "target", "noise"),
    [
        ("float32", "float16", 0.001),
        ("float16", "bfloat16", 0.01),
        ("float16", "int16", 0.001),
        ("int16", "float16", 0.001),
        ("float16", "int8", 0.03),
        ("int8", "float16", 0.05),
        ("fp8", "int8", 0.12),
        ("k8v4", "fp8_e5m2", 0.5),
        ("float16", "int4", 0.3),
        ("int4", "float16", 0.5),
    ],
)
def test_a_snapshot_goes_into_pages_of_another_type(
    tiny_path: Path, source: str, target: str, noise: float
) -> None:
    """The log-probabilities then differ by what the coarser type costs: half of ``noise`` when it
    was measured. After another prefix they differ by 0.7 to 0.9, and 5 of the best 20 are the same.
    """
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    options = {"max_model_len": 128, "compute": "exact"}
    with LLM(tiny_path, kv_cache_dtype=source, **options) as llm:
        snapshot = llm.snapshot(PROMPT)
    with LLM(tiny_path, kv_cache_dtype=target, **options) as llm:
        [own] = llm.generate([PROMPT], params)
        llm.reset_prefix_cache()
        llm.restore(snapshot)
        [output] = llm.generate([PROMPT], params)
    assert output.num_cached_tokens == KEPT
    expected, found = own.outputs[0].logprobs, output.outputs[0].logprobs
    assert expected is not None and found is not None
    common = expected[0].keys() & found[0].keys()
    assert len(common) >= 12
    for token in common:
        assert found[0][token].logprob == pytest.approx(expected[0][token].logprob, abs=noise)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others", "dtype"), [(1, 2, "float32"), (2, 1, "k8v4")])
def test_ranks_share_the_heads_of_a_snapshot(
    tiny_path: Path, ranks: int, others: int, dtype: str
) -> None:
    options = {"max_model_len": 128, "compute": "exact", "kv_cache_dtype": dtype}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(tiny_path, tensor_parallel_size=ranks, **options) as llm:
        snapshot = llm.snapshot(PROMPT)
        [alone] = llm.generate([PROMPT], greedy)
    with LLM(tiny_path, tensor_parallel_size=others, **options) as llm:
        assert llm.restore(snapshot) == KEPT
        [output] = llm.generate([PROMPT], greedy)
    assert output.num_cached_tokens == KEPT
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_unfinished_request_can_be_taken_along(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        alone = _facts(_answer(llm))
        llm.reset_prefix_cache()
        [request_id] = llm.enqueue([PROMPT], PARAMS)
        for _ in range(14):
            llm.step()
        snapshot = llm.snapshot(request_id=request_id)
        assert snapshot.num_tokens == 80 and snapshot.token_ids[:70] == tuple(PROMPT)
        [output] = llm.wait_for_completion()
        assert _facts(output) == alone  # the request did not notice
    with LLM(tiny_path, max_model_len=128) as llm:
        assert llm.restore(snapshot) == 80
        assert _facts(_answer(llm)) == alone


def test_a_restore_into_a_busy_engine_disturbs_nobody(tiny_path: Path, saved: Path) -> None:
    """Its pages are taken from a cached prefix, which must be swapped out before they are written.

    The other request is in the middle of steps that repeat one another.
    """
    other, cached = ([5 + (i * j) % 300 for i in range(30)] for j in (3, 4))
    with LLM(tiny_path, max_model_len=128) as llm:
        [alone] = llm.generate([other], PARAMS)
        expected = _facts(_answer(llm))
    page = llm.memory_plan.page_bytes
    options = {"kv_cache_memory_bytes": 9 * page, "swap_space": "1MiB", "max_num_seqs": 2}
    with LLM(tiny_path, max_model_len=128, **options) as llm:
        [first] = llm.generate([cached], PARAMS)
        llm.enqueue([other], PARAMS)
        for _ in range(5):
            llm.step()
        assert llm.restore(saved) == KEPT
        assert llm.get_metrics()["swapped_out"] > 0
        llm.enqueue([PROMPT], PARAMS)
        second, third = llm.wait_for_completion()
        assert _facts(second) == _facts(alone)
        assert _facts(third) == expected and third.num_cached_tokens == KEPT
        assert _facts(llm.generate([cached], PARAMS)[0]) == _facts(first)


def test_where_pages_lack_the_beginning_is_restored(tiny_path: Path, saved: Path) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    with LLM(tiny_path, max_model_len=80, kv_cache_memory_bytes=5 * page) as llm:
        assert llm.restore(saved) == KEPT
        llm.enqueue([[9] * 20], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.step()
        assert llm.restore(saved) == 48  # the request holds two of five
        [output] = llm.wait_for_completion()
        assert len(output.outputs[0].token_ids) == 4


def test_a_salt_keeps_restored_prefixes_apart(tiny_path: Path, saved: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        assert llm.restore(saved, cache_salt="mine") == KEPT
        assert _answer(llm).num_cached_tokens == 0
        llm.reset_prefix_cache()
        llm.restore(saved, cache_salt="mine")
        [output] = llm.generate([{"prompt_token_ids": PROMPT, "cache_salt": "mine"}], PARAMS)
        assert output.num_cached_tokens == KEPT


def test_restored_pages_throw_others_into_the_swap_space(tiny_path: Path, saved: Path) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    other = [5 + (i * 3) % 300 for i in range(50)]
    options = {"kv_cache_memory_bytes": 6 * page, "swap_space": "1MiB"}
    with LLM(tiny_path, max_model_len=96, **options) as llm:
        [alone] = llm.generate([other], PARAMS)
        assert llm.restore(saved) == KEPT
        assert llm.restore(Snapshot.load(saved)) == KEPT
        [output] = llm.generate([other], PARAMS)
        assert output.num_cached_tokens == 48 and _facts(output) == _facts(alone)
        assert llm.get_metrics()["swapped_in"] > 0


# Files


def _bytes(path: Path) -> bytearray:
    return bytearray(path.read_bytes())


def test_another_model_is_refused_naming_both(golden: Path, saved: Path) -> None:
    with LLM(golden / "gguf-Q4_0" / "model.gguf", max_model_len=128) as llm:
        with pytest.raises(
            SnapshotError, match=r"belongs to model.gguf \(\w+\), but this LLM runs"
        ):
            llm.restore(saved)
        assert llm.get_metrics()["num_pages_cached"] == 0


def test_the_same_model_at_another_place_takes_it(
    tiny_path: Path, tmp_path: Path, saved: Path
) -> None:
    moved = shutil.copy(tiny_path, tmp_path / "other.gguf")
    with LLM(moved, max_model_len=128) as llm:
        assert llm.restore(saved) == KEPT


def test_a_truncated_file_is_refused(tiny: LLM, saved: Path, tmp_path: Path) -> None:
    data = _bytes(saved)
    for size in (0, 5, 16, 60, len(data) // 2, len(data) - 1):
        broken = tmp_path / f"{size}.kv"
        broken.write_bytes(data[:size])
        with pytest.raises(SnapshotError, match=r"not a snapshot|damaged|truncated: expected"):
            tiny.restore(broken)


def test_every_flipped_bit_is_noticed(saved: Path, tmp_path: Path) -> None:
    data = _bytes(saved)
    broken = tmp_path / "flipped.kv"
    for at in [*range(260), *range(300, len(data), 1511), len(data) - 1]:
        data[at] ^= 1 << at % 8
        broken.write_bytes(data)
        with pytest.raises(SnapshotError):
            Snapshot.load(broken)
        data[at] ^= 1 << at % 8
    broken.write_bytes(data)
    assert Snapshot.load(broken).token_ids == tuple(PROMPT[:KEPT])


def test_another_version_and_other_files_are_refused(saved: Path, tmp_path: Path) -> None:
    data = _bytes(saved)
    data[8] = 5
    (tmp_path / "new.kv").write_bytes(data)
    with pytest.raises(SnapshotError, match=r"of version 5; this release reads versions 1 to 4"):
        Snapshot.load(tmp_path / "new.kv")
    (tmp_path / "text.kv").write_text("Once upon a time " * 10)
    with pytest.raises(SnapshotError, match=r"not a snapshot"):
        Snapshot.load(tmp_path / "text.kv")
    with pytest.raises(SnapshotError, match=r"cannot be read: .*No such file"):
        Snapshot.load(tmp_path / "nowhere.kv")
    os.mkfifo(tmp_path / "pipe.kv")
    for path in (tmp_path, tmp_path / "pipe.kv"):
        with pytest.raises(SnapshotError, match=r"not a regular file"):
            Snapshot.load(path)


@contextmanager
def _files_no_larger_than(size: int) -> Iterator[None]:
    """What a full disk does, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_the_old_snapshot(saved: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.load(saved)
    old = tmp_path / "prompt.kv"
    snapshot.save(old)
    before = old.read_bytes()
    with (
        _files_no_larger_than(10_000),
        pytest.raises(
            SnapshotError, match=r"cannot be written, [\d.]+ KiB and its tokens: .*File too large"
        ),
    ):
        snapshot.save(old)
    assert old.read_bytes() == before and list(tmp_path.iterdir()) == [old]


def test_a_path_that_cannot_be_written_is_named(saved: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.load(saved)
    for path in (tmp_path / "missing" / "prompt.kv", Path("/proc/prompt.kv"), tmp_path):
        with pytest.raises(SnapshotError, match=f"{path}: the snapshot cannot be written"):
            snapshot.save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_and_what_it_leads_to_is_written(saved: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.load(saved)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old.kv").write_text("old")
    for name in ("old.kv", "new.kv"):  # the second does not exist yet
        link = tmp_path / name
        link.symlink_to(elsewhere / name)
        snapshot.save(link)
        assert link.is_symlink() and not (elsewhere / name).is_symlink()
        assert (elsewhere / name).read_bytes() == saved.read_bytes()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["new.kv", "old.kv"]


def test_what_is_no_file_is_not_replaced_by_a_snapshot(saved: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.load(saved)
    circle, pipe = tmp_path / "circle", tmp_path / "pipe"
    circle.symlink_to(circle)
    os.mkfifo(pipe)
    for path, message in ((circle, "symbolic links"), (pipe, "not a regular file")):
        with pytest.raises(SnapshotError, match=f"{path}: the snapshot cannot .*{message}"):
            snapshot.save(path)
    assert circle.is_symlink() and pipe.is_fifo()
    with pytest.raises(SnapshotError, match="not a usable path"):
        snapshot.save("a\0b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "pipe"]


# Calls that cannot be served


def test_calls_without_a_full_page_or_a_prompt_are_refused(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="pages of 16 tokens; this one has only 3"):
        tiny.snapshot([1, 2, 3])
    with pytest.raises(RequestError, match="either a prompt or a request_id"):
        tiny.snapshot()
    with pytest.raises(RequestError, match="'77777' is unknown or finished"):
        tiny.snapshot(request_id="77777")


def test_without_a_prefix_cache_nothing_is_kept(tiny_path: Path, saved: Path) -> None:
    with LLM(tiny_path, max_model_len=128, enable_prefix_caching=False) as llm:
        for call in (llm.snapshot, llm.pin):
            with pytest.raises(RequestError, match="enable_prefix_caching=True"):
                call(PROMPT)
        with pytest.raises(RequestError, match="enable_prefix_caching=True"):
            llm.restore(saved)


# Pins


def test_a_pinned_prefix_outlives_pressure_and_unpinned_does_not(tiny_path: Path) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    others = [[5 + (i * j) % 300 for i in range(40)] for j in range(1, 5)]
    with LLM(tiny_path, max_model_len=64, kv_cache_memory_bytes=8 * page) as llm:
        prompt = PROMPT[:40]
        assert llm.pin(prompt) == 32
        assert llm.get_metrics()["num_pages_pinned"] == 2
        llm.generate(others, PARAMS)
        [hit] = llm.generate([prompt], PARAMS)
        assert hit.num_cached_tokens == 32
        assert llm.unpin(prompt) and not llm.unpin(prompt)
        assert llm.get_metrics()["num_pages_pinned"] == 0
        llm.generate(others, PARAMS)
        [miss] = llm.generate([prompt], PARAMS)
        assert miss.num_cached_tokens == 0 and _facts(miss) == _facts(hit)


def test_a_snapshot_can_be_restored_pinned(tiny_path: Path, saved: Path) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    with LLM(tiny_path, max_model_len=96, kv_cache_memory_bytes=6 * page) as llm:
        assert llm.restore(saved, pin=True) == KEPT
        assert llm.get_metrics()["num_pages_pinned"] == 4
        with pytest.raises(RequestError, match=r"needs 3 KV pages .* 2 are .* 4 of 6 are pinned"):
            llm.generate([[9] * 40], PARAMS)
        [output] = llm.generate([PROMPT], PARAMS)  # its own pages count as its own
        assert output.num_cached_tokens == KEPT
        assert llm.unpin(PROMPT[:KEPT])
        assert len(llm.generate([[9] * 40], PARAMS)[0].outputs[0].token_ids) == 20


def test_pins_that_leave_no_room_are_refused_with_the_sums(tiny_path: Path, saved: Path) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    with LLM(tiny_path, max_model_len=64, kv_cache_memory_bytes=4 * page) as llm:
        llm.generate([PROMPT[:17]], SamplingParams(max_tokens=1))  # one page of it stays
        [request_id] = llm.enqueue([[9] * 20], SamplingParams(max_tokens=40, ignore_eos=True))
        llm.step()
        with pytest.raises(OutOfMemoryError, match="needs 2 KV pages of 16 tokens, 1 of 4 are"):
            llm.restore(saved, pin=True)
        with pytest.raises(OutOfMemoryError, match=f"request {request_id} may need 4 and could"):
            llm.pin(PROMPT[:17])
        assert llm.get_metrics()["num_pages_pinned"] == 0
        [output] = llm.wait_for_completion()
        assert len(output.outputs[0].token_ids) == 40
        assert llm.restore(saved, pin=True) == 48
        with pytest.raises(OutOfMemoryError, match=r"4 of 4 .* any request may need 1 and could"):
            llm.pin([5] * 16)
        assert llm.get_metrics()["num_pages_pinned"] == 3


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"tokens": ' + b"9" * 5000 + b"}", b'{"a": NaN}', b"[]"],
)
def test_a_header_that_nobody_should_parse_is_a_snapshot_error(
    saved: Path, tmp_path: Path, header: bytes
) -> None:
    path = tmp_path / "hostile.kv"
    path.write_bytes(saved.read_bytes()[:12] + len(header).to_bytes(4, "little") + header)
    with pytest.raises(SnapshotError, match=r"hostile.kv: damaged: its header cannot be read"):
        Snapshot.load(path)


@pytest.mark.parametrize(
    "images",
    [
        [["00" * 32, [[0, 5], [4, 3]]]],  # not one after the other
        [["00" * 32, [[0, 1 << 20]]]],  # beyond the tokens
        [["00" * 31, [[0, 5]]]],
        [["zz" * 32, [[0, 5]]]],
        [["00" * 32, []]],
        [["00" * 32, [[0, -1]]]],
        [[]],
        7,
    ],
    ids=str,
)
def test_images_that_a_file_cannot_have_are_refused(
    saved: Path, tmp_path: Path, images: Any
) -> None:
    data = _bytes(saved)
    length = int.from_bytes(data[12:16], "little")
    header = json.loads(bytes(data[16 : 16 + length]))
    tokens = header["tokens"]
    header |= {"rows": [tokens] * header["layers"], "caches": [], "images": images}
    text = json.dumps(header).encode()
    body = bytes(data[16 + length : -32])
    whole = bytes(data[:8]) + struct.pack("<II", 4, len(text)) + text + body
    (tmp_path / "new.kv").write_bytes(whole + hashlib.sha256(whole).digest())
    with pytest.raises(SnapshotError, match="damaged: its header cannot be read"):
        Snapshot.load(tmp_path / "new.kv")
