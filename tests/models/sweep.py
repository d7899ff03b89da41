"""Every causal language model transformers knows, tiny and random, against transformers itself.

``python -m tests.models.sweep [model_type ...]`` saves each with ``save_pretrained``, opens the
folder as a user would and compares the logits of a prompt, or its states if we have the model as an
encoder. A model either agrees or is refused by name; anything else (another exception, other
logits) is an error and makes the exit code 1. Models have the kinds of layers of released ones
(tests/models/released.py).

``--write`` records the outcomes in sweep.json, from which ``python .ci/model_docs.py`` makes
docs/models.md. With names it replaces those alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architecture
from sdk.models.auto import build_model, read_config
from sdk.models.other_models import check_type
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.conftest import TINY, Paged, expected_logits, expected_states, prompt
from tests.models.released import RELEASED

RECORD = Path(__file__).with_name("sweep.json")
TOLERANCE = 2e-4
LIMIT = 150  # seconds one model may take
#: Sizes that families name differently; those a config class does not know are left out.
SMALL: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 256,
    "d_model": 64,
    "n_layers": 4,
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
    "sliding_window": 9,
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


def configs_of(name: str) -> list[Any]:
    """Small configs of that type, one for each released kind; none of a multimodal type."""
    kind = transformers.CONFIG_MAPPING[name]
    known = kind().to_dict()
    if "text_config" in known:
        return []
    values = small_values(kind, known)
    return [kind(**{**values, **own}) for own in RELEASED.get(name, ({},))]


def small_values(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Small sizes: only what the class has as a field of its own is changed."""
    values = {key: value for key, value in SMALL.items() if key in known}
    if known.get("sliding_window") is None:
        values.pop("sliding_window", None)
    values.update({key: SMALL[key] for key in TINY if key in getattr(kind, "attribute_map", {})})
    if "qk_rope_head_dim" in known:
        values.pop("head_dim", None)
        values["num_key_value_heads"] = TINY["num_attention_heads"]
    if "multi_query" in known:
        values.pop("num_key_value_heads", None)
    return values


def random_model(config: Any, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """In float32, with random norms and biases, so that every parameter matters."""
    torch.manual_seed(0)
    # Falcon's eager code adds its linear biases twice, transformers 5.24.
    twice = config.model_type == "falcon" and config.alibi
    model = kind.from_config(config, attn_implementation="sdpa" if twice else "eager")
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
        for module in model.modules():
            if hasattr(module, "create_weight"):  # a table of sines, no weight (RoFormer)
                module.weight.copy_(module.create_weight())
    return model


def outcome(name: str, folder: Path) -> str:
    """``native`` or ``transformers`` where the logits of all its kinds agree, else why not.

    ``- ...``: there is nothing to compare with.
    """
    try:
        check_type(name)
        configs = configs_of(name)
    except UnsupportedError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"- no tiny config: {type(error).__name__}: {error}"
    if not configs:
        return "- multimodal: its text model is the one to look at"
    found = []
    for index, config in enumerate(configs):
        own = folder / str(index)
        found.append(outcome_of(config, own))
        shutil.rmtree(own, ignore_errors=True)
    bad = [one for one in found if one not in ("native", "transformers")]
    if not bad or len(found) == 1:
        return (bad or found)[0]
    wrong = next((one for one in bad if one.startswith("WRONG")), bad[0])
    return wrong if len(bad) == len(found) else f"{wrong} (of {len(found)} kinds: {len(bad)})"


def outcome_of(config: Any, folder: Path) -> str:
    """The outcome of one config: see :func:`outcome`."""
    try:
        read_config(config.to_dict())
    except (CheckpointError, UnsupportedError) as error:
        return f"refused: {error}"
    own = architecture(config.model_type)
    encodes = own is not None and not own.config.causal  # then states are compared
    try:
        if encodes:
            model = random_model(config, transformers.AutoModel)
        else:
            model = random_model(config)
        model.save_pretrained(folder)
        expected = (expected_states if encodes else expected_logits)(model, prompt(41, 1))
    except Exception as error:
        return f"- no tiny model: {type(error).__name__}: {error}"
    ops = Ops(num_threads=1, compute="exact")
    try:
        checkpoint = open_checkpoint(folder)
        found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=256)).run(
            "a", prompt(41, 1)
        )
        unused = [
            name
            for name in checkpoint.unused()
            if not any(one in name for one in ("pooler", ".indexer.", "encoder.embed_positions"))
        ]
    except (CheckpointError, UnsupportedError) as error:
        return f"refused: {str(error).replace(str(folder), 'FOLDER')}"
    finally:
        ops.close()
    wrong = float((found - expected).abs().max())
    if not wrong <= TOLERANCE * max(1.0, float(expected.abs().max())):
        return f"WRONG: results differ by {wrong:.2g} of {float(expected.abs().max()):.2g}"
    if unused:
        return f"WRONG: unused {unused[:3]}"
    return "native" if own is not None else "transformers"


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


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="model_type")
    options.add_argument("--write", action="store_true", help="record the outcomes")
    given = options.parse_args()
    results: dict[str, str] = {}
    for name, found in sweep(given.names or names()):
        results[name] = found.splitlines()[0][:400]
        print(f"{name:28} {results[name][:220]}", file=sys.stderr, flush=True)
    if given.write:
        kept = read_record() if given.names else {}
        text = json.dumps({**kept, **results}, indent=1, sort_keys=True)
        RECORD.write_text(text + "\n", encoding="utf-8")
    return int(any(found.startswith("WRONG") for found in results.values()))


def read_record() -> dict[str, str]:
    """The outcome of each type in the last sweep."""
    found: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
