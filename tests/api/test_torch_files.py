"""Files of ``torch.save`` with a head that drafts: only plain tensors are read from them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, CheckpointError
from tests.drafting_heads import HIDDEN, MEDUSA_CONFIG, TinyHeads


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def hostile(kind: str, path: Path) -> None:
    """Write a file that must not be opened."""
    tensors = {"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}
    if kind == "code":
        torch.save(tensors | {"x": Harmful()}, path)
    elif kind == "a list":
        torch.save(list(tensors.values()), path)
    elif kind == "old":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif kind == "strided":
        torch.save({"0.0.linear.weight": torch.zeros(1).expand(HIDDEN, HIDDEN)}, path)
    elif kind == "compressed":
        torch.save(tensors, path)
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
    else:
        torch.save(tensors, path)
        path.write_bytes(path.read_bytes()[:-3000])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("code", "expected only tensors, found other objects"),
        ("a list", "expected a dict of tensors, found list"),
        ("old", "expected a file of torch.save .PyTorch 1.6 or newer"),
        ("strided", "expected a contiguous tensor"),
        ("compressed", "is compressed; torch.save does not compress"),
        ("cut", "expected a file of torch.save"),
    ],
)
def test_hostile_files_of_torch_are_refused(
    tiny_heads: TinyHeads,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    message: str,
) -> None:
    hostile(kind, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA_CONFIG))
    with pytest.raises(CheckpointError, match=f"^speculative_config: model: .*{message}"):
        LLM.plan(tiny_heads.target, speculative_config={"model": tmp_path})
    assert "run" not in capsys.readouterr().out
