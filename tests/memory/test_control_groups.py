"""A container's limits on memory and CPU time, read from made-up trees of /proc and /sys."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sdk.api.config import EngineConfig
from sdk.api.machine import available_memory, installed_memory
from sdk.kernels.system import SYSTEM, MemoryLimit
from sdk.kernels.system.control_groups import group_cpus, group_memory
from sdk.memory import resolve

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712\n"  # what version 1 says without a limit, with pages of 4 KiB


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mount(kind: str, at: str, top: str = "/", options: str = "rw") -> str:
    return f"31 23 0:28 {top} {at} rw,nosuid shared:9 - {kind} {kind} {options}\n"


V2 = mount("ext4", "/") + mount("cgroup2", "/sys/fs/cgroup")
V1 = mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu") + mount(
    "cgroup", "/sys/fs/cgroup/memory", options="rw,memory"
)


def test_no_files_at_all_mean_no_limit(tmp_path: Path) -> None:
    assert group_memory(tmp_path) is None


def test_groups_without_a_limit_leave_the_machine_its_memory(tmp_path: Path) -> None:
    own = "sys/fs/cgroup/user.slice"
    files = {f"{own}/memory.max": "max\n", f"{own}/memory.high": "max\n"}
    assert group_memory(tree(tmp_path, "0::/user.slice\n", V2, files)) is None


def test_a_containers_limit_less_what_it_uses_is_left_file_pages_aside(tmp_path: Path) -> None:
    """In a namespace of its own a container is the root of what it sees."""
    files = {
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.high": "max\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": (
            f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n"
            f"slab_reclaimable {GIB // 8}\nslab_unreclaimable {GIB}\n"
        ),
    }
    used = 3 * GIB - GIB // 2 - GIB // 4 - GIB // 8
    found = group_memory(tree(tmp_path, "0::/\n", V2, files))
    assert found == MemoryLimit(4 * GIB, 4 * GIB - used)


def test_memory_high_is_a_limit_too_where_it_is_the_lower_one(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/app/memory.high": f"{2 * GIB}\n",
        "sys/fs/cgroup/app/memory.current": f"{GIB}\n",
    }
    found = group_memory(tree(tmp_path, "0::/app\n", V2, files))
    assert found == MemoryLimit(2 * GIB, GIB)


def test_a_group_above_may_be_the_tighter_one(tmp_path: Path) -> None:
    """The limit is the own group's, what is left is less in the one above, which others fill."""
    files = {
        "sys/fs/cgroup/shop/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/shop/memory.current": f"{7 * GIB}\n",
        "sys/fs/cgroup/shop/web/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/shop/web/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/shop/web/one/memory.max": "max\n",
    }
    found = group_memory(tree(tmp_path, "0::/shop/web/one\n", V2, files))
    assert found == MemoryLimit(4 * GIB, GIB)


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/app/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/app/memory.current": f"{2 * GIB}\n",
    }
    found = group_memory(tree(tmp_path, "0::/app\n", V2, files))
    assert found == MemoryLimit(GIB, 0)


def test_version_1_is_read_where_its_memory_controller_is_mounted(tmp_path: Path) -> None:
    """Beside it an empty tree of version 2, as systems have that run both."""
    groups = "9:name=systemd:/\n4:cpu,memory:/docker/4f\n1:cpu:/elsewhere\n0::/\n"
    own = "sys/fs/cgroup/memory/docker/4f"
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": f"{5 * GIB}\n",
        f"{own}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{own}/memory.usage_in_bytes": f"{GIB + GIB // 2}\n",
        f"{own}/memory.stat": (
            f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 4}\n"
        ),
        "sys/fs/cgroup/unified/cgroup.procs": "1\n",
    }
    both = V1 + mount("cgroup2", "/sys/fs/cgroup/unified")
    found = group_memory(tree(tmp_path, groups, both, files))
    assert found == MemoryLimit(2 * GIB, GIB)


def test_a_container_that_sees_its_own_group_mounted_as_the_root_has_its_limit(
    tmp_path: Path,
) -> None:
    """Without a namespace the path is the host's, and the mount shows what lies below it."""
    mounts = mount("cgroup", "/sys/fs/cgroup/memory", "/docker/4f", "rw,memory")
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
    }
    found = group_memory(tree(tmp_path, "4:memory:/docker/4f\n", mounts, files))
    assert found == MemoryLimit(GIB, GIB - GIB // 4)


def test_a_group_outside_of_what_is_mounted_takes_the_limit_at_the_mount(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
        "sys/fs/memory.max": "1\n",  # what a path with ".." must not reach
    }
    found = group_memory(tree(tmp_path, "0::/../other\n", V2, files))
    assert found == MemoryLimit(GIB, GIB)


def test_this_process_never_gets_more_than_the_machine_has() -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= installed_memory() <= installed


def test_no_quota_leaves_all_cpus(tmp_path: Path) -> None:
    assert group_cpus(tmp_path) is None
    files = {"sys/fs/cgroup/app/cpu.max": "max 100000\n"}
    assert group_cpus(tree(tmp_path / "2", "0::/app\n", V2, files)) is None
    files = {
        "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000\n",
    }
    assert group_cpus(tree(tmp_path / "1", "1:cpu,cpuacct:/app\n", V1, files)) is None


def test_the_tightest_quota_of_the_groups_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/shop/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/shop/web/cpu.max": "400000 50000\n",
    }
    assert group_cpus(tree(tmp_path, "0::/shop/web\n", V2, files)) == 2.5


def test_version_1_has_its_quota_where_the_controller_of_cpus_is_mounted(tmp_path: Path) -> None:
    """The group of memory is another one."""
    own = "sys/fs/cgroup/cpu/docker/4f"
    files = {
        f"{own}/cpu.cfs_quota_us": "350000\n",
        f"{own}/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/other/cpu.cfs_quota_us": "1\n",
    }
    groups = "4:memory:/other\n1:cpu,cpuacct:/docker/4f\n"
    assert group_cpus(tree(tmp_path, groups, V1, files)) == 3.5


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("quota", "threads"), [(None, 64), (100.0, 64), (4.0, 4), (2.9, 2), (0.5, 1)]
)
def test_an_engine_has_no_more_threads_than_its_quota_pays_for(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with 64 CPUs."""
    from sdk.kernels.system import linux

    monkeypatch.setattr(linux.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(linux, "group_cpus", lambda: quota)
    assert SYSTEM.num_cpus() == threads
    assert resolve.threads_of(EngineConfig(model="m.gguf")) == threads
    assert resolve.threads_of(EngineConfig(model="m.gguf", num_threads=9)) == 9
