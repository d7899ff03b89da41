"""Large matrices of folders are read in pieces: the same values, and entries that say which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdk.loaders.folders import safetensors_reader
from sdk.loaders.folders.hf_folder import HfFolder
from sdk.quant.unread import UnreadWeight
from tests.models.conftest import tiny
from tests.models.tiny_architectures import ARCHITECTURES

#: Rows of queries, keys and values, of gate and up, and columns in other orders than ours.
MOVED = ("falcon-grouped", "gpt_neox", "bloom", "gpt2", "qwen3_next")


@pytest.mark.parametrize("case", ["llama", *MOVED])
def test_a_matrix_in_pieces_is_the_matrix(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(case.split("-")[0], **ARCHITECTURES[case]).save_pretrained(tmp_path)
    whole = HfFolder(tmp_path)
    matrices = [one.name for one in whole.entries() if len(one.shape) == 2]
    wanted = {name: whole.weight(name.removesuffix(".weight")).dequantize() for name in matrices}
    monkeypatch.setattr(safetensors_reader, "_PIECE", 1 << 8)
    pieces = HfFolder(tmp_path)
    planned = {one.name for one in pieces.entries() if one.read is not None}
    read = set()
    for name in matrices:
        found = pieces.weight(name.removesuffix(".weight"))
        assert torch.equal(found.dequantize(), wanted[name]), name
        if isinstance(found, UnreadWeight):
            read.add(name)
    assert read == planned
    assert any(name.endswith("embed_tokens.weight") for name in read)
    assert not any(name.endswith("qkv_proj.weight") for name in read)
    whole.close()
    pieces.close()
