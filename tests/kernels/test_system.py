"""The services of the operating system that these tests run on; the same on every one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.api.errors import RequestError, UnsupportedError
from sdk.cluster.transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from sdk.kernels.cpu.rank_group import why_not_shared
from sdk.kernels.system import SYSTEM
from sdk.kernels.system.services import Services
from sdk.loading.around import part_around

READ_WRITE = os.O_RDWR | os.O_CREAT


def test_memory_and_processors_have_plausible_numbers() -> None:
    assert 2**28 < SYSTEM.available_ram() <= SYSTEM.installed_ram() < 2**50
    assert 2**20 < SYSTEM.peak_memory() < SYSTEM.installed_ram()
    assert 1 <= SYSTEM.num_cpus() <= len(SYSTEM.cpus()) <= (os.cpu_count() or 1)
    assert sum(SYSTEM.core_kinds()) == os.cpu_count()
    assert SYSTEM.cpu_name()
    assert 2**17 <= SYSTEM.stack_bytes() <= 2**23


def test_bytes_are_read_and_written_at_a_place_whatever_they_are(tmp_path: Path) -> None:
    file = SYSTEM.open_file(tmp_path / "ä д 中.bin", READ_WRITE)
    try:
        SYSTEM.reserve_space(file, 0, 1 << 16)
        assert os.fstat(file).st_size == 1 << 16
        data = b"a\nb\r\n\x1a" * 1000
        assert SYSTEM.write_at(file, data, 4096) == len(data)
        again = SYSTEM.reopen(file)
        into = bytearray(len(data))
        assert SYSTEM.read_at(again, memoryview(into), 4096) == len(data)
        assert bytes(into) == data
        assert SYSTEM.read_at(again, memoryview(into), 1 << 16) == 0
        assert SYSTEM.read_at(again, memoryview(into), (1 << 16) - 5) == 5
        os.close(again)
        SYSTEM.sync_data(file)
        SYSTEM.sync_folder(tmp_path)
    finally:
        os.close(file)


def test_private_memory_is_zeros_and_so_are_pages_that_were_returned() -> None:
    with SYSTEM.map_private(1 << 22, huge=True, reserve=False) as mapping:
        assert mapping[: 1 << 12] == bytes(1 << 12)
        mapping[: 1 << 16] = b"x" * (1 << 16)
        SYSTEM.populate(mapping, 1 << 16, 1 << 21)
        SYSTEM.discard(mapping, 0, 1 << 15)
        expected = bytes(1 << 15) if SYSTEM.can_discard else b"x" * (1 << 15)
        assert mapping[: 1 << 15] == expected
        assert mapping[1 << 15 : 1 << 16] == b"x" * (1 << 15)


def test_a_lock_is_one_opening_s_until_it_is_closed_and_does_not_hide_the_file(
    tmp_path: Path,
) -> None:
    one, two = (SYSTEM.open_file(tmp_path / "lock", READ_WRITE) for _ in range(2))
    assert SYSTEM.write_at(one, b"seen", 0) == 4
    assert SYSTEM.lock_file(one) and not SYSTEM.lock_file(two)
    assert (tmp_path / "lock").read_bytes() == b"seen"
    os.close(one)
    assert SYSTEM.lock_file(two)
    os.close(two)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    SYSTEM.replace_file(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"new" and not (tmp_path / "new").exists()


def test_a_hidden_file_can_be_read_and_is_gone_afterwards(tmp_path: Path) -> None:
    for hidden in (SYSTEM.hidden_file, lambda text: Services.hidden_file(SYSTEM, text)):
        with hidden("ein Schlüssel") as name:
            assert Path(name).read_text(encoding="utf-8") == "ein Schlüssel"
        assert not Path(name).exists()


def test_a_process_is_alive_until_it_has_ended() -> None:
    assert SYSTEM.is_alive(os.getpid()) and SYSTEM.is_alive(2**70)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert SYSTEM.is_alive(child.pid)
    child.kill()
    child.wait()
    assert not SYSTEM.is_alive(child.pid)


def test_a_signal_stops_a_process_and_the_system_says_so() -> None:
    assert not SYSTEM.is_stopped(os.getpid()) and not SYSTEM.is_stopped(2**22 + 1)


class Plain(type(SYSTEM)):  # type: ignore[misc]
    """A system with nothing of its own."""

    name = "Another system"
    can_fork = can_seal = can_pass_sockets = False
    pin, memory_folder = Services.pin, Services.memory_folder
    sealed_memory, is_sealed, check_peer = (
        Services.sealed_memory,
        Services.is_sealed,
        Services.check_peer,
    )
    take_lease, lease_is_wanted = Services.take_lease, Services.lease_is_wanted
    lease_seconds = Services.lease_seconds


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Services:
    found = Plain()
    for module in (
        *("sdk.loading.around", "sdk.kernels.cpu.rank_group"),
        "sdk.cluster.transfer.shared_memory",
    ):
        monkeypatch.setattr(f"{module}.SYSTEM", found)
    return found


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("replicas", r"several replicas \(data_parallel_size\) need Linux, this is Another system"),
        ("ranks", r"remote_workers\) need Linux or macOS, this is Another system: use one engine"),
    ],
)
def test_processes_that_a_system_cannot_start_are_refused_by_option(
    plain: Services, part: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        part_around(part)


def test_shared_memory_that_a_system_lacks_is_refused_by_name(plain: Services) -> None:
    for make in (SharedMemoryConnector, SharedMemoryListener):
        with pytest.raises(RequestError, match="this is Another system: use TcpConn"):
            make()
    assert why_not_shared() == "Another system has no folder in memory that ranks could share"


def test_what_a_system_lacks_is_an_error_with_its_name(plain: Services) -> None:
    for call in (
        lambda: plain.pin(1, frozenset({0})),
        lambda: plain.sealed_memory(1),
        lambda: plain.is_sealed(0),
        lambda: plain.check_peer(None),  # type: ignore[arg-type]
        lambda: plain.lease_is_wanted(0),
    ):
        with pytest.raises(OSError, match=r"^Another system"):
            call()
    assert plain.take_lease(0) == "Another system has no leases on files"
    assert plain.lease_seconds() == 0.0


#: What Python lacks where it was compiled with a glibc from before 2.27, as cx_Freeze's is.
OLD_PYTHON = """
import fcntl, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
for module in (fcntl, os):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "F_SEAL_", "F_ADD_SEALS", "F_GET_SEALS")):
            delattr(module, name)
from sdk import LLM, RequestError
from sdk.cluster.transfer.shared_memory import SharedMemoryListener
from sdk.kernels.system import SYSTEM
with SYSTEM.hidden_file("a secret") as name:
    print(Path(name).read_text())
try:
    SharedMemoryListener()
except RequestError as error:
    print(error)
"""


@pytest.mark.skipif(SYSTEM.name != "Linux", reason="memory files are Linux's")
def test_a_python_without_memory_files_runs_everything_else() -> None:
    command = [sys.executable, "-c", OLD_PYTHON, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == "a secret"
    assert "needs Linux and a Python with os.memfd_create, this is" in told[1]


def test_a_python_of_32_bits_is_refused_in_one_line() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; sys.maxsize = 2**31 - 1; import sdk"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "ImportError: embedlm needs a Python of 64 bits, and this one has 32: install another one"
    )


@pytest.mark.parametrize("path", ["\ud800.gguf", "a\0b.gguf", "folder\ud800/x"])
def test_a_path_that_cannot_be_encoded_is_one_line(path: str) -> None:
    from sdk import LLM
    from sdk.api.errors import CheckpointError

    with pytest.raises(CheckpointError) as error:
        LLM(path)
    assert str(error.value) == f"{path}: no such file or folder"
