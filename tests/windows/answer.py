"""Greedy answers of a GGUF file as JSON: run on two systems, they must be the same.

python answer.py MODEL FOLDER...     FOLDER: where packages are, for a Python without them
"""

from __future__ import annotations

import json
import sys

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Жили-были")
COUNT = 16


def main() -> None:
    model, *folders = sys.argv[1:]
    sys.path[:0] = folders
    from sdk import LLM, SamplingParams

    found: dict[str, object] = {}
    for compute in ("exact", "auto"):
        options = {"max_model_len": 128, "compute": compute, "num_threads": 2}
        with LLM(model, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
            outputs = llm.generate(list(PROMPTS), params)
            found[compute] = [
                [list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)]
                for one in outputs
            ]
            found["warnings"] = list(llm.load_warnings)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
