"""A model run layer by layer is the model: hidden states and statistics against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.loaders.open import open_checkpoint
from sdk.quant.calibration import Observer
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quantizing.layers import LayerRun

TOKENS = 40


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_layers_in_a_row_give_what_the_whole_model_gives(
    name: str, golden: Path, tmp_path: Path
) -> None:
    folder = golden / f"arch-{name}" / "hf"
    ids = torch.randint(3, 448, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, list[Tensor]] = {}
    for path, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in path:
            module.register_forward_hook(
                lambda _, args, __, path=path: seen.setdefault(path, []).append(
                    args[0].flatten(0, 1)
                )
            )
    with torch.no_grad():
        expected = oracle(ids, output_hidden_states=True, use_cache=False).hidden_states
    checkpoint = open_checkpoint(folder)
    run = LayerRun(checkpoint, TOKENS, num_threads=2)
    here, there = tmp_path / "here.npy", tmp_path / "there.npy"
    run.embed(checkpoint, ids, here)
    count = run.config.num_layers
    for index in range(count):
        observer = Observer()
        layer = run.build(RewrittenCheckpoint(checkpoint, observer.watch), index)
        if index < count - 1:  # transformers gives the last one behind the final norm
            for found, wanted in zip(run.outputs(layer, here), expected[index + 1], strict=True):
                assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)
        run.advance(layer, here, there)
        here, there = there, here
        path = f"model.layers.{index}"
        attention = tuple(f"{path}.self_attn.{part}_proj" for part in "qkv")
        assert list(observer.inputs) == [
            attention,
            (f"{path}.self_attn.o_proj",),
            (f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"),
            (f"{path}.mlp.down_proj",),
        ]
        times = 2 if index < count - 1 else 1
        for names, statistics in observer.inputs.items():
            x = torch.cat(seen[names[0]])
            assert statistics.count == times * len(x)
            gram = x.t() @ x / len(x)
            assert torch.allclose(statistics.gram, gram, rtol=1e-2, atol=1e-3 * float(gram.max()))
    run.close()
    checkpoint.close()


def test_a_stopped_pass_leaves_no_half_written_file(golden: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(golden / "arch-llama3" / "hf")
    run = LayerRun(checkpoint, TOKENS, num_threads=1)
    with pytest.raises(KernelError, match=r"rows: expected ids in 0\.\.447, found"):
        run.embed(checkpoint, torch.full((2, TOKENS), 10**6), tmp_path / "inputs.npy")
    assert list(tmp_path.iterdir()) == []
    run.close()
    checkpoint.close()
