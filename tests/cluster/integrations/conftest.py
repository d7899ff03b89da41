"""A real Ray in this process: one node, to which tests add others.

A cluster belongs to one module of tests: its processes are children of this one, and tests of
other areas check that there are none. Two workers of pytest-xdist have one each: every cluster has
ports and a folder (in /tmp/ray) of its own.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from sdk.testing import tiny_model

#: The smallest that Ray accepts is 75 MiB.
OBJECT_STORE = 80 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with two CPUs, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")  # which are sent over the network
        yield from _cluster()


def _cluster() -> Iterator[Cluster]:
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE,
        },
    )
    folder = made.head_node.get_session_dir_path()
    try:
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def free_port() -> int:
    """For Serve."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be split over two ranks."""
    return tiny_model(tmp_path_factory.mktemp("model"), "q4_0")
