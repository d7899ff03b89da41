"""Which kernels an engine would compile while it serves, for a card that is not here.

    python tests/gpu/serving_kernels.py FORMAT VOCABULARY [--cold] FOLDER

A tiny model is loaded on the fake card (tests/engine/fake_card.py), where Triton's launches are
listed and neither compiled nor run (tests/gpu/aot/machine_code.py), so all results are zeros.
Then it serves prompts and batches of many sizes. Prints a line of JSON: how many kernels were
listed at load, how many of them by the pass that compiles ahead, and what each kernel was that was
first listed later. With ``--cold`` the engine
is not warmed up at load.

Triton must not interpret here, so tests run this in a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "aot"), str(HERE.parent / "engine"), str(HERE.parents[1])]

from fake_card import on_a_card  # noqa: E402
from machine_code import Source, Started, all_launches  # noqa: E402

from sdk import LLM, SamplingParams  # noqa: E402
from sdk.engine.rank.forward import ForwardPasses  # noqa: E402
from sdk.kernels import gpu  # noqa: E402
from sdk.kernels.gpu.compile_ahead import ONLY_COMPILES  # noqa: E402
from sdk.kernels.gpu.tuning import Tuning  # noqa: E402
from sdk.kernels.self_check import SelfCheck  # noqa: E402
from sdk.testing import tiny_models  # noqa: E402

#: Up to two steps with more tokens than the largest graph.
LIMITS = {"max_model_len": 1500, "max_num_batched_tokens": 640, "max_num_seqs": 11}
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 48, 64, 65, 100, 127, 200, 257, 300, 513, 640, 700, 1000)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, **options)


def described(source: Source) -> dict[str, Any]:
    """A kernel with what Triton knows of its arguments."""
    names = source.code.fn.arg_names
    facts = {names[at[0]]: str(value) for at, value in source.code.attrs.items()}
    constants = {names[at[0]]: str(value) for at, value in source.code.constants.items()}
    return {"kernel": source.name, "facts": facts, "constants": constants}


def serve(llm: LLM) -> None:
    """Requests alone and together, of every length, drawn in every way."""
    for length in LENGTHS:
        prompt = [3 + (7 * i + length) % 300 for i in range(length)]
        llm.generate([prompt], params(temperature=0.0))
    for count in range(1, LIMITS["max_num_seqs"] + 1):
        prompts = [[3 + (5 * i + j) % 300 for j in range(9 + 7 * i)] for i in range(count)]
        llm.generate(prompts, params(temperature=0.8, top_k=7, seed=1))
    beginning = [3 + 11 * i % 300 for i in range(600)]
    for count in (1, 2, 5, 9):
        together = [[*beginning, 4 + i] for i in range(count)]
        llm.generate(together, params(temperature=0.8, seed=1))
    for options in (
        {"repetition_penalty": 1.2}, {"logit_bias": {5: 2.0}}, {"allowed_token_ids": [3, 4, 5]},
        {"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 0.0, "min_tokens": 2},
    ):  # fmt: skip
        llm.generate([[5, 6, 7], [8, 9]], params(**options))
    llm.embed([[5, 6, 7, 8], [9]])


def main(format: str, vocabulary: int, folder: str, *, cold: bool) -> None:
    patch = pytest.MonkeyPatch()
    if cold:
        patch.setattr(ForwardPasses, "warm_up", lambda passes: None)
    patch.setattr(tiny_models, "_VOCAB_SIZE", vocabulary)
    model = tiny_models.tiny_model(folder, format)
    for name in ("empty", "empty_like"):
        zeros = getattr(torch, name.replace("empty", "zeros"))
        patch.setattr(torch, name, _named(zeros, name))
    patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    patch.setattr(gpu, "available", lambda device: None)
    patch.setattr(gpu, "tuning_of", lambda device: Tuning(programs=528))
    patch.setattr(SelfCheck, "_reason", lambda *args: None)  # zeros are not products
    for module in ("sdk.memory.planning", "sdk.loading.load"):
        patch.setattr(f"{module}.activations_of", lambda config, checkpoint: torch.bfloat16)
    target, ahead = GPUTarget("cuda", 90, 32), set[str]()
    with all_launches(target) as listed:
        if not cold:
            patch.setattr(ForwardPasses, "warm_up", _noting(ahead, listed, ForwardPasses.warm_up))
        with on_a_card(model, **LIMITS) as (llm, _):
            _report(llm, listed, ahead)


def _report(llm: LLM, listed: list[Started], ahead: set[str]) -> None:
    assert llm._runner().ops.context.backend_names[0] == "gpu"
    warm = {started.source.key for started in listed}
    listed.clear()
    serve(llm)
    later = {started.source.key: started.source for started in listed}
    late = [described(source) for key, source in later.items() if key not in warm]
    print(json.dumps({"ahead": len(ahead & warm), "warm": len(warm), "late": late}))


def _noting(ahead: set[str], listed: list[Started], warm_up: Any) -> Any:
    """A warm-up that notes first what the pass that only compiles has listed."""

    def noting(passes: ForwardPasses) -> None:
        if not ONLY_COMPILES.get():
            ahead.update(started.source.key for started in listed)
        warm_up(passes)

    return noting


def _named(function: Any, name: str) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    made.__name__ = name
    return made


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[-1], cold="--cold" in sys.argv)
