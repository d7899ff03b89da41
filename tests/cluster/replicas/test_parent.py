"""The parent of the replicas, in this process."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest
import torch

from sdk.api.config import EngineConfig
from sdk.cluster.replicas.messages import Load
from sdk.cluster.replicas.parent import _Parent
from sdk.cluster.wire.local import Channel


def test_replicas_know_how_many_engines_compute_on_their_machine(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process
    monkeypatch.setattr(gc, "freeze", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = _Parent(Channel(ours), theirs)
        config = EngineConfig(model=str(tiny_path), max_model_len=64, tensor_parallel_size=2)
        parent._load(Load(config, num_threads=1, num_replicas=3))
        assert parent._facts is not None
        assert parent._facts.runner_config.engines_here == 3
