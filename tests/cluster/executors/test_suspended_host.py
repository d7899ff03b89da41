"""A host that is suspended with its ranks and continued (Ctrl-Z and ``fg``) goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdk.cluster.executors.children import _STOPPED_S

ROOT = Path(__file__).parents[3]
HOST = """
import sys
from sdk import LLM, SamplingParams

params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
with LLM(sys.argv[1], max_model_len=128, **{sys.argv[2]: 2}) as llm:
    for _ in range(10**6):
        [output] = llm.generate([[5, 9]], params, use_tqdm=False)
        print(output.outputs[0].token_ids, flush=True)
"""
OPTIONS = ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"]


@pytest.mark.slow  # it is suspended for longer than a stopped rank would be waited for
@pytest.mark.parametrize("option", OPTIONS)
def test_a_suspended_host_keeps_its_ranks_and_answers(golden: Path, option: str) -> None:
    """Most of its time is spent in steps, so it is suspended in the middle of one."""
    model = golden / "gguf-Q8_0" / "model.gguf"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(model), option],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert host.stdout is not None
        first = host.stdout.readline()
        assert first.startswith("["), first + host.stdout.read()
        for _ in range(2):
            os.killpg(host.pid, signal.SIGSTOP)
            time.sleep(_STOPPED_S + 1)
            os.killpg(host.pid, signal.SIGCONT)
            for _ in range(3):
                line = host.stdout.readline()
                assert line == first, line + host.stdout.read()
    finally:
        os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        host.stdout.close()
