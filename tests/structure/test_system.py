"""One module knows which operating system this is: kernels/system."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "quant", "loaders", "models", "sdk")
OWN = "kernels/system/"

#: Modules and names that not every system has, and those that ask which one it is.
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "msvcrt", "winreg", "_winapi"}
NAMES = {
    "sys": {"platform", "getwindowsversion"},
    "platform": {"system", "uname", "win32_ver", "mac_ver", "machine", "node", "platform"},
    "os": {
        *("name", "uname", "sched_getaffinity", "sched_setaffinity", "cpu_count", "sysconf"),
        *("pread", "preadv", "pwrite", "pwritev", "posix_fallocate", "posix_fadvise", "fdatasync"),
        *("statvfs", "fstatvfs", "getuid", "geteuid", "fchmod", "fchown", "chown", "memfd_create"),
        *("fork", "forkpty", "getpriority", "setpriority", "nice", "O_CLOEXEC", "O_NOFOLLOW"),
        *("O_DIRECT", "O_BINARY", "O_NONBLOCK", "O_DIRECTORY", "kill", "killpg", "waitpid"),
        *("eventfd", "eventfd_read", "eventfd_write", "mkfifo", "major", "minor", "getloadavg"),
    },
    "mmap": {"PROT_READ", "PROT_WRITE", "MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON", "MAP_SHARED"},
    "socket": {"AF_UNIX", "SO_PEERCRED"},
    "signal": {
        *("signal", "pthread_sigmask", "SIGKILL", "SIG_IGN", "SIG_DFL", "setitimer", "SIGALRM"),
    },
}
FILES = ("/proc", "/sys/", "/dev/shm")

#: Whose work is processes, which they start on systems that can (``Services.can_fork``), and the
#: benchmarks, which start other engines on Linux: file -> what it may use.
EXEMPT = {
    "kernels/gpu_driver.py": {"/proc"},  # looks for files, which other systems lack
    "sdk/cluster/replicas/lockstep.py": {"os.eventfd", "os.eventfd_read", "os.eventfd_write"},
    "sdk/cluster/replicas/replica.py": {"os.eventfd", "os.eventfd_read", "os.eventfd_write"},
    "sdk/cluster/replicas/parent.py": {"os.fork", "os.kill", "os.waitpid", "signal.SIGKILL"},
    "sdk/cluster/transfer/shared_memory.py": {"socket.AF_UNIX"},
    "sdk/testing/faults.py": {"os.kill", "signal.SIGKILL"},
    "sdk/bench/engines.py": {"os.killpg", "signal.SIGKILL"},
    "sdk/bench/gpu/process.py": {"os.killpg", "signal.SIGKILL"},
    "sdk/bench/serve/results.py": {"os.getloadavg"},
    "sdk/bench/serve/servers.py": {"os.killpg", "signal.SIGKILL"},
    "sdk/bench/serve/supervise.py": {"os.killpg", "signal.SIGKILL"},
}


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that only some systems have."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module in MODULES:
                yield node.lineno, f"import {module}"
            for alias in node.names:
                if alias.name in NAMES.get(node.module or "", ()):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NAMES.get(node.value.id, ()):
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
            and node.value.startswith(FILES)
        ):
            yield node.lineno, node.value


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(OWN):
                yield path


def test_nothing_else_asks_the_operating_system_what_it_is() -> None:
    found, used = [], {name: set[str]() for name in EXEMPT}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for line, what in uses(ast.parse(path.read_text(encoding="utf-8"))):
            if what in EXEMPT.get(name, ()):
                used[name].add(what)
            else:
                found.append(f"{name}:{line}: {what}")
    assert found == []
    assert used == EXEMPT, "an exemption that nothing needs any more"


@pytest.mark.parametrize(
    "code",
    [
        "import fcntl",
        "def f():\n    from resource import getrlimit",
        "import sys\nif sys.platform == 'linux': pass",
        "from sys import platform",
        "import os\nos.preadv(3, [], 0)",
        "open('/proc/self/maps')",
        "from pathlib import Path\nPath('/sys/fs/cgroup')",
    ],
)
def test_the_check_notices(code: str) -> None:
    assert list(uses(ast.parse(code)))


def test_the_check_does_not_mind_docstrings_and_other_names() -> None:
    code = '"""/proc has it."""\nimport os\nos.path.join("a")\nos.replace("a", "b")'
    assert list(uses(ast.parse(code))) == []
