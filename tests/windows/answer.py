"""Greedy answers of a GGUF file as JSON: run on two systems, they must be the same.

python answer.py MODEL FOLDER...     FOLDER: where packages are, for a Python without them

With ``--ids`` the prompts are token ids, and the package tokenizers cannot be imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Жили-были")
IDS = ((504, 3575, 282, 4649, 314), (1604, 468, 94, 727), (7, 42, 99, 12, 400, 250))
COUNT = 16


def main() -> None:
    arguments = [one for one in sys.argv[1:] if one != "--ids"]
    ids = len(arguments) < len(sys.argv[1:])
    model, *folders = arguments
    sys.path[:0] = folders
    if ids:
        sys.modules["tokenizers"] = None  # type: ignore[assignment]
    from sdk import LLM, SamplingParams

    found: dict[str, object] = {}
    prompts: list[Any] = [{"prompt_token_ids": list(one)} for one in IDS] if ids else list(PROMPTS)
    for compute in ("exact", "auto"):
        options = {"max_model_len": 128, "compute": compute, "num_threads": 2}
        with LLM(model, skip_tokenizer_init=ids, **options) as llm:
            params = SamplingParams(
                temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=not ids
            )
            outputs = llm.generate(prompts, params)
            found[compute] = [
                [list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)]
                for one in outputs
            ]
            found["warnings"] = list(llm.load_warnings)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
