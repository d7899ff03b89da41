"""An engine with latent pages: the same answers alone, batched, chunked, after a hit, preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.api.errors import RequestError
from sdk.engine.rank.kv_cache import kv_spec
from sdk.models.configs.config import ModelConfig
from tests.models.conftest import TINY, prompt, tiny
from tests.models.tiny_architectures import LATENT, V3

PROMPTS = [prompt(n, n) for n in (5, 40, 90, 33)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent")
    tiny("deepseek_v3", **V3, **LATENT).save_pretrained(path)
    return path


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Tokens and their log-probabilities."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    found = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
    return [(one.outputs[0].token_ids, str(one.outputs[0].logprobs)) for one in found]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_how_the_work_is_cut_changes_no_answer(folder: Path, dtype: str) -> None:
    options: dict[str, Any] = {
        "max_model_len": 160, "kv_cache_dtype": dtype, "num_threads": 1, "skip_tokenizer_init": True
    }  # fmt: skip
    with LLM(folder, **options) as llm:
        batch = answers(llm, PROMPTS)
        assert answers(llm, PROMPTS) == batch  # behind cached prefixes
        assert [answers(llm, [one])[0] for one in PROMPTS[:2]] == batch[:2]
    few = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
    with LLM(folder, **options, **few) as llm:
        assert answers(llm, PROMPTS) == batch
    config = ModelConfig.from_dict(tiny("deepseek_v3", **V3, **LATENT).config.to_dict())
    pages = 12 * kv_spec(config, 16, dtype).page_bytes  # all together need 17
    with LLM(folder, **options, kv_cache_memory_bytes=pages, max_num_seqs=8) as llm:
        assert answers(llm, PROMPTS) == batch


def test_a_page_holds_a_latent_once() -> None:
    config = ModelConfig.from_dict(
        {**TINY, **V3, **LATENT, "model_type": "deepseek_v3", "rms_norm_eps": 1e-6}
    )
    spec = kv_spec(config, 16, "float16")
    assert spec.page_bytes == 3 * 16 * (48 + 16) * 2


@pytest.mark.parametrize(
    "option", [{"kv_cache_dtype": "int8/int4"}, {"kv_policy": "fp16>int8", "block_size": 128}]
)
def test_latents_have_one_type(folder: Path, option: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="expected one type: deepseek_v3 keeps one vector"):
        LLM(folder, max_model_len=128, skip_tokenizer_init=True, **option)


def test_a_context_ends_where_an_indexer_would_choose(tmp_path: Path) -> None:
    more = {"index_topk": 48, "index_head_dim": 32, "index_n_heads": 2}
    tiny("glm_moe_dsa", **V3, **LATENT, **more).save_pretrained(tmp_path)
    message = r"at most 48, of which glm_moe_dsa's indexer chooses all: .*, found 49"
    with pytest.raises(RequestError, match=message):
        LLM(tmp_path, max_model_len=49, skip_tokenizer_init=True)
    with LLM(tmp_path, skip_tokenizer_init=True, num_threads=1) as llm:
        assert len(answers(llm, [PROMPTS[0]])[0][0]) == 12
