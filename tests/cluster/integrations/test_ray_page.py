"""The examples of docs/cluster/ray.md, from top to bottom, with a real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

PAGE = Path(__file__).parents[3] / "docs" / "cluster" / "ray.md"


@pytest.mark.slow
def test_the_examples_run_from_top_to_bottom(
    cluster: Cluster, smollm2: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # where the page's ray.init() connects
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 3
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start(1))  # so that errors name the page's line
            code = block[1].replace("/models/model.gguf", str(smollm2))
            code = code.replace("127.0.0.1:8000", f"127.0.0.1:{free_port}")
            if "serve.run" in code:
                serve.start(http_options={"host": "127.0.0.1", "port": free_port})
            exec(compile("\n" * line + code, str(PAGE), "exec"), names)
    finally:
        serve.shutdown()
