"""Loading prints nothing: neither we nor the libraries we call."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.loaders.quiet import transformers_to_our_log

LOAD = """
import sys
from sdk import LLM
for model in sys.argv[1:]:
    with LLM(model, max_model_len=64, num_threads=1) as llm:
        pass
"""


@pytest.mark.slow
def test_loading_any_golden_checkpoint_prints_nothing(golden: Path) -> None:
    models = []
    for folder in sorted(path for path in golden.iterdir() if path.is_dir()):
        inner = [folder, folder / "hf"]
        models += [str(path) for path in inner if (path / "config.json").is_file()]
        models += [str(path) for path in folder.glob("*.gguf")]
    assert len(models) > 30
    child = subprocess.run(
        [sys.executable, "-c", LOAD, *models], capture_output=True, text=True, timeout=1100
    )
    assert (child.stdout, child.stderr, child.returncode) == ("", "", 0)


def test_what_transformers_logs_meanwhile_reaches_our_logger_and_its_own_setting_returns(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = logging.getLogger("transformers")
    handler = logging.StreamHandler(sys.stderr)
    others = [logging.NullHandler() for _ in range(2)]  # each filters the same record
    for one in (handler, *others):
        theirs.addHandler(one)
    logging.getLogger("sdk").addHandler(handler)  # as a host may: one handler for all loggers
    try:
        before = [list(one.filters) for one in theirs.handlers]
        with caplog.at_level(logging.INFO, "sdk"), transformers_to_our_log():
            logging.getLogger("transformers.somewhere").warning("about a config")
        assert [list(one.filters) for one in theirs.handlers] == before
        assert "transformers: about a config" in caplog.text
        assert capsys.readouterr().err == "transformers: about a config\n"  # of the logger sdk
        logging.getLogger("transformers.somewhere").warning("of the host's own")
        assert capsys.readouterr().err == "of the host's own\n"
    finally:
        for one in (handler, *others):
            theirs.removeHandler(one)
        logging.getLogger("sdk").removeHandler(handler)
