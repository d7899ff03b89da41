"""What must be the same on every host, because the ranks compute one model together."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sdk.cluster.executors.remote.engine_codec import PROTOCOL
from sdk.engine.model_key import files_key
from sdk.kernels.cpu import simd_level
from sdk.kernels.cpu.library import ABI_VERSION, find_library
from sdk.kernels.system import SYSTEM

Facts = dict[str, str]


def facts_of(model: str) -> Facts:
    """What this host has: names and values as texts. ``model``: its files; may be empty.

    The SIMD level counts because ranks compute norms and routers themselves, each for all rows, so
    ranks of different levels could choose different experts. ``portable`` and ``avx2`` were
    measured to differ; AVX-512 was not measured, and is taken to.
    """
    native = "none" if isinstance(find_library(), str) else f"interface {ABI_VERSION}"
    facts = {
        # sdk imports all of us for type checkers, so importing its name would close a circle
        "embedlm": sys.modules["sdk"].__version__,
        "protocol": PROTOCOL,
        "machine": f"{SYSTEM.machine()}, {sys.byteorder} endian",
        "native module": native,
        "SIMD level": simd_level() or "none",
    }
    if model:
        facts["model files"] = files_key(Path(model))
    return facts


def host_name() -> str:
    """This host, for messages."""
    return socket.gethostname()


def difference(hosts: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """How hosts, by name, differ from the first one; None if they do not."""
    first_name, first = hosts[0]
    found = []
    for name, facts in hosts[1:]:
        for key in sorted({*first, *facts}):
            here, there = first.get(key, "unknown"), facts.get(key, "unknown")
            if here != there:
                found.append(f"{key}: {there} on {name}, but {here} on {first_name}")
    return "; ".join(found) or None
