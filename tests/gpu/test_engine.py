"""A tiny model from its file to its answers through the Triton kernels, under the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_card import on_a_card

from sdk import LLM, SamplingParams
from sdk.kernels import gpu, registry
from sdk.kernels.gpu import GpuBackend, cudnn_attention, scratch
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.sized_graphs import bucket_of, buckets
from tests.gpu.cudnn_stand_in import StandIn, library
from tests.models.conftest import expected_states, prompt, tiny_encoder

__all__ = ["library"]  # a fixture

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=4, max_tokens=3)


@pytest.fixture
def path(golden: Path) -> Path:
    """A two-layer random llama of 448 tokens, grouped queries."""
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products on the CPU's own kernels: interpreted, those of a step take 6 s."""
    whole = GpuBackend.implementations

    def implementations(self: GpuBackend, op: str) -> Any:
        return () if op == "linear" else whole(self, op)

    monkeypatch.setattr(GpuBackend, "implementations", implementations)


def test_a_file_runs_on_triton_kernels_alone(path: Path) -> None:
    with load(path) as llm:
        (output,) = llm.generate([[5, 9, 30]], SamplingParams(temperature=0.0, max_tokens=1))
        text = str(llm.explain())
    assert len(output.outputs[0].token_ids) == 1
    for op in ("attention", "rope_and_cache", "rope_angles", "find_places", "select_rows"):
        assert f"gpu.{op}" in text
    for op in ("add_norm", "sample", "linear"):
        assert f"gpu.{op}" in text
    assert "gated_activation" not in text  # it is part of the product
    assert "reference." not in text and "cpu." not in text


def have_activations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between kernels, as a card would have them."""
    for module in ("sdk.memory.planning", "sdk.loading.load"):
        monkeypatch.setattr(f"{module}.activations_of", lambda config, checkpoint: dtype)


def answers(llm: LLM, params: SamplingParams) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, max_model_len=64, max_num_batched_tokens=8, max_num_seqs=4, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kv", ["float32", "int8", "fp8"])
def test_the_answers_are_the_reference_s(
    path: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path, compute="exact", kv_cache_dtype=kv) as llm:
        found = [answers(llm, params) for params in (GREEDY, DRAWN)]
        explained = str(llm.explain())
    assert "gpu.attention_exact" in explained
    monkeypatch.setattr(registry, "BACKENDS", ("reference",))
    with load(path, compute="exact", kv_cache_dtype=kv) as llm:
        wanted = [answers(llm, params) for params in (GREEDY, DRAWN)]
    for a, b in zip(found, wanted, strict=True):
        assert [x.token_ids for x in a] == [x.token_ids for x in b]
    for a, b in zip(found[0], wanted[0], strict=True):
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)


SAMPLED = SamplingParams(
    temperature=0.8, top_k=20, seed=1, max_tokens=3, ignore_eos=True, logprobs=1
)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("short", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_steps_filled_up_to_a_bucket_give_the_same_answers(
    path: Path, short: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: replayed decode steps, and steps with prompts in pieces."""
    have_activations(short, monkeypatch)
    prompts = [*PROMPTS, [7, 7, 7]]
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 7}

    def bits(llm: LLM) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, SAMPLED)]
        return [(output.token_ids, output.cumulative_logprob) for output in outputs]

    with on_a_card(path, **limits) as (llm, _):
        found, runner = bits(llm), llm._runner()
        decoding, pieces = runner.strategy.decodes.steps.graphs, runner.strategy.pieces.graphs
        assert (4, False) in decoding.sizes  # the bucket of three requests
        # 6 tokens and the first of 2; then a decoding request and 1 + 3 tokens, filled up
        assert 7 in pieces.sizes
    with LLM(path, enforce_eager=True, **limits) as llm:
        assert bits(llm) == found


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_chunks_of_prompts_run_on_a_library_s_attention(
    path: Path, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of 16 positions, so that the second chunk of a prompt has a prefix before its own
    keys, and beside the tokens of another request."""
    for module in (scratch, cudnn_attention):
        monkeypatch.setattr(module, "ATTENTION_STEP", 16)
    library.dtype = torch.float16
    random = np.random.default_rng(5)
    prompts = [random.integers(5, 400, n).tolist() for n in (3, 40)]
    found = []
    for libraries in ({("cudnn_attention", "float16", 64): 9}, {}):
        tuning = Tuning(4, libraries=libraries)
        monkeypatch.setattr(gpu, "tuning_of", lambda device, tuning=tuning: tuning)
        library.calls.clear()
        options = {"max_num_batched_tokens": 27, "kv_cache_dtype": "float16"}
        with LLM(path, max_model_len=64, max_num_seqs=4, **options) as llm:
            found.append([o.outputs[0] for o in llm.generate(prompts, GREEDY)])
            text = str(llm.explain())
        assert ("attention          gpu.cudnn_attention float16" in text) == bool(libraries)
        if libraries:
            # of two layers: 24 queries from the first position on; 16, and 8 before them that are
            # nobody's, behind a prefix of 16
            own, prefix = (32, 32, True), (32, 16, False)
            assert library.calls == [own] * 2 + [own, prefix] * 2
        else:
            assert "not gpu.cudnn_attention: no table of this card" in text
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        # the library's queries and results are float16, in each of two layers: 2^-11 each
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, rel=4 * 2.0**-11)


def test_one_order_of_additions_is_asked_of_the_kernels() -> None:
    for deterministic in (False, True):
        ops = Ops("cpu", num_threads=1, deterministic=deterministic)
        backend = ops.context.backends[0]
        for op in ("linear", "attention"):
            kernels = [x for x in backend.implementations(op) if hasattr(x, "_fixed")]
            assert kernels and {x._fixed for x in kernels} == {deterministic}
        ops.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_deterministic_answer_has_the_same_bits_alone_and_in_a_batch(path: Path) -> None:
    def bits(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
        return [(output.token_ids, output.cumulative_logprob) for output in outputs]

    with load(path, deterministic=True) as llm:
        assert not llm._runner()._inputs.finds_shared
        together = bits(llm, PROMPTS)
        assert [bits(llm, [prompt])[0] for prompt in PROMPTS] == together


def test_buckets_are_few_where_batches_are_small() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(256)[-4:] == [160, 192, 224, 256] and len(buckets(256)) == 15
    assert buckets(400)[-3:] == [320, 384, 400]
    assert bucket_of(buckets(20), 9) == 16


SLOW = pytest.mark.slow
#: Half a step of a type (see test_gpu_activations.py).
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize(
    ("name", "short", "places"),
    [
        ("arch-llama3/hf", torch.bfloat16, 7),
        pytest.param("arch-llama3/hf", torch.float16, 7, marks=SLOW),
        pytest.param("arch-qwen3/hf", torch.bfloat16, 9, marks=SLOW),  # and the norms of q and k
        pytest.param("arch-gemma3/hf", torch.bfloat16, 9, marks=SLOW),
        # and biases; bfloat16 takes a token to another expert
        pytest.param("gptoss-mxfp4", torch.float16, 11, marks=SLOW),
    ],
)
@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_logits_of_activations_of_16_bits_are_as_near_as_their_roundings(
    golden: Path, name: str, short: torch.dtype, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer rounds in this many ``places``, by up to half a step of a value and independently, so
    that the errors add up as squares: to ``sqrt(places * layers)`` half steps."""
    have_activations(short, monkeypatch)
    stored = np.load(golden / name.removesuffix("/hf") / "golden.npz")
    expected = torch.from_numpy(stored["logits"])
    with load(golden / name, kv_cache_dtype="float32") as llm:
        runner = llm._runner()
        assert runner.ops.activations == short
        logits = runner.prompt_logits(stored["prompt"].tolist())
        found = torch.cat([part.clone() for part in logits])
        layers = llm.model_config.num_layers
        assert f"activations {str(short)[6:]}," in str(llm.explain())
    found = found - found.mean(dim=1, keepdim=True)
    expected = expected - expected.mean(dim=1, keepdim=True)
    away = float((found - expected).norm() / expected.norm())
    assert away < (places * layers) ** 0.5 * HALF_STEP[short]


@pytest.mark.usefixtures("quick")
def test_an_encoder_runs_on_triton_kernels(tmp_path: Path) -> None:
    oracle = tiny_encoder("modernbert", num_hidden_layers=2, local_attention=4)
    oracle.save_pretrained(tmp_path)
    ids = prompt(9, 3)
    options: dict[str, Any] = {"compute": "exact", "skip_tokenizer_init": True, "max_num_seqs": 2}
    with LLM(tmp_path, max_model_len=16, max_num_batched_tokens=16, **options) as llm:
        given = {"prompt_token_ids": ids}
        [found] = llm.encode(given, pooling="token", normalize=False)
        text = str(llm.explain())
    assert "gpu.attention" in text and "reference." not in text
    states = torch.as_tensor(found.outputs.data)
    assert (states - expected_states(oracle, ids)).abs().max() < 1e-4
