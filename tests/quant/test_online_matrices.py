"""Which matrices online quantization packs, and how: in encoders, and where rows are short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.kernels.weights.layouts import Affine
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architectures
from sdk.models.auto import quantized_online
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import FEWEST_COLUMNS, LAST_GROUP, is_last_of_mlp
from tests.gguf_encoders import gguf_of_encoder
from tests.gguf_models import save_gguf
from tests.models.conftest import tiny, tiny_encoder
from tests.models.tiny_architectures import GEMMA3N

LAYER = "model.layers.1."
MATRICES = ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj")


def folder_of(model: Any) -> Callable[[Path], Checkpoint]:
    def opened(folder: Path) -> Checkpoint:
        model.save_pretrained(folder)
        return open_checkpoint(folder)

    return opened


def gguf(folder: Path) -> Checkpoint:
    return open_checkpoint(save_gguf(folder / "m.gguf", gguf_of_encoder(tiny_encoder("bert"))))


ENCODERS = {
    "bert": folder_of(tiny_encoder("bert")),
    "bert in a GGUF file": gguf,
    "distilbert": folder_of(tiny_encoder("distilbert", hidden_dim=128)),
    "mpnet": folder_of(tiny_encoder("mpnet", pad_token_id=1)),
    "modernbert": folder_of(tiny_encoder("modernbert")),
    "a llama that sees both ways": folder_of(tiny("llama", is_causal=False)),
}


def groups_of(checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, int | None]:
    """Columns that share a scale; ``None``: all of a row."""
    found: dict[str, int | None] = {}
    for name in names:
        layout = checkpoint.weight(LAYER + name).layout  # type: ignore[attr-defined]
        assert isinstance(layout, Affine) and layout.bits == 8
        found[name] = None if layout.group == layout.shape[1] else layout.group
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_int8_of_an_encoder_has_finer_scales_where_an_mlp_ends(name: str, tmp_path: Path) -> None:
    plain = ENCODERS[name](tmp_path)
    names = MATRICES[1:2] if name == "modernbert" else MATRICES  # whose others are joined
    packed = quantized_online(plain, "int8")
    wanted = {one: LAST_GROUP if one == "mlp.down_proj" else None for one in names}
    assert groups_of(packed, names) == wanted
    finer = [entry for entry in packed.entries() if entry.packed == f"w8a16g{LAST_GROUP}s"]
    assert len(finer) == plain.config["num_hidden_layers"]
    rows, columns = finer[0].shape
    assert finer[0].held == rows * columns + 2 * rows * columns // LAST_GROUP
    by_name = quantized_online(plain, "rtn-w8s-h8")
    assert groups_of(by_name, names) == dict.fromkeys(names)


def test_int8_of_a_decoder_has_one_scale_for_a_row(tmp_path: Path) -> None:
    packed = quantized_online(folder_of(tiny("llama"))(tmp_path), "int8")
    assert groups_of(packed, MATRICES) == dict.fromkeys(MATRICES)
    assert {entry.packed for entry in packed.entries()} == {None, "w8a16s"}


def test_an_override_that_makes_a_decoder_an_encoder_counts(tmp_path: Path) -> None:
    plain = folder_of(tiny("qwen3", head_dim=24))(tmp_path)
    packed = quantized_online(plain, "int8", {"is_causal": False})
    assert groups_of(packed, MATRICES[:2])["mlp.down_proj"] == LAST_GROUP


def test_the_files_names_of_an_encoders_last_projection_are_known() -> None:
    """In the folders of every architecture whose tokens see both ways, and no other matrix."""
    encoders = [own for own in architectures() if own.folders and not own.config.causal]
    assert len(encoders) > 15
    for own in encoders:
        names = TensorNames(own.tensors.names)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            stored = f"{names.theirs(LAYER + part)}.weight"
            assert is_last_of_mlp(stored) == (part == "mlp.down_proj"), (own.model_type, stored)


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8", "mxfp4", "nvfp4", "rtn-w4g32s"])
def test_rows_of_few_weights_stay_in_float(scheme: str, tmp_path: Path) -> None:
    """Gemma 3n's coefficients of AltUp have 4 columns; its gate of per-layer inputs makes 16."""
    wide = {**GEMMA3N, "hidden_size": 128, "laurel_rank": 64, "intermediate_size": 128}
    wide |= {"hidden_size_per_layer_input": 16, "num_attention_heads": 4, "head_dim": 32}
    tiny("gemma3n_text", **wide).save_pretrained(tmp_path)
    plain = open_checkpoint(tmp_path)
    entries = quantized_online(plain, scheme).entries()
    narrow = [
        entry for entry in entries if len(entry.shape) == 2 and entry.shape[1] < FEWEST_COLUMNS
    ]
    assert {entry.shape[1] for entry in narrow} == {4, 16}
    assert all(entry.packed is None and entry.held is None for entry in narrow)
    options = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 64}
    with LLM(tmp_path, quantization=scheme, **options) as llm:  # type: ignore[arg-type]
        report = str(llm.quant_report())
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}])[0].outputs[0].token_ids
    assert "f32" in report
