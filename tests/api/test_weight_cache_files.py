"""Files of the cache of packed weights: written by one, damaged, removed, in folders of others."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, EngineDeadError, RequestError
from sdk.engine.weight_cache import folder as cache
from sdk.kernels.cpu import weight_map
from sdk.testing import tiny_model
from tests.api.weight_cache import (
    GOLDEN,
    LIMITS,
    answers,
    cache_folder,
    file_of,
    first,
    mapped,
    mappings,
    no_matrix_read,
    process,
    store,
    until,
)


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cache_folder(tmp_path, monkeypatch)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return shutil.copy(GOLDEN / "gguf-Q4_K_M" / "model.gguf", tmp_path / "model.gguf")


#: Writes pieces of the file until it is told to go on.
WRITE = """
import sys, threading
from sdk import LLM
from sdk.engine.weight_cache.writer import WeightWriter
def pause(self):
    print("ready", flush=True)
    threading.Event().wait()
WeightWriter._complete = lambda self, *given: pause(self)
llm = LLM(sys.argv[1], weight_cache=True, max_model_len=128, max_num_seqs=2, num_threads=1)
sys.stdin.readline()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_in_the_way(
    tiny: Path, weights: Path
) -> None:
    with process(WRITE, tiny) as child:
        child.send_signal(signal.SIGKILL)
    (left,) = weights.iterdir()
    assert left.suffix == ".part" and left.stat().st_size > 0
    expected = first(tiny)  # takes its place
    with mapped(tiny) as llm:
        assert answers(llm) == expected
    assert file_of(weights)


def test_one_of_two_processes_writes(tiny: Path, weights: Path) -> None:
    with process(WRITE, tiny), LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert str(store(llm)) == "not used: another process writes them into the cache now"
        expected = answers(llm)
        cache.prune(weights, 1 << 40)
        assert len(list(weights.iterdir())) == 1  # it is not left over
    assert cache.prune(weights, 1 << 40) == []
    assert not list(weights.iterdir())
    assert first(tiny) == expected


def test_a_file_that_may_not_grow_is_not_kept(tiny: Path, weights: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with LLM(tiny, weight_cache=True, **LIMITS) as llm:
            store(llm).wait()
            assert "may not write files of more than 8.0 KiB" in str(store(llm))
            found = answers(llm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(weights.iterdir())
    assert found == first(tiny)


def test_a_full_disk_is_not_filled_further(
    tiny: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.engine.weight_cache import writer

    monkeypatch.setattr(writer, "FREE", 1 << 60)
    monkeypatch.setattr(writer, "_AT_A_TIME", 1 << 10)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        store(llm).wait()
        assert "are free on the disk" in str(store(llm))
    assert not list(weights.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.97, 1.0])
def test_a_truncated_file_is_packed_again(share: float, tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    file = file_of(weights)
    size = file.stat().st_size
    os.truncate(file, min(int(size * share), size - 1))
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == expected
        store(llm).wait()
        assert str(store(llm)) == "written"
    with mapped(tiny) as llm:
        assert answers(llm) == expected


def test_no_flipped_bit_is_computed_with(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    file = file_of(weights)
    whole = file.read_bytes()
    outcomes = set()
    for place in [*range(0, len(whole), len(whole) // 24), *range(len(whole) - 64, len(whole), 7)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        file.chmod(0o600)
        with LLM(tiny, weight_cache=True, **LIMITS) as llm:
            try:
                assert answers(llm) == expected  # packed again, or a byte that nothing uses
                outcomes.add("right")
            except EngineDeadError as error:
                assert "are damaged" in str(error)
                outcomes.add("error")
                until(lambda: not file.exists())  # the next opening packs
        file.unlink(missing_ok=True)
    assert outcomes == {"right", "error"}


def test_after_damage_the_next_opening_packs_again(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    file = file_of(weights)
    whole = bytearray(file.read_bytes())
    for place in range(5000, len(whole) // 2, 5000):
        whole[place] ^= 16
    file.write_bytes(whole)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        with pytest.raises(EngineDeadError, match="in the cache of weights are damaged"):
            answers(llm)
        until(lambda: not file.exists())
    assert first(tiny) == expected


def test_a_file_under_another_key_is_packed_again(
    tiny: Path, tmp_path: Path, weights: Path
) -> None:
    """As if it were another model's, or that of another level of the CPU."""
    other = shutil.copy(GOLDEN / "gguf-Q8_0" / "model.gguf", tmp_path / "other.gguf")
    first(other)
    wrong = file_of(weights)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        store(llm).wait()
        expected = answers(llm)
    (name,) = {one.name for one in weights.iterdir()} - {wrong.name}
    wrong.replace(weights / name)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == expected
        assert "mapped" not in str(store(llm))


def test_a_model_that_was_changed_in_place_has_another_key(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    data = bytearray(tiny.read_bytes())
    data[len(data) // 2] ^= 1  # between the blocks that the model's key reads
    tiny.write_bytes(data)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert "mapped" not in str(store(llm))
        store(llm).wait()
    assert len(list(weights.iterdir())) == 2
    assert expected


def test_whoever_truncates_the_file_waits_until_it_is_copied(
    tiny: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_map, "_LOOK", 0.05)
    expected = first(tiny)
    signals: list[int] = []
    before = {one: signal.signal(one, lambda n, _: signals.append(n)) for one in (23, 29)}
    try:
        with mapped(tiny) as llm:
            script = "import os, sys; os.truncate(sys.argv[1], 0)"
            subprocess.run([sys.executable, "-c", script, file_of(weights)], check=True)
            assert file_of(weights).stat().st_size == 0
            assert answers(llm) == expected
            assert not mappings()
            assert "somebody wanted to change the file" in llm.explain()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not signals
    assert first(tiny) == expected  # the truncated file is replaced


def test_without_a_lease_the_weights_are_a_private_copy(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    writing = file_of(weights).open("r+b")  # who writes already can go on
    with writing, no_matrix_read(), LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert "the system gives no lease on the file" in llm.explain()
        assert not mappings()
        writing.truncate(0)
        assert answers(llm) == expected


def test_a_copy_that_fails_is_an_error_and_not_a_signal(
    tiny: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the file had become shorter before the copy: the process was stopped for too long."""
    first(tiny)
    with mapped(tiny) as llm:
        runner = llm._runner()
        found = runner.ops.context.backends[0].mapped
        until(lambda: all(one.state for one in found._checks))
        fcntl.fcntl(found._lease.file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.truncate(file_of(weights), 4096)
        assert found.give_lease()
        with pytest.raises(EngineDeadError, match="are damaged"):
            answers(llm)


def test_removing_the_file_changes_nothing_for_who_has_mapped_it(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    with mapped(tiny) as llm:
        assert len(cache.prune(weights, 0)) == 1
        assert not list(weights.iterdir())
        assert answers(llm) == expected


def test_files_and_folder_are_the_users_alone(tiny: Path, weights: Path) -> None:
    first(tiny)
    assert weights.stat().st_mode & 0o777 == 0o700
    assert file_of(weights).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_write_is_not_used(tiny: Path, weights: Path) -> None:
    weights.mkdir(parents=True)
    weights.chmod(0o777)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert "is not a folder that only this user may write" in str(store(llm))
        assert answers(llm)


def test_a_file_that_others_may_write_is_not_used(tiny: Path, weights: Path) -> None:
    expected = first(tiny)
    file_of(weights).chmod(0o666)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert "others may write it: expected owner" in str(store(llm))
        assert answers(llm) == expected


def test_a_folder_that_cannot_be_made_is_not_used(tiny: Path, weights: Path) -> None:
    weights.parent.parent.mkdir()
    weights.parent.write_text("a file")
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert str(store(llm)).startswith("not used: ")
        assert answers(llm)


def test_weights_that_are_larger_than_the_cache_are_not_kept(tiny: Path, weights: Path) -> None:
    with LLM(tiny, weight_cache="16KiB", **LIMITS) as llm:
        store(llm).wait()
        assert "larger than the cache may be (16.0 KiB)" in str(store(llm))
        assert answers(llm)
    assert not list(weights.iterdir())


def test_what_was_not_used_for_the_longest_time_makes_room(
    tiny: Path, tmp_path: Path, weights: Path
) -> None:
    first(tiny)
    old = file_of(weights)
    other = shutil.copy(GOLDEN / "gguf-Q8_0" / "model.gguf", tmp_path / "other.gguf")
    first(other)
    (middle,) = set(weights.iterdir()) - {old}
    for age, file in enumerate((middle, old)):
        os.utime(file, (age, age))
    with mapped(other):  # now it was used last
        pass
    room = old.stat().st_size + middle.stat().st_size
    third = shutil.copy(tiny, tmp_path / "third.gguf")
    os.utime(third, (1, 1))
    with LLM(third, weight_cache=room, **LIMITS) as llm:
        store(llm).wait()
    assert middle.exists() and not old.exists()
    assert sum(file.stat().st_size for file in weights.iterdir()) <= room


def test_an_engine_that_is_closed_while_it_writes_leaves_nothing(
    tiny: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.engine.weight_cache.writer import WeightWriter

    reached = threading.Event()
    write = WeightWriter._write_weight

    def wait(self: WeightWriter, *given: Any) -> None:
        reached.set()
        self._cancelled.wait()
        write(self, *given)

    monkeypatch.setattr(WeightWriter, "_write_weight", wait)
    with LLM(tiny, weight_cache=True, **LIMITS) as llm:
        assert reached.wait(60)
        kept = store(llm)
    assert "the engine was closed before all were written" in str(kept)
    assert not list(weights.iterdir())


def test_offloaded_weights_are_not_kept(tmp_path: Path, weights: Path) -> None:
    model = tiny_model(tmp_path, "float16")
    with LLM(model, weight_cache=True, disk_offload="100KiB", **LIMITS) as llm:
        assert "offloaded to the disk have a file of their own" in llm.explain()
        assert answers(llm)
    assert not weights.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_cache": "much"}, "weight_cache: expected a size such as '2GiB'"),
        ({"weight_cache": -1}, "weight_cache: expected a size"),
        ({"weight_cache": True, "device": "cuda"}, "weight_cache=True: with device='cuda'"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(tiny, **options)


def test_nothing_is_written_unless_it_is_asked_for(tiny: Path, weights: Path) -> None:
    with LLM(tiny, **LIMITS) as llm:
        assert answers(llm)
        assert "cache:" not in llm.explain()
    assert not weights.exists()
