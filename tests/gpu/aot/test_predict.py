"""What predictions are made of: bytes, products and turns of the launches of known shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdk.bench.gpu import roofline
from tests.gpu.aot import sweep
from tests.scripts import run_python

#: Nothing is compiled: each kernel has 50 instructions, and 100 in its loop.
CODE = """
    import json, os, sys
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [".", sys.argv[1]]
    from predict import *
    from sdk.bench.gpu.weights import Weights, affine
    from sdk.kernels.gpu import attention as attention_op

    NUMBERS = {"warps": 4, "registers": 64, "shared": 0, "stack": 0, "instructions": 150,
               "loop": 100, "matrix": 8}

    class Known:
        def of(self, source):
            return NUMBERS | ({"matrix": 0} if source.name == "product_one" else {})

    def told(started):
        works = [work_of(x, Known().of(x.source)) for x in started]
        return [[w.kernel, w.programs, w.read, w.macs, w.instructions] for w in works]

    found = {}
    with predicting(DEVICES["H100 SXM"], Known()) as card:
        card.assume(USUAL)
        weights = Weights(card, lambda: affine(card, 1024, 2048, 4, 128))
        for tokens in (1, 16, 300):
            seconds = weights.seconds(tokens)
            found[tokens] = [seconds, told(card.started), [list(x) for x in card.torch]]
        for contest, tokens in ((libraries.cudnn_contest(card, "float16", 128), 1024),
                                (libraries.grouped_contest(card, 16, 2, 512, 256), 8)):
            ours, theirs = contest.calls(tokens)
            both = []
            for calls in (ours, theirs):
                card.time(calls)
                both.append([told(card.started), [list(x) for x in card.torch]])
            found[contest.library] = both
        for splits in (32, 64):
            attention_op.most_splits = lambda *shape: splits
            case = attention.make_case(card, "bfloat16", 1, 32768, 1, attention.Heads(4, 1, 256))
            attention._seconds(card, case)
            (listed, attended) = card.started
            work = work_of(attended, NUMBERS)
            found[f"splits {splits}"] = [work.programs, work.joined, work.turns]
        config = small_llama_config(card) | {"num_hidden_layers": 2}
        step = decode_step(card, card.started, config, "q4_0", prompt=300)
        found["step"] = told(step.kernels)
        found["weights"] = weight_bytes(step)
        plain = config | {"num_hidden_layers": 1}
        dense = decode_step(card, card.started, plain, "bfloat16", prompt=300)
        found["dense step"] = {}
        for kernel, _, read, *_ in told(dense.kernels):
            found["dense step"].setdefault(kernel, []).append(read)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(run_python(CODE, sweep.FOLDER).splitlines()[-1])
    return made


@pytest.mark.slow
def test_a_product_reads_its_weight_once(found: dict[str, Any]) -> None:
    codes, scales = 1024 * 2048 // 2, 1024 * 16 * 2
    seconds, ((name, programs, read, macs, instructions),), torch = found["1"]
    assert (name, torch) == ("product_one", [])
    split = 8  # 16 units of 128 columns, at least two for each program
    assert programs == 1024 // 64 * split
    shares = split * 1024 * 4  # written and read
    assert read == codes + scales + 2048 * 2 + 2 * shares + 1024 * 4
    assert macs == 0  # in float32 arithmetic
    assert instructions == 4 * (50 + 100 * 2)  # two turns of the loop
    assert seconds > 0.9e-6


@pytest.mark.slow
def test_a_product_of_few_tokens_multiplies_whole_tiles(found: dict[str, Any]) -> None:
    _, (product,), _ = found["16"]
    assert product[0] == "product"
    assert product[3] == 1024 * 2048 * 16


@pytest.mark.slow
def test_a_product_of_many_tokens_is_the_library_s(found: dict[str, Any]) -> None:
    _, (decoded,), torch = found["300"]
    assert decoded[0] == "decode_rows"
    # codes and scales, and the dequantized weight
    assert decoded[2] == 1024 * 2048 // 2 + 1024 * 16 * 2 + 1024 * 2048 * 2
    (library,) = torch  # its sums are float32
    assert library[0] == "aten.mm"
    assert library[2] == [300, 1024, 2048]


@pytest.mark.slow
def test_attention_of_a_library_has_half_of_the_pairs_and_gathers_pages(
    found: dict[str, Any],
) -> None:
    ((ours, _), (kernels, torch)) = found["cudnn_attention"]
    assert [line[0] for line in ours] == ["prefill_kernel"] and kernels == []
    (attention,) = [x for x in torch if "cudnn" in x[0]]
    assert attention[4] == 1024 * 1024 * 32 * 128  # two products of half of the pairs
    keys = 1024 * 8 * 128 * 2
    assert attention[1] == 2 * 1024 * 32 * 128 * 2 + 2 * keys
    assert [x[1] for x in torch if x[0] == "aten.index_select"] == [2 * keys] * 2


@pytest.mark.slow
def test_experts_read_the_weights_of_all_and_the_library_s_rows_are_gathered(
    found: dict[str, Any],
) -> None:
    ((ours, _), (_, torch)) = found["grouped_mm"]
    rows, weights = 8 * 16, 16 * 512 * 256 * 2
    (own,) = [line for line in ours if line[0] == "product_dense"]
    assert weights < own[2] < weights + 2 * rows * (512 + 256) * 2 + 8192
    (product,) = [x for x in torch if x[0] == "aten._grouped_mm"]
    assert product[1] == weights + rows * (512 + 256) * 2
    assert product[4] == rows * 512 * 256
    assert [x[1] for x in torch if x[0] == "aten.index_select"] == [2 * rows * 256 * 2]


@pytest.mark.slow
def test_a_step_reads_of_an_embedding_the_rows_of_its_tokens(found: dict[str, Any]) -> None:
    """Not all of it, a gigabyte in an 8B model."""
    read = found["dense step"]["gather_kernel"]
    # float32, of one token, and of its hidden state; then the candidates of the sampler
    assert read[:2] == [2 * 2048 * 4] * 2 and max(read) < 200_000


@pytest.mark.slow
def test_the_last_program_of_a_request_adds_up_its_parts(found: dict[str, Any]) -> None:
    part = 4 * 4 * (256 + 2)  # of four heads, in float32
    # one by one, of tiles of 16 rows; the maxima, four at a time, before
    assert found["splits 32"] == [32, 32 * part, 32 / 4 + 32]
    # eight at a time, of tiles of four rows; all maxima at once
    assert found["splits 64"] == [64, 64 * part, 1 + 64 / 8]


def test_all_usual_rows_of_the_bench_have_predictions() -> None:
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        known = " ".join(roofline.read_predictions(card))
        for word in (
            *("W4A16", "decode attention 64x", "prefill attention", "FP8 W8A8", "q4_k, 1 token"),
            *("256 requests", "random-1b shapes", "8B shapes W4|tokens/s", "GPU idle"),
            *("heads of 1x256", "no dependent launch", "decode step, 8B shapes W4|product_one"),
        ):
            assert word in known, (card, word)


@pytest.mark.slow
def test_a_step_reads_all_weights_and_the_pages_of_its_context(found: dict[str, Any]) -> None:
    layer = 3072 * 2048 + 2048 * 2048 + 16384 * 2048 + 2048 * 8192
    assert found["weights"] == (2 * layer + 32000 * 2048) * 18 / 32  # Q4_0: 18 bytes for 32
    attention = [line for line in found["step"] if line[0] == "decode_kernel"]
    assert len(attention) == 2
    for _, programs, read, _, _ in attention:
        tokens = read / (8 * 64 * 2 * 2)
        assert 300 < tokens < 320
        assert programs == 8 * 2  # heads, and splits of 256 keys that are not empty
