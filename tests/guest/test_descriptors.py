"""Too few descriptors: an error, nothing left behind, and the next attempt works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_python

CODE = """
import os, resource, sys
from pathlib import Path
import sdk.cluster.executors.process
from sdk import LLM, SdkError

model, work = sys.argv[1], Path(os.environ["TMPDIR"])

def start(ranks):
    with LLM(model, max_model_len=64, tensor_parallel_size=ranks) as llm:
        return len(llm.generate("hello")[0].outputs)

start(1)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
for spare in (1, 3, 5, 8, 12, 20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, most))
    try:
        start(2)
    except SdkError as error:
        print(type(error).__name__, error)
    assert not list(work.iterdir()), (spare, list(work.iterdir()))
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(start(1), max(int(name) for name in os.listdir("/proc/self/fd")) < used)
"""


@pytest.mark.slow
def test_without_descriptors_a_start_fails_and_leaves_nothing(golden: Path, tmp_path: Path) -> None:
    setup = f"import os; os.environ['TMPDIR'] = {str(tmp_path)!r}"
    lines = run_python(setup + CODE, golden / "gguf-Q8_0" / "model.gguf").splitlines()
    assert lines[-1] == "1 True"
    assert any("Too many open files" in line for line in lines[:-1]), lines
