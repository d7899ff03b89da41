"""Steps of models that run transformers' code, recorded: the logits of eager ones, or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm
from transformers.models.glm4.modeling_glm4 import Glm4Config, Glm4MLP
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

import sdk
from sdk import SamplingParams
from sdk.kernels.errors import CaptureError
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.models.transformers_code.backend import HFModel
from sdk.models.transformers_code.known import NormFacts, gated_activation, norm_facts
from tests.models.conftest import TINY, checkpoint_of, prompt, tiny
from tests.models.sweep import configs_of, random_model
from tests.models.test_model_graph import Steps

#: Partial rotation and norms of heads; looked-up rotations of adjacent pairs; latent
#: attention, groups of experts and a shared one; no weights in norms and a soft cap.
RECORDED = ("persimmon", "ctrl", "sarvam_mla", "nanochat")


@pytest.fixture
def ops() -> Any:
    ops = Ops("cpu", num_threads=2)
    yield ops
    ops.close()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", RECORDED)
def test_a_replayed_step_has_the_logits_of_an_eager_one(
    name: str, ops: Ops, tmp_path: Path
) -> None:
    random_model(configs_of(name)[0]).save_pretrained(tmp_path)
    model = build_model(open_checkpoint(tmp_path), Mesh(), ops, max_model_len=128)
    assert isinstance(model, HFModel)
    assert model.unrecorded is None
    with torch.inference_mode():
        eager, replayed = Steps(model, ops, False), Steps(model, ops, True)
        for counts, outputs in (({0: 40, 1: 20}, [39]), ({1: 29, 2: 30}, [28]), ({2: 28}, [27])):
            expected, found = eager.run(counts, outputs), replayed.run(counts, outputs)
            for a, b in zip(expected, found, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
            assert expected[1].isfinite().all()


def test_the_engine_replays_such_a_model(tmp_path: Path) -> None:
    random_model(configs_of("persimmon")[0]).save_pretrained(tmp_path)
    answers = []
    for eager in (False, True):
        with sdk.LLM(
            tmp_path, skip_tokenizer_init=True, max_model_len=64, enforce_eager=eager
        ) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            outputs = llm.generate([prompt(20, 1), prompt(9, 2), prompt(30, 3)], params)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert (llm._runner().strategy.eager_reason is None) is not eager
    assert answers[0] == answers[1]


class Wrapped(nn.Module):
    """A body whose hidden states another function changes."""

    def __init__(self, body: Any, change: Any) -> None:
        super().__init__()
        self.body, self.change = body, change

    def forward(self, **given: Any) -> Any:
        out = self.body(**given)
        out.last_hidden_state = self.change(out.last_hidden_state)
        return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * (x.shape[1] > 5), "a recorded step of 1 tokens gives other logits"),
        (lambda x: x - x.mean(dim=1, keepdim=True), "aten.mean.dim cannot be recorded"),
        (lambda x: x.view(-1, 2, 3), "a step cannot be recorded: shape "),
    ],
)
def test_a_model_that_cannot_be_recorded_says_why_and_runs(
    change: Any, words: str, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sdk.models.transformers_code.backend as backend

    proof = backend.unrecorded_reason

    def changed(model: Any) -> Any:
        model._body = Wrapped(model._body, change)
        return proof(model)

    monkeypatch.setattr(backend, "unrecorded_reason", changed)
    model = build_model(
        checkpoint_of(tiny("persimmon", num_key_value_heads=4)), Mesh(), ops, max_model_len=128
    )
    assert isinstance(model, HFModel)
    with torch.inference_mode(), pytest.raises(CaptureError, match=words):
        Steps(model, ops, True)


def test_a_long_step_must_be_noted_as_the_short_one_was(ops: Ops) -> None:
    checkpoint = checkpoint_of(tiny("persimmon", num_key_value_heads=4))
    model: Any = build_model(checkpoint, Mesh(), ops, max_model_len=128)
    model._body = Wrapped(model._body, lambda x: x * 2)
    with (
        torch.inference_mode(),
        pytest.raises(CaptureError, match=r"expected the operations of a short step \(\d+\)"),
    ):
        Steps(model, ops, True)


def test_what_a_norm_computes_is_found_by_trying_it() -> None:
    class Clamped(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.clamp(-40, 40))

    class EpsilonOutside(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            root = x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
            return self.weight * x / root

    assert norm_facts(LlamaRMSNorm(64, 1e-5)) == NormFacts(1e-5, 0.0, False)
    assert norm_facts(GemmaRMSNorm(64, 1e-6)) == NormFacts(1e-6, 1.0, False)
    for bias in (False, True):
        assert norm_facts(nn.LayerNorm(64, bias=bias)) == NormFacts(1e-5, 0.0, True)
    for other in (Clamped(64, 1e-5), EpsilonOutside(64, 1e-5), nn.BatchNorm1d(64), nn.Linear(4, 4)):
        assert norm_facts(other) is None


def test_what_a_gated_mlp_computes_is_found_by_trying_it() -> None:
    class Swapped(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    class Limited(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-30, 30)

    small = {key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    plain = LlamaConfig(**small)
    assert gated_activation(LlamaMLP(plain)) == "silu"
    assert gated_activation(GemmaMLP(GemmaConfig(**small, head_dim=16))) == "gelu_tanh"
    assert gated_activation(LlamaMLP(LlamaConfig(**small, hidden_act="gelu"))) == "gelu"
    others = (Swapped(plain), Limited(plain), LlamaMLP(LlamaConfig(**small, hidden_act="relu")))
    for other in (*others, Glm4MLP(Glm4Config(**small)), nn.LayerNorm(64)):
        assert gated_activation(other) is None
