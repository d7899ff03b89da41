"""How far a memory plan is from what a process really takes.

    python tests/memory/peak.py MODEL [name=value ...]      one model with options of LLM
    python tests/memory/peak.py --table FOLDER              the cases of docs/memory.md

Each case is a process of its own: it runs a tiny model first, so that all libraries are there, and
notes its memory. Then it loads the model and serves the plan's largest load: as many requests as
there may be, their pages full, drawn at random with penalties and a logits processor, and one
prompt scored token by token; with ``structured=1`` some structured answers too. With ``opening=1``
it only loads the model and answers with one token. What counts is the highest resident memory
(VmHWM) above the note, loading included.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "golden" / "gguf-Q8_0" / "model.gguf"
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
#: Files of a folder of models, and options.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", SMALL),
    ("SmolLM2-135M-Instruct.Q4_1.gguf", {"memory": "256MiB", "max_num_seqs": 4}),
    ("SmolLM2-135M-Instruct.Q4_1.gguf", {**SMALL, "max_num_batched_tokens": 1024}),
    ("SmolLM2-135M-Instruct.Q4_1.gguf", {"max_model_len": 512, "max_num_seqs": 32}),
    ("SmolLM2-135M-Instruct.Q4_1.gguf", {"memory": "200MiB", "kv_cache_dtype": "int8"}),
    ("SmolLM2-135M-Instruct.Q4_K_M.gguf", {**SMALL, "compute": "exact"}),
    ("SmolLM2-135M-Instruct.Q8_0.gguf", {**SMALL, "kv_cache_dtype": "int4"}),
    ("smollm2-hf", SMALL),
    ("smollm2-hf", {**SMALL, "quantization": "int4"}),
    ("gemma-3-270m-q4_k_m.gguf", {"max_model_len": 1024, "max_num_seqs": 16}),
    ("gemma-3-270m-q4_k_m.gguf", {"memory": "600MiB", "skip_tokenizer_init": True}),
    ("random-1b.Q4_0.gguf", {"max_model_len": 1024, "max_num_seqs": 8}),
    (
        "random-1b.Q4_0.gguf",
        {**SMALL, "max_num_seqs": 2, "memory": "220MiB", "disk_offload": "auto"},
    ),
]


def measured(model: Path, options: dict[str, Any]) -> dict[str, float]:
    """Bytes that were ``planned``, and the ``peak`` of a process that does it."""
    command = [sys.executable, __file__, "--child", str(model), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(done.stderr)
    for line in done.stderr.splitlines():
        if line.startswith("weight cache: "):
            print(line, file=sys.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _child(model: str, options: dict[str, Any]) -> dict[str, float]:
    import gc

    sys.path.insert(0, str(ROOT))  # a bare checkout
    # Libraries like torch, which the tiny model does without.
    import tokenizers  # noqa: F401
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert CONFIG_MAPPING["llama"]  # where a folder's config.json leaves out what has a default

    from sdk import LLM
    from sdk.kernels.system import SYSTEM

    structured, opening = options.pop("structured", False), options.pop("opening", False)
    with LLM(TINY, max_model_len=64) as llm:
        _serve(llm)
        if structured:  # 4.7 MiB of llguidance's own code
            _serve_structures(llm)
    gc.collect()
    SYSTEM.trim_heap()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    llm = LLM(plan=LLM.plan(model, **options))
    plan = llm.memory_plan
    loaded = _status("VmHWM") - before
    if opening:
        llm.generate({"prompt_token_ids": [5, 9, 30]}, _one_token(), use_tqdm=False)
        if (store := llm._runner().weights.weight_store) is not None:
            store.wait()  # else nothing is kept for the next opening
            print(f"weight cache: {store}", file=sys.stderr)
    else:
        _serve(llm)
    if structured:
        _serve_structures(llm)
        plan = llm.memory_plan
    peak = _status("VmHWM") - before
    speed = 0.0 if opening else _speed(llm)
    parts = {
        name: getattr(plan, name) for name in ("weights", "workspace", "kv_cache", "tokenizer")
    }
    sizes = {"planned": plan.total, "peak": peak, "loaded": loaded, "loading": plan.loading}
    return {**sizes, **parts, "tokens_per_second": speed}


def _one_token(**options: Any) -> Any:
    from sdk import SamplingParams

    return SamplingParams(max_tokens=1, **options)


def _speed(llm: Any) -> float:
    """Tokens per second of one stream, the better of two answers."""
    from sdk import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seconds = []
    for _ in range(2):
        times = [time.perf_counter() for _ in llm.stream({"prompt_token_ids": [5, 9, 30]}, params)]
        seconds.append((times[-1] - times[0]) / (len(times) - 1))
    return round(1 / min(seconds), 1)


def _serve(llm: Any) -> None:
    """The largest load of a plan: every request there may be, every page full."""
    from sdk import SamplingParams

    plan = llm.memory_plan
    draw = random.Random(0)
    count = min(plan.max_num_seqs, plan.num_pages // 2)
    pages, more = divmod(plan.num_pages, count)  # some requests have one more
    room = min(pages * plan.page_size, plan.max_model_len) - 1
    longer = min((pages + 1) * plan.page_size, plan.max_model_len) - 1
    # The first must not end before the last has its prompt, of which a slow machine runs less in a
    # step: long answers, and prompts that fill a step together.
    least = -(-llm.config.step_tokens // count)
    answer = max(room - max(room // 4, least), 1)
    words = llm.model_config.vocab_size

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [draw.randrange(words) for _ in range(length)]}

    def unchanged(token_ids: list[int], row: Any) -> Any:
        return row

    params = SamplingParams(
        max_tokens=answer,
        ignore_eos=True,
        seed=1,
        top_p=0.9,
        repetition_penalty=1.1,
        logprobs=2,
        logits_processors=[unchanged],
    )
    lengths = [longer] * more + [room] * (count - more)
    llm.generate([prompt(length - answer) for length in lengths], params, use_tqdm=False)
    if plan.states is not None:
        _fill_snapshots(llm, words)
    scored = _one_token(prompt_logprobs=1)
    llm.generate(prompt(min(room, 256) - 1), scored, use_tqdm=False)


def _fill_snapshots(llm: Any, words: int) -> None:
    """Short conversations, each of which leaves a snapshot of its states: twice as many as there
    are places for."""
    from sdk import SamplingParams

    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for number in range(2 * llm.memory_plan.states.num_slots):
        llm.generate({"prompt_token_ids": [number % words, 3, 5]}, params, use_tqdm=False)


def _serve_structures(llm: Any) -> None:
    """The vocabulary is read, and some structures are compiled."""
    from sdk import SamplingParams

    for count in range(3):
        schema = {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": count}
        params = SamplingParams(max_tokens=60, structured_outputs={"json": schema})
        llm.generate({"prompt_token_ids": [5, 9, 30]}, params, use_tqdm=False)


def _table(folder: Path) -> None:
    print("| model | options | planned MiB | peak MiB | off by |\n|---|---|---:|---:|---:|")
    for name, options in CASES:
        found = measured(folder / name, options)
        said = ", ".join(f"{key}={value}" for key, value in options.items())
        off = found["planned"] / found["peak"] - 1
        sizes = " | ".join(f"{found[key] / 2**20:.1f}" for key in ("planned", "peak"))
        print(f"| {name} | {said} | {sizes} | {100 * off:+.1f} % |", flush=True)
        speed = found.pop("tokens_per_second")
        parts = {key: round(size / 2**20, 1) for key, size in found.items()}
        print(parts, speed, "tokens/s", file=sys.stderr)


def main(argv: list[str]) -> None:
    if argv[0] == "--child":
        print(json.dumps(_child(argv[1], json.loads(argv[2]))))
    elif argv[0] == "--table":
        _table(Path(argv[1]))
    else:
        options = dict(word.split("=", 1) for word in argv[1:])
        print(measured(Path(argv[0]), {name: _value(text) for name, text in options.items()}))


def _value(text: str) -> Any:
    """A number, True or False; else the text."""
    return int(text) if text.isdigit() else {"True": True, "False": False}.get(text, text)


if __name__ == "__main__":
    main(sys.argv[1:])
