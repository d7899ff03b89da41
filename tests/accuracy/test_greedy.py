"""Greedy answers on real weights against transformers on the dequantized weights.

The oracle is transformers' own modeling code in float32, fed our answer token by token. Rule: where
its best logit leads the second by more than ``NOISE`` times the standard deviation of its logits at
that position, our token must be its best token. With ``compute="exact"`` the two differ by rounding
only (measured below 2e-5 of the deviation); with 8-bit activations the logits carry noise of about
2 % of it, and a difference of two such logits rarely exceeds 8 %. Closer races are counted, and may
not be more than a tenth of all positions, so that the rule cannot excuse a broken model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint

NOISE = {"exact": 0.002, "auto": 0.08}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4,",
    "Water boils at a temperature of",
    "Die drei Farben der deutschen Flagge sind",
]
MAX_TOKENS = 32


def _oracle(path: Path) -> torch.nn.Module:
    """transformers' model with the exact values of the file's weights."""
    import transformers

    checkpoint = open_checkpoint(path)
    config = transformers.CONFIG_MAPPING[checkpoint.config["model_type"]](**checkpoint.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {}
    for name, meta in model.state_dict().items():
        if name == "lm_head.weight" and not checkpoint.has("lm_head"):
            continue
        if meta.dim() == 2:
            state[name] = checkpoint.weight(name.removesuffix(".weight")).dequantize()
        else:
            state[name] = checkpoint.tensor(name).clone()
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    for module in model.modules():  # what is computed, not stored: rotary tables, embedding scales
        if hasattr(module, "rope_init_fn") or type(module).__name__.endswith("RotaryEmbedding"):
            module.__init__(config)  # type: ignore[misc]
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(config.hidden_size**0.5)
    checkpoint.close()
    return model.eval()


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[Path, torch.nn.Module]:
    path: Path = request.getfixturevalue(request.param)
    return path, _oracle(path)


@pytest.mark.model
@pytest.mark.parametrize("compute", ["exact", "auto"])
def test_greedy_tokens_equal_transformers_wherever_its_margin_is_clear(
    real: tuple[Path, torch.nn.Module], compute: str
) -> None:
    path, oracle = real
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(path, compute=compute, kv_cache_dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, params)
    close = total = 0
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert len(answer) == MAX_TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        clear = (best[:, 0] - best[:, 1]) > NOISE[compute] * logits.std(dim=-1)
        total += len(answer)
        close += int((~clear).sum())
        for step, (token, expected) in enumerate(
            zip(answer, logits.argmax(-1).tolist(), strict=True)
        ):
            assert token == expected or not clear[step], (
                f"{output.prompt!r}, token {step}: {token}, expected {expected}"
            )
    assert close <= total / 10, f"{close} of {total} positions were too close to judge"


@pytest.mark.model
def test_prompt_logprobs_equal_transformers_log_softmax(smollm2: Path) -> None:
    oracle = _oracle(smollm2)
    text = "The quick brown fox jumps over the lazy dog. " * 8
    with LLM(smollm2, compute="exact", kv_cache_dtype="float32", max_model_len=512) as llm:
        [output] = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    ids = torch.tensor(output.prompt_token_ids)
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for position in range(1, len(ids)):
        entry = output.prompt_logprobs[position]
        assert entry is not None
        found = entry[int(ids[position])].logprob
        assert found == pytest.approx(float(expected[position - 1, ids[position]]), abs=2e-3)
