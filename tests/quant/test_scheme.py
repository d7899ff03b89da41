"""The names of schemes, and which type each tensor of a mixture gets."""

from __future__ import annotations

import pytest

from sdk.quant.errors import QuantizationError
from sdk.quant.methods.gguf_mixtures import FILE_TYPES, tensor_type
from sdk.quant.scheme import Scheme


@pytest.mark.parametrize(
    ("text", "method", "container", "spec", "data"),
    [
        ("gptq", "gptq", "gptq", "w4a16g128", True),
        ("gptq-w3g64s", "gptq", "gptq", "w3a16g64s", True),
        ("gptq-w4g32-act", "gptq", "gptq", "w4a16g32", True),
        ("AWQ", "awq", "awq", "w4a16g128", True),
        ("int4", "hqq", "hqq", "w4a16g64", False),
        ("gptq-w4g64-h6", "gptq", "compressed-tensors", "w4a16g64", True),
        ("gptq-w4g64-mix-h5", "gptq", "compressed-tensors", "w4a16g64", True),
        ("int8", "rtn", "compressed-tensors", "w8a16s", False),
        ("rtn-w4g64", "rtn", "compressed-tensors", "w4a16g64", False),
        ("rtn-w8a8s", "rtn", "compressed-tensors", "w8a8s", False),
        ("w8a8", "smoothquant", "compressed-tensors", "w8a8s", True),
        ("fp8", "fp8", "compressed-tensors", "fp8", False),
        ("fp8-block", "fp8", "compressed-tensors", "fp8", False),
        ("q4_k_m", "gguf", "gguf", "q4_k", False),
        ("q8_0", "gguf", "gguf", "q8_0", False),
        ("gptq-q4_k_m", "gptq", "gguf", "q4_k", True),
        ("gptq-iq4_nl", "gptq", "gguf", "iq4_nl", True),
    ],
)
def test_a_name_says_method_container_and_numerics(
    text: str, method: str, container: str, spec: str, data: bool
) -> None:
    scheme = Scheme.parse(text)
    assert (scheme.method, scheme.container, str(scheme.spec)) == (method, container, spec)
    assert scheme.needs_data == data
    assert scheme.sorted_columns == text.endswith("-act")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q4_k_n", "did you mean 'q4_k_"),
        ("", "expected one of"),
        ("gptq-w9g128", "expected one of"),
        ("gptq-w4g0", "expected one of"),
        ("gptq-q8_0", "expected one of"),
        ("gptq-gptq-q4_0", "expected one of"),
        ("x" * 500, "expected one of"),
        ("awq-w3g128", "4 bits with zero points"),
        ("gptq-w5g128", "2, 3, 4 or 8 bits"),
        ("rtn-w4a8", "8-bit weights with one scale per output channel"),
        ("awq-w4g128-act", "-act needs gptq"),
        ("awq-w4g128-h6", "cannot hold a quantized embedding"),
        ("gptq-w4g128-act-h6", "-act needs a gptq file"),
        ("gptq-w4g128-act-mix", "-act needs a gptq file"),
        ("rtn-w4g64-mix", "adds one bit and needs gptq"),
    ],
)
def test_an_unknown_or_impossible_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(QuantizationError, match=message) as caught:
        Scheme.parse(text)
    assert len(str(caught.value)) < 700


def test_a_matrix_that_does_not_divide_into_groups_is_refused_with_what_would_fit() -> None:
    with pytest.raises(QuantizationError, match=r"up_proj: 576 columns .* groups of 64"):
        Scheme.parse("gptq-w4g128").check("up_proj", 576)
    with pytest.raises(QuantizationError, match=r"use groups of 32, gptq-w4g32$"):
        Scheme.parse("gptq-w4g128").check("up_proj", 576, {576, 96})
    with pytest.raises(QuantizationError, match="use a scheme without groups, such as fp8"):
        Scheme.parse("gptq-w4g128").check("up_proj", 100)
    Scheme.parse("gptq-w4g64").check("up_proj", 576)
    Scheme.parse("q4_k_m").check("up_proj", 576)


def test_a_mixture_gives_more_bits_to_values_and_mlp_outputs_of_some_layers() -> None:
    types = [tensor_type("q4_k_m", "attn_v", i, 16, 2048) for i in range(16)]
    more = {0, 1, 4, 7, 10, 13, 14, 15}
    assert types == ["q6_k" if i in more else "q4_k" for i in range(16)]
    assert tensor_type("q4_k_m", "attn_q", 0, 16, 2048) == "q4_k"
    assert tensor_type("q4_k_m", "output", 0, 1, 2048) == "q6_k"
    assert tensor_type("q2_k", "attn_v", 5, 16, 2048, grouped=4) == "q4_k"
    assert tensor_type("q3_k_m", "ffn_down", 0, 32, 2048) == "q5_k"


@pytest.mark.parametrize(
    ("base", "short"), [("q2_k", "q4_0"), ("q4_k_s", "q5_0"), ("q6_k", "q8_0")]
)
def test_rows_that_are_no_whole_blocks_of_256_get_a_smaller_block(base: str, short: str) -> None:
    assert tensor_type(base, "attn_q", 9, 16, 576) == short
    assert tensor_type(base, "attn_q", 9, 16, 100) == "f16"


def test_every_mixture_names_known_blocks() -> None:
    for mixture in FILE_TYPES:
        for part in ("attn_q", "attn_v", "attn_output", "ffn_down", "output", "token_embd"):
            assert tensor_type(mixture, part, 0, 8, 1024)
