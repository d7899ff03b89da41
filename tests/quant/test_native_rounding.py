"""Native rounding gives the bits of the reference in torch, at every level of this CPU."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdk import LLM
from sdk.kernels.cpu import weight_rounding
from sdk.kernels.cpu.library import levels
from sdk.kernels.cpu.weight_rounding import RowRounder, pieces_of
from sdk.kernels.system.blocks import MemoryBlocks
from sdk.kernels.weights.layouts import Dense, Layout, Pieces
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import quantized_online
from sdk.quant import quantize
from sdk.quant.errors import QuantizationError
from sdk.quant.methods import hqq
from sdk.quant.methods.native import rounded
from sdk.quant.quantize import by_reference, quantize_pieces, quantize_rows
from sdk.quant.scheme import Scheme
from sdk.quant.weight import weight_of
from tests.models.conftest import tiny

SCHEMES = (
    *("int8", "int4", "fp8", "fp8-tensor", "fp8-block", "mxfp4", "nvfp4"),
    *(f"rtn-w{bits}g64" for bits in range(2, 9)),
    *("rtn-w4", "rtn-w4s", "rtn-w8a8", "rtn-w3g128s", "rtn-w5g16", "rtn-w6g48s"),
    *("hqq-w2g16", "hqq-w3g64", "hqq-w4g128", "hqq-w8g48"),
)
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def matrix(rows: int = 150, columns: int = 768, seed: int = 0) -> Tensor:
    """Normal rows, and rows that are zero, of one sign, tiny, large, constant or all ties."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    for row, change in enumerate(
        (
            lambda r: r.zero_(),
            lambda r: r.abs_(),
            lambda r: r.abs_().neg_(),
            lambda r: r.mul_(1e-6),
            lambda r: r.mul_(2000),
            lambda r: r.fill_(0.125),
            lambda r: r.copy_(torch.arange(columns) / 2 - columns / 4),
            lambda r: r[:100].zero_(),
            lambda r: r[-1].mul_(300),
        )
    ):
        if row < rows:
            change(x[row])
    return x


def tensors_of(layout: Layout) -> dict[str, Tensor]:
    names = ("values", "codes", "scale", "zeros", "minus", "super_scale", "table")
    found = {name: getattr(layout, name, None) for name in names}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def same(found: Layout | None, expected: Layout) -> None:
    """Every bit, the type and shape of every tensor, and all other facts."""
    assert found is not None and type(found) is type(expected)
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name
    facts = dict.fromkeys(ours)
    plain = replace(found, **facts) if "codes" in ours else None  # type: ignore[arg-type]
    if plain is not None:
        assert plain == replace(expected, **facts)  # type: ignore[arg-type]
    else:
        assert found.block == expected.block  # type: ignore[union-attr]


def in_pieces(x: Tensor, rows: int) -> Pieces:
    return replace(pieces_of(x), step=rows)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", SCHEMES)
def test_all_schemes_have_the_bits_of_the_reference(name: str, level: str) -> None:
    scheme = Scheme.parse(name)
    for kind in TYPES:
        x = matrix().to(kind)
        found = quantize_pieces("w", in_pieces(x, 32), scheme, RowRounder(3, level))
        same(found, by_reference("w", x.float(), scheme))
        assert rounded(in_pieces(x, 32), scheme, RowRounder(1, level)) is not None


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("columns", [1, 5, 17, 100, 513, 1030])
@pytest.mark.parametrize("name", ["rtn-w8s", "rtn-w4", "rtn-w3", "fp8", "fp8-tensor", "fp8-block"])
def test_rows_of_any_length(name: str, columns: int, level: str) -> None:
    scheme = Scheme.parse(name)
    for kind in TYPES:
        x = matrix(37, columns, seed=columns)[:, :columns].to(kind)
        expected = by_reference("w", x.float(), scheme)
        if scheme.method == "rtn":
            expected = replace(expected, inputs=None)  # type: ignore[type-var]
        same(rounded(in_pieces(x, 8), scheme, RowRounder(2, level)), expected)


@pytest.mark.parametrize("level", levels())
def test_a_head_whose_rows_are_no_whole_groups(level: str) -> None:
    """Heads are rounded in groups of 64 columns, whatever their width."""
    spec = Scheme.parse("hqq-w4-h4").head
    assert spec is not None
    weight = weight_of(Dense(matrix(70, 200).to(torch.bfloat16)))
    found = quantize_rows("lm_head", weight, spec, rounder=RowRounder(2, level))
    values = weight.dequantize()
    same(found, quantize.round_to_nearest(values, spec))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["int8", "int4", "fp8", "fp8-tensor", "fp8-block", "mxfp4", "nvfp4"]
)
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, bad: float) -> None:
    scheme = Scheme.parse(name)
    for row, column in ((0, 0), (149, 767), (70, 333)):
        x = matrix()
        x[row, column] = bad
        x[3, 3] = bad
        with pytest.raises(QuantizationError, match=r"^w: expected finite numbers, found 2 that"):
            quantize_pieces("w", in_pieces(x, 32), scheme, RowRounder(2))
    head = Scheme.parse("int8").head
    assert head is not None
    with pytest.raises(QuantizationError, match="lm_head: expected finite"):
        quantize_rows("lm_head", weight_of(Dense(x)), head)


@pytest.mark.parametrize("name", ["int8", "int4", "rtn-w4g64"])
@pytest.mark.parametrize("factor", [1e-9, 3e10])
def test_scales_that_float16_does_not_hold_are_left_to_the_reference(
    name: str, factor: float
) -> None:
    x, scheme = matrix()[9:] * 0.01 * factor, Scheme.parse(name)
    assert rounded(pieces_of(x), scheme, RowRounder()) is None
    found = quantize_pieces("w", pieces_of(x), scheme, RowRounder())
    assert found.scale.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["rtn-w4g24", "hqq-w4g384", "hqq-w4g24"])
def test_groups_that_kernels_do_not_take_are_left_to_the_reference(name: str) -> None:
    x, scheme = matrix(), Scheme.parse(name)
    assert rounded(pieces_of(x), scheme, RowRounder()) is None
    same(quantize_pieces("w", pieces_of(x), scheme, RowRounder()), by_reference("w", x, scheme))


@pytest.mark.parametrize("name", ["hqq-w4g64", "mxfp4", "nvfp4"])
def test_rows_that_are_no_whole_groups_are_not_rounded_here(name: str) -> None:
    assert rounded(pieces_of(matrix(8, 200)), Scheme.parse(name), RowRounder()) is None


def test_the_constants_of_hqq_are_those_of_the_kernels() -> None:
    text = (Path(weight_rounding.__file__).parent / "native" / "abi_rounding.hpp").read_text()
    numbers = text[text.index("kHqqInverse[kHqqRounds]") :]
    numbers = numbers[numbers.index("{") + 1 : numbers.index("}")]
    theirs = torch.tensor([float(word.strip().rstrip("f")) for word in numbers.split(",")])
    assert torch.equal(theirs, torch.tensor(hqq._INVERSE_BETAS))
    assert f"kMostHqqGroup = {weight_rounding.MOST_HQQ_GROUP}" in text


def test_the_power_of_hqq_is_within_four_percent() -> None:
    x = torch.logspace(-8, 2, 20001)
    ratio = hqq.power(x) / x.double().pow(-0.3)
    assert 0.96 < float(ratio.min()) < 0.97 and 1.03 < float(ratio.max()) < 1.04
    assert not float(torch.zeros(1) * hqq.power(torch.zeros(1)))


@pytest.mark.parametrize("error", [OSError("gone"), KeyboardInterrupt()])
def test_an_error_while_rows_are_read_ends_all_threads(error: BaseException) -> None:
    x = matrix(512, 64)
    read: list[int] = []

    def failing(start: int, count: int) -> Layout:
        read.append(start)
        if start == 96:
            raise error
        return Dense(x[start : start + count])

    before = threading.active_count()
    with pytest.raises(type(error)):
        quantize_pieces("w", Pieces((512, 64), failing, 32), Scheme.parse("int8"), RowRounder(3))
    assert threading.active_count() == before
    assert len(read) <= 3 + 3  # no thread began another part after it


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "mxfp4"])
def test_a_folder_is_quantized_in_pieces_as_a_whole(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of folders are read in pieces if they are large; answers are those of the
    reference."""
    model = tiny("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "quantization": scheme}

    def answer(threads: int) -> list[int]:
        with LLM(tmp_path, num_threads=threads, **options) as llm:  # type: ignore[arg-type]
            done = llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
            return list(done[0].outputs[0].token_ids)

    monkeypatch.setattr("sdk.loaders.folders.safetensors_reader._PIECE", 1 << 12)
    found = [answer(1), answer(2)]
    monkeypatch.setattr(RowRounder, "reject", lambda *_: "not here")
    monkeypatch.setattr("sdk.loaders.folders.safetensors_reader._PIECE", 1 << 30)
    assert found == [answer(1)] * 2


def test_the_memory_of_codes_is_used_again(tmp_path: Path) -> None:
    tiny("llama", hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    checkpoint = quantized_online(open_checkpoint(tmp_path), "int8")

    def address() -> int:
        weight = checkpoint.weight("model.layers.0.mlp.up_proj")
        return weight.layout.codes.data_ptr()  # type: ignore[attr-defined, no-any-return]

    assert address() == address()
    kept = checkpoint.weight("model.layers.0.mlp.up_proj")
    before = kept.dequantize()
    assert address() != kept.layout.codes.data_ptr()  # type: ignore[attr-defined]
    checkpoint.close()
    assert torch.equal(kept.dequantize(), before)


def test_no_memory_for_codes_is_left_behind_by_a_load(tmp_path: Path) -> None:
    tiny("llama", hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)

    def kept() -> int:
        blocks = [one for one in gc.get_objects() if type(one) is MemoryBlocks]
        return sum(len(block) for one in blocks for block, *_ in one._blocks)

    gc.collect()
    before = kept()
    with LLM(tmp_path, quantization="int8", skip_tokenizer_init=True, num_threads=2):
        assert kept() <= before
