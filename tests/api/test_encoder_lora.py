"""Adapters of encoders: as PEFT saves them and as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk import LLM, CheckpointError
from tests.gguf_encoders import gguf_of_encoder
from tests.gguf_models import F32, STRING, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import expected_states, prompt, tiny_encoder
from tests.peft_adapters import save, with_peft

#: Modules that peft adapts, as transformers' model in memory calls them.
PEFT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bert": ({}, ["query", "value", "word_embeddings", "intermediate.dense"]),
    "mpnet": ({"pad_token_id": 1}, ["attn.q", "attn.o", "word_embeddings"]),
    "gte": ({"type_vocab_size": 1}, ["q_proj", "o_proj", "up_proj", "down_proj"]),
    "nomic_bert": ({}, ["k_proj", "gate_proj", "word_embeddings"]),
    "jina_embeddings_v3": (
        {"type_vocab_size": 1},
        ["q_proj", "v_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings"],
    ),
    "jina_embeddings_v3, types alone": ({"type_vocab_size": 1}, ["token_type_embeddings"]),
}
OPTIONS: dict[str, Any] = {"compute": "exact", "num_threads": 1, "skip_tokenizer_init": True}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PEFT)
def test_an_adapter_of_peft_gives_peft_s_vectors(name: str, tmp_path: Path) -> None:
    options, modules = PEFT[name]
    base = tiny_encoder(name.partition(",")[0], **options)
    base.save_pretrained(tmp_path / "m")
    ids = [prompt(41, 3), prompt(7, 4)]
    plain = [expected_states(base, one).mean(0).numpy() for one in ids]
    model = with_peft(base, r=4, lora_alpha=8, target_modules=modules)
    save(model, tmp_path / "a")
    with torch.no_grad():
        wanted = [model(torch.tensor([one])).last_hidden_state[0].mean(0).numpy() for one in ids]
    texts = [{"prompt_token_ids": one} for one in ids]
    with LLM(tmp_path / "m", enable_lora=True, **OPTIONS) as llm:
        llm.add_lora("task", tmp_path / "a")
        for lora, vectors in (("task", wanted), (None, plain)):
            found = llm.encode(texts, pooling="mean", normalize=False, lora_request=lora)
            for one, vector in zip(found, vectors, strict=True):
                assert np.allclose(one.outputs.data.numpy(), vector, rtol=0, atol=2e-5)
        mixed = llm.encode(texts, pooling="mean", normalize=False, lora_request=["task", None])
        assert np.allclose(mixed[0].outputs.data.numpy(), wanted[0], rtol=0, atol=2e-5)
        assert np.allclose(mixed[1].outputs.data.numpy(), plain[1], rtol=0, atol=2e-5)


def test_a_gguf_adapter_of_a_task_updates_the_token_type(tmp_path: Path) -> None:
    """As llama.cpp's converter writes those of jina-embeddings-v3: rows of the embedding turned,
    the row of the type as that of a linear layer."""
    base = tiny_encoder("jina_embeddings_v3", type_vocab_size=1)
    save_gguf(tmp_path / "m.gguf", gguf_of_encoder(base))
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "token_embd.weight.lora_a": (96, 4),
        "token_embd.weight.lora_b": (64, 4),
        "token_types.weight.lora_a": (4, 64),
        "token_types.weight.lora_b": (1, 4),
        "blk.1.ffn_up.weight.lora_a": (4, 64),
        "blk.1.ffn_up.weight.lora_b": (128, 4),
    }
    factors = {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in shapes.items()}
    file = GgufBytes(
        {
            "general.architecture": (STRING, "jina-bert-v3"),
            "general.type": (STRING, "adapter"),
            "adapter.type": (STRING, "lora"),
            "adapter.lora.alpha": (F32, 1.0),
        }
    )
    for name, values in factors.items():
        data = values.numpy().astype("<f4")
        file.tensors[name] = (data.shape[::-1], 0, data.tobytes())
    save_gguf(tmp_path / "task.gguf", file)
    tokens, types, up = (
        [factors[f"{stem}.weight.lora_{x}"] for x in "ab"]
        for stem in ("token_embd", "token_types", "blk.1.ffn_up")
    )
    with torch.no_grad():
        base.embeddings.word_embeddings.weight += tokens[0] @ tokens[1].T / 4
        base.embeddings.token_type_embeddings.weight += types[1] @ types[0] / 4
        base.layers[1].mlp.fc1.weight += up[1] @ up[0] / 4
    ids = prompt(33, 2)
    with LLM(tmp_path / "m.gguf", enable_lora=True, **OPTIONS) as llm:
        llm.add_lora("task", tmp_path / "task.gguf")
        text = {"prompt_token_ids": ids}
        [found] = llm.encode([text], pooling="mean", normalize=False, lora_request="task")
    wanted = expected_states(base, ids).mean(0)
    assert np.allclose(found.outputs.data.numpy(), wanted.numpy(), rtol=0, atol=2e-5)


def test_an_adapter_of_several_token_types_is_refused(tmp_path: Path) -> None:
    tiny_encoder("bert").save_pretrained(tmp_path / "m")
    model = with_peft(tiny_encoder("bert"), r=4, target_modules=["token_type_embeddings"])
    save(model, tmp_path / "a")
    with (
        LLM(tmp_path / "m", enable_lora=True, **OPTIONS) as llm,
        pytest.raises(CheckpointError, match="embed_types"),
    ):
        llm.add_lora("task", tmp_path / "a")
