"""Large matrices of GGUF files are read in pieces, with the values and errors of a whole read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.loaders.gguf_files import checkpoint as gguf_checkpoint
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError
from sdk.quant.unread import UnreadWeight
from sdk.quant.weight import concat

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*/model.gguf"))
EMBEDDING = "model.embed_tokens"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix counts as large, and a piece is one strip of rows."""
    monkeypatch.setattr(gguf_checkpoint, "_PIECE", 1)
    monkeypatch.setattr(gguf_checkpoint, "_LARGE", 0)


def answer(path: Path) -> list[int]:
    with LLM(path, max_model_len=64, num_threads=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([[5, 9, 30, 77]], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.parent.name)
def test_answers_are_those_of_whole_matrices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answer(path)
    monkeypatch.setattr(gguf_checkpoint, "_PIECE", 1)
    monkeypatch.setattr(gguf_checkpoint, "_LARGE", 0)
    assert answer(path) == whole


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0", "IQ3_S"])
def test_a_weight_has_the_same_values_read_cut_joined_and_bound(kind: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / f"gguf-{kind}" / "model.gguf")
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    gate, up = (checkpoint.weight(name) for name in names)
    if kind == "IQ3_S":  # converted to another layout as a whole
        assert not isinstance(gate, UnreadWeight)
        return
    assert isinstance(gate, UnreadWeight)
    value = gate.dequantize()
    assert torch.equal(gate.narrow("out", 7, 20).dequantize(), value[7:27])
    assert torch.equal(gate.take_rows(1, 8, 2).dequantize(), value[1:17:2])
    half = value.shape[1] // 2
    if half % 256 == 0 or kind == "Q8_0":
        assert torch.equal(gate.narrow("in", half, half).dequantize(), value[:, half:])
    joined = concat([gate, up])
    assert isinstance(joined, UnreadWeight)
    both = torch.cat([value, up.dequantize()])
    assert torch.equal(joined.dequantize(), both)
    assert joined.spec == gate.spec
    order = torch.arange(len(both)).view(-1, 8, 2).transpose(1, 2).flatten()  # 16 rows at a time
    moved = joined.reordered(order)
    assert isinstance(moved, UnreadWeight)
    assert torch.equal(moved.dequantize(), both[order])
    assert torch.equal(moved.narrow("out", 30, 9).dequantize(), both[order][30:39])
    ops = Ops("cpu", num_threads=2)
    try:
        joined.bind(ops)
        checkpoint.close()
        assert torch.equal(joined.dequantize(), both)
    finally:
        ops.close()


@pytest.mark.usefixtures("small_pieces")
def test_an_error_names_the_row_of_the_matrix(tmp_path: Path) -> None:
    """The scale of the last row is made infinite."""
    raw = bytearray((GOLDEN / "gguf-Q8_0" / "model.gguf").read_bytes())
    checkpoint = open_checkpoint(GOLDEN / "gguf-Q8_0" / "model.gguf")
    tensor = checkpoint._file.tensors["token_embd.weight"]  # type: ignore[attr-defined]
    rows = tensor.shape[0]
    width = tensor.nbytes // rows
    at = tensor.start + (rows - 1) * width
    raw = raw[:at] + struct.pack("<H", 0x7C00) + raw[at + 2 :]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"a scale in row {rows - 1} is inf"):
        LLM(path, max_model_len=64)


@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_shrinks_between_two_pieces_is_an_error(
    tmp_path: Path, save: Callable[..., Path]
) -> None:
    path = save((GOLDEN / "gguf-Q8_0" / "model.gguf").read_bytes())
    weight = open_checkpoint(path).weight(EMBEDDING)
    assert isinstance(weight, UnreadWeight)
    pieces = weight.pieces.pieces()
    next(pieces)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="truncated while it was read"):
        list(pieces)


def test_matrices_of_different_types_are_not_read_to_find_that_out(
    small_pieces: None, golden: Path
) -> None:
    """Q4_K_M has v in more bits than q and k in half of its layers."""
    checkpoint = open_checkpoint(golden / "gguf-Q4_K_M" / "model.gguf")
    read: list[str] = []
    data = checkpoint._file.data
    checkpoint._file.data = lambda name, *given, **more: (
        read.append(name),
        data(name, *given, **more),
    )[1]
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkv"]
    weights = [checkpoint.weight(name) for name in names]
    kinds = {str(one.spec) for one in weights}
    assert len(kinds) > 1
    joined = [concat(weights[:3]), concat(weights[3:])]
    assert not read
    assert [one.shape[0] for one in joined] == [
        sum(w.shape[0] for w in weights[i : i + 3]) for i in (0, 3)
    ]
    checkpoint.close()
