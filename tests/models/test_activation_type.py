"""The type of activations between kernels, by what the file says and the card has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdk.models.configs.activation_type import activation_type

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LLAMA: dict[str, Any] = {"model_type": "llama"}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("config", "matrix", "wanted"),
    [
        (LLAMA, BF16, BF16),
        (LLAMA | {"dtype": "float32"}, BF16, BF16),
        (LLAMA | {"torch_dtype": "bfloat16"}, BF16, BF16),
        (LLAMA | {"torch_dtype": "torch.float16"}, BF16, FP16),
        (LLAMA | {"dtype": "float16", "torch_dtype": "bfloat16"}, BF16, FP16),
        ({"model_type": "gemma3", "dtype": "bfloat16", "text_config": GEMMA}, BF16, BF16),
        ({"model_type": "qwen3", "text_config": LLAMA | {"dtype": "float16"}}, BF16, FP16),
        (LLAMA | {"dtype": None}, BF16, BF16),
    ],
)
def test_a_file_that_says_float16_gets_it_and_any_other_what_the_card_has(
    config: dict[str, Any], matrix: torch.dtype, wanted: torch.dtype
) -> None:
    assert activation_type(config, matrix) == wanted


def test_float16_matrices_of_a_file_that_says_nothing_are_multiplied_as_they_are() -> None:
    assert activation_type(LLAMA, BF16, stored="float16") == FP16
    assert activation_type(LLAMA | {"dtype": "bfloat16"}, BF16, stored="float16") == BF16
    assert activation_type(GEMMA, BF16, stored="float16") == BF16
    assert activation_type(LLAMA, FP32, stored="float16") == FP32
    assert activation_type(LLAMA, BF16, stored="float16", exact=True) == FP32


def test_a_card_without_bfloat16_computes_in_float16() -> None:
    assert activation_type(LLAMA | {"dtype": "bfloat16"}, FP16) == FP16


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma3_text"])
def test_gemma_never_gets_float16(name: str) -> None:
    said = {"model_type": name, "dtype": "float16"}
    assert activation_type(said, BF16) == BF16
    assert activation_type(said, FP16) == FP32


@pytest.mark.parametrize("matrix", [BF16, FP16])
def test_exact_arithmetic_and_transformers_own_code_stay_float32(matrix: torch.dtype) -> None:
    assert activation_type(LLAMA, matrix, exact=True) == FP32
    assert activation_type({"model_type": "persimmon"}, matrix) == FP32


def test_a_device_without_matrix_units_stays_float32() -> None:
    assert activation_type(LLAMA | {"dtype": "float16"}, FP32) == FP32


def test_a_type_that_is_asked_for_comes_before_what_the_file_says() -> None:
    assert activation_type(LLAMA | {"dtype": "bfloat16"}, BF16, asked="float16") == FP16
    assert activation_type(LLAMA | {"dtype": "float16"}, BF16, asked="bfloat16") == BF16
    assert activation_type(LLAMA, BF16, stored="float16", asked="bfloat16") == BF16


def test_a_type_that_cannot_be_had_becomes_one_that_is_more_precise() -> None:
    assert activation_type(LLAMA, FP16, asked="bfloat16") == FP32
    assert activation_type(GEMMA, BF16, asked="float16") == BF16
    assert activation_type(GEMMA, FP16, asked="float16") == FP32
    assert activation_type(LLAMA, BF16, exact=True, asked="float16") == FP32
