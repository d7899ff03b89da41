"""Every causal language model transformers knows, tiny and random, against transformers itself.

``python -m tests.models.sweep [model_type ...]`` saves each with ``save_pretrained``, opens the
folder as a user would and compares the logits of a prompt. A model either agrees or is refused by
name; anything else (another exception, other logits) is an error and makes the exit code 1.
``--markdown`` prints the table of docs/models.md.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from sdk.kernels.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architecture
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.conftest import TINY, Paged, expected_logits, prompt

TOLERANCE = 2e-4
LIMIT = 300  # seconds one model may take
#: Sizes that families name differently; those a config class does not know are left out.
SMALL: dict[str, Any] = {
    **TINY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 256,
    "d_model": 64,
    "n_layers": 3,
    "n_heads": 4,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "word_embed_proj_dim": 64,
    "max_seq_len": 256,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 32,
}


def names() -> list[str]:
    """The model types that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(name: str) -> Any:
    """A small config of that type: only what its class has as a field of its own is changed."""
    kind = transformers.CONFIG_MAPPING[name]
    known = kind().to_dict()
    if "text_config" in known:
        return None
    values = {key: value for key, value in SMALL.items() if key in known}
    values.update({key: TINY[key] for key in TINY if key in getattr(kind, "attribute_map", {})})
    if "qk_rope_head_dim" in known:
        values.pop("head_dim", None)
        values["num_key_value_heads"] = TINY["num_attention_heads"]
    if "multi_query" in known:
        values.pop("num_key_value_heads", None)
    return kind(**values)


def random_model(config: Any, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """In float32, with random norms and biases, so that every parameter matters."""
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                base = 0.0 if key.endswith("bias") else parameter
                parameter.copy_(base + 0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model


def outcome(name: str, folder: Path) -> str:
    """``ours`` or ``transformers`` where the logits agree, else why not."""
    try:
        config = config_of(name)
        if config is None:
            return "- multimodal: its text model is the one to look at"
        model = random_model(config)
        model.save_pretrained(folder)
        expected = expected_logits(model, prompt(41, 1))
    except Exception as error:
        return f"- no tiny model: {type(error).__name__}: {error}"
    ops = Ops(num_threads=1, compute="exact")
    try:
        checkpoint = open_checkpoint(folder)
        found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=256)).run(
            "a", prompt(41, 1)
        )
        unused = checkpoint.unused()
    except (CheckpointError, UnsupportedError) as error:
        return f"refused: {str(error).replace(str(folder), 'FOLDER')}"
    finally:
        ops.close()
    wrong = float((found - expected).abs().max())
    if not wrong <= TOLERANCE * max(1.0, float(expected.abs().max())):
        return f"WRONG: logits differ by {wrong:.2g} of {float(expected.abs().max()):.2g}"
    if unused:
        return f"WRONG: unused {unused[:3]}"
    return "ours" if architecture(name) else "transformers"


def sweep(chosen: list[str]) -> Iterator[tuple[str, str]]:
    """(model type, outcome) of each."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(LIMIT)
            try:
                yield name, outcome(name, Path(folder))
            except Exception as error:
                yield name, f"WRONG: {type(error).__name__}: {error}"
            finally:
                signal.alarm(0)


def summary(results: list[tuple[str, str]]) -> str:
    """The lists of docs/models.md."""
    groups: dict[str, list[str]] = {}
    for name, found in results:
        if found.startswith("-"):
            continue  # no model to compare with, or one that also sees
        reason = found.removeprefix("refused: ").splitlines()[0]
        reason = reason.replace(f"model_type {name!r}", "").strip(" :,")
        for pattern in (
            r"in transformers [\d.]+ ",
            r"FOLDER\S*: ",
            r", found \S+$",
            r"layer \d+: ",
        ):
            reason = re.sub(pattern, "", reason)
        reason = re.split(r": '|; | and may ", reason)[0]
        reason = re.sub(r"(heads x head_dim|layers to attend).*", r"\1", reason)
        reason = re.sub(
            r"not a valid .*", "its config is not read (mixed with state spaces)", reason
        )
        groups.setdefault(reason, []).append(name)
    lines = [
        f"transformers {transformers.__version__}: {len(results)} model types\n",
        f"**One file in `models/`** ({len(groups['ours'])}): {', '.join(groups.pop('ours'))}\n",
        f"**Through transformers' code** ({len(groups['transformers'])}): "
        f"{', '.join(groups.pop('transformers'))}\n",
        "| not supported | because |\n|---|---|",
    ]
    lines += [f"| {', '.join(who)} | {why} |" for why, who in sorted(groups.items())]
    return "\n".join(lines)


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [name for name in sys.argv[1:] if name != "--markdown"]
    results = []
    for name, found in sweep(chosen or names()):
        print(f"{name:28} {found.splitlines()[0][:220]}", file=sys.stderr, flush=True)
        results.append((name, found))
    if "--markdown" in sys.argv:
        print(summary(results))
    return int(any(found.startswith("WRONG") for _, found in results))


if __name__ == "__main__":
    sys.exit(main())
