"""A context of 131,072 tokens for real, with a type of keys and values, in a model of one or two
layers.

    python tests/memory/long_contexts.py copying|1b int8 FOLDER [--tokens 131008] [--seconds N]
    python tests/memory/long_contexts.py copying|1b int8 FOLDER --timed

``copying`` is tests/needles.py; ``1b`` has one layer of Llama 3.2 1B's shapes with random weights,
and an MLP as wide as the layer, whose scores vary enough that a few of all keys get most of a
query's weight. The first form computes the prompt in pieces, each of which finds the ones before in
the cache, and prints a line of JSON: CPU seconds of each piece, the peak of memory above the
libraries beside the plan, what was asked for at positions all over the context and how many answers
are right (``copying``) or how far log-probabilities are from those of transformers' rotations and
float32 attention (``1b``), a hit with another end, and the snapshot in FOLDER on its way to the
disk and back to another engine. After N seconds it keeps what it has computed, and the same command
goes on from there. The second form needs a machine that does nothing else: it restores that
snapshot, decodes to the end of the context beside a plain read, and then computes the last 4,096
tokens again, with another beginning of them, while another request decodes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # a bare checkout

from tests import needles
from tests.memory import peak

#: The most tokens of a request: those of Llama 3.1 and 3.2.
CONTEXT = 131_072
_PIECE = 8_192
_OTHER_END, _LAST = 100, 4_096
_SHAPE_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4_096,
    "hidden_size": 2_048,
    "intermediate_size": 2_048,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}
#: The standard deviation of a query's scores: of 131,072 keys a few then have most of the weight.
_SCORES = 5.0


def folder_1b(folder: Path) -> Path:
    """Write the model ``1b`` and return its folder."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(11)
    hidden, mlp, heads, keys = 2_048, 2_048, 32 * 64, 8 * 64

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * deviation).half()

    one, name = hidden**-0.5, "model.layers.0"
    sharp = _SCORES**0.5 * one
    ones = torch.ones(hidden).half()
    tensors = {
        "model.embed_tokens.weight": normal(_SHAPE_1B["vocab_size"], hidden, one),
        "model.norm.weight": 4 * ones,
        f"{name}.input_layernorm.weight": ones.clone(),
        f"{name}.post_attention_layernorm.weight": ones.clone(),
        f"{name}.self_attn.q_proj.weight": normal(heads, hidden, sharp),
        f"{name}.self_attn.k_proj.weight": normal(keys, hidden, sharp),
        f"{name}.self_attn.v_proj.weight": normal(keys, hidden, one),
        f"{name}.self_attn.o_proj.weight": normal(hidden, heads, 0.1 * one),
        f"{name}.mlp.gate_proj.weight": normal(mlp, hidden, one),
        f"{name}.mlp.up_proj.weight": normal(mlp, hidden, one),
        f"{name}.mlp.down_proj.weight": normal(hidden, mlp, 0.1 * mlp**-0.5),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_SHAPE_1B))
    return folder


class Questions:
    """A prompt, and what an engine is asked about positions all over it."""

    def __init__(self, model: str, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        at = [1, 127, 8_191, 65_535, 100_001, tokens - 700, tokens - 64, tokens - 5]
        self.at = [max(1, min(one, tokens - 5 * (8 - n))) for n, one in enumerate(at)]
        if model == "copying":
            self.prompt = needles.haystack(tokens, self.at)
            self.vocab = needles.FILLERS
        else:
            self.vocab = int(_SHAPE_1B["vocab_size"])
            draw = random.Random(5)
            self.prompt = [draw.randrange(self.vocab) for _ in range(tokens)]

    def other(self, count: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self.vocab) for _ in range(count)]

    def check(self, llm: Any, folder: Path) -> dict[str, Any]:
        if self.model == "copying":
            return self._copies(llm)
        return self._differences(llm, folder)

    def _copies(self, llm: Any) -> dict[str, Any]:
        right, least = 0, 0.0
        for number in range(needles.NEEDLES):
            name, *rest = needles.needle(number)
            found = _ask(llm, [*self.prompt, name], len(rest), logprobs=1)
            right += list(found.token_ids) == rest
            for token, known in zip(found.token_ids, found.logprobs, strict=True):
                least = min(least, known[token].logprob)
        return {"copies": f"{right} of {needles.NEEDLES}", "least_logprob": round(least, 4)}

    def _differences(self, llm: Any, folder: Path) -> dict[str, Any]:
        counts = [*self.at[1:], self.tokens]
        reference = _Reference(folder, self.prompt)
        largest, same = [], 0
        for count in counts:
            expected = reference.logprobs(count)
            found = _ask(llm, self.prompt[:count], 1, logprobs=20)
            known = found.logprobs[0]
            largest.append(max(abs(one.logprob - float(expected[t])) for t, one in known.items()))
            same += found.token_ids[0] == int(expected.argmax())
        return {
            "after_tokens": counts,
            "largest_differences": [round(one, 5) for one in largest],
            "same_tokens": f"{same} of {len(counts)}",
            "spread_of_logits": round(float(expected.std()), 3),
        }


class _Reference:
    """The last token of a prompt, by transformers' modules and attention over all keys at once."""

    def __init__(self, folder: Path, prompt: list[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layer = self.model.model.layers[0]
        self.prompt = torch.tensor(prompt)
        with torch.no_grad():  # one row for each token of the vocabulary
            normed = self.layer.input_layernorm(self.model.model.embed_tokens.weight)
            self.keys = self.layer.self_attn.k_proj(normed).unflatten(1, (8, 64))
            self.values = self.layer.self_attn.v_proj(normed).unflatten(1, (8, 64))
            self.queries = self.layer.self_attn.q_proj(normed).unflatten(1, (32, 64))

    def logprobs(self, count: int) -> Any:
        import torch
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        model, ids = self.model.model, self.prompt[:count]
        with torch.no_grad():
            x = model.embed_tokens.weight[ids[-1]]
            turns = [part[0] for part in model.rotary_emb(x, torch.arange(count)[None])]
            heads = []
            for head in range(8):  # one at a time: 131,072 keys are 32 MiB each
                k, v = self.keys[ids, head], self.values[ids, head]
                q = self.queries[ids[-1], 4 * head : 4 * head + 4]
                k = apply_rotary_pos_emb(k[None], k[None], *turns, unsqueeze_dim=0)[1][0]
                last = [part[-1:] for part in turns]
                q = apply_rotary_pos_emb(q[None], q[None], *last, unsqueeze_dim=0)[0][0]
                heads.append(torch.softmax(q @ k.T / 8, dim=-1, dtype=torch.float64).float() @ v)
            x = x + self.layer.self_attn.o_proj(torch.cat(heads).flatten())
            x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
            return torch.log_softmax(self.model.lm_head(model.norm(x)), dim=-1)


def _ask(llm: Any, prompt: list[int], tokens: int, **options: Any) -> Any:
    from sdk import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]


def _opened(folder: Path, kv: str, requests: int = 1) -> Any:
    """With pages for ``requests`` contexts, so that one fills all that is planned."""
    from sdk import LLM

    return LLM(
        str(folder),
        kv_cache_dtype=kv,
        max_model_len=CONTEXT,
        max_num_seqs=requests,
        num_threads=2,
        skip_tokenizer_init=True,
    )


@contextmanager
def _timed(into: dict[str, Any], name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into[f"{name}_s"] = round(time.perf_counter() - wall, 3)
    into[f"{name}_cpu_s"] = round(time.process_time() - cpu, 3)


def _libraries() -> None:
    """Load what the first engine of a process loads, so that it does not count as the model's."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from sdk import LLM
    from sdk.kernels.system import SYSTEM

    with LLM(peak.TINY, max_model_len=64, skip_tokenizer_init=True) as llm:
        _ask(llm, [5, 9, 30], 2, logprobs=1)
    gc.collect()
    SYSTEM.trim_heap()


def filled(model: str, kv: str, work: Path, tokens: int, seconds: float) -> dict[str, Any]:
    """The first form."""
    folder = _model(model, work)
    asked = Questions(model, tokens)
    _libraries()
    before = peak._status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    out: dict[str, Any] = {"model": model, "kv": kv, "tokens": tokens}
    with closing(_opened(folder, kv)) as llm:
        plan = llm.memory_plan
        pieces = _pieces(llm, asked, _snapshot(model, kv, work), seconds)
        if sum(count for count, _ in pieces) < tokens:
            return {**out, "pieces": pieces}
        cold = sum(cpu for _, cpu in pieces)
        out |= {"pieces_cpu_s": [cpu for _, cpu in pieces], "cold_cpu_s": round(cold, 2)}
        out["peak_mib"] = (peak._status("VmHWM") - before) >> 20
        out["planned_mib"], out["pool_mib"] = plan.total >> 20, plan.kv_cache >> 20
        out["bytes_of_token"] = plan.page_bytes / plan.page_size
        hits = []
        for seed in range(3):
            start = time.process_time()
            end = asked.other(_OTHER_END, seed)
            _ask(llm, [*asked.prompt[:-_OTHER_END], *end], 1)
            hits.append(time.process_time() - start)
        out["hit_cpu_s"] = round(min(hits), 3)
        out["cold_by_hit"] = round(cold / min(hits))
        out |= asked.check(llm, folder)
        answer = _ask(llm, asked.prompt, 33, logprobs=1)
        snapshot, path = (
            llm.snapshot({"prompt_token_ids": asked.prompt}),
            _snapshot(model, kv, work),
        )
        with _timed(out, "save"):
            snapshot.save(path)
            os.sync()
        del snapshot
    out["snapshot_mib"] = path.stat().st_size >> 20
    with closing(_opened(folder, kv)) as llm:
        with _timed(out, "restore"):
            out["restored"] = llm.restore(path)
        with _timed(out, "answer"):
            again = _ask(llm, asked.prompt, 33, logprobs=1)
        out["same_after_restore"] = (again.token_ids, again.logprobs) == (
            answer.token_ids,
            answer.logprobs,
        )
    return out


def _pieces(llm: Any, asked: Questions, path: Path, seconds: float) -> list[tuple[int, float]]:
    """Compute the prompt, or go on where a call before this one stopped. Returns the tokens and
    CPU seconds of each piece; when ``seconds`` are over, of those until now, which are kept.
    """
    part, known = path.with_suffix(".part"), path.with_suffix(".json")
    pieces: list[tuple[int, float]] = []
    if part.exists():
        pieces = [(count, cpu) for count, cpu in json.loads(known.read_text())]
        llm.restore(part)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    end, until = sum(count for count, _ in pieces), time.monotonic() + seconds
    while end < asked.tokens:
        count = min(_PIECE, asked.tokens - end)
        start, end = time.process_time(), end + count
        _ask(llm, asked.prompt[:end], 1)
        pieces.append((count, round(time.process_time() - start, 2)))
        if time.monotonic() > until and end < asked.tokens:
            llm.snapshot({"prompt_token_ids": asked.prompt[:end]}).save(part)
            known.write_text(json.dumps(pieces))
            return pieces
    part.unlink(missing_ok=True)
    return pieces


def timed(model: str, kv: str, work: Path, tokens: int) -> dict[str, Any]:
    """The second form."""
    from sdk.kernels.cpu.probe import read_bandwidth

    asked, out = Questions(model, tokens), {"model": model, "kv": kv, "tokens": tokens}
    with closing(_opened(_model(model, work), kv, requests=2)) as llm:
        llm.restore(_snapshot(model, kv, work))
        count = min(64, CONTEXT - tokens)
        _ask(llm, asked.prompt, count)
        reads, shares, times = [], [], []
        for _ in range(5):
            reads.append(read_bandwidth(2))
            marks = [time.perf_counter() for _ in _stream(llm, asked.prompt, count)]
            reads.append(read_bandwidth(2))
            times.append((marks[-1] - marks[0]) / (len(marks) - 1))
            plan = llm.memory_plan
            nbytes = plan.read + tokens * plan.page_bytes // plan.page_size
            shares.append(nbytes / times[-1] / statistics.mean(reads[-2:]))
        out["token_ms"] = [round(1e3 * one, 3) for one in times]
        out["reads_gb_s"] = [round(one / 1e9, 1) for one in reads]
        out["shares"] = [round(one, 3) for one in shares]
        out["share"] = round(statistics.median(shares), 3)
        for name, seed in (("first", 7), ("second", 8)):
            out[f"{name}_gaps_s"] = _gaps(llm, asked, seed)
    return out


def _stream(llm: Any, prompt: list[int], tokens: int) -> Iterator[Any]:
    from sdk import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return iter(llm.stream({"prompt_token_ids": prompt}, params))


def _gaps(llm: Any, asked: Questions, seed: int) -> dict[str, Any]:
    """Between two tokens of a request while another computes the last part of the context."""
    marks: list[float] = []
    done, ready = threading.Event(), threading.Event()

    def neighbour() -> None:
        for _ in _stream(llm, asked.other(40, seed), 20_000):
            marks.append(time.perf_counter())
            if len(marks) > 20:
                ready.set()
            if done.is_set():
                return

    other = threading.Thread(target=neighbour)
    other.start()
    ready.wait(30)
    prompt = [*asked.prompt[:-_LAST], *asked.other(_LAST, seed)]
    start = time.perf_counter()
    _ask(llm, prompt, 1)
    end = time.perf_counter()
    done.set()
    other.join()
    within = [one for one in marks if start <= one <= end]
    gaps = sorted((b - a for a, b in pairwise(within)), reverse=True)
    return {
        "seconds": round(end - start, 2),
        "tokens": len(within),
        "largest": [round(one, 3) for one in gaps[:3]],
    }


def _model(model: str, work: Path) -> Path:
    folder = work / model
    if not folder.exists():
        (needles.copying_llama if model == "copying" else folder_1b)(folder)
    return folder


def _snapshot(model: str, kv: str, work: Path) -> Path:
    return work / f"{model}-{kv.replace('/', '-')}.kv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["copying", "1b"])
    parser.add_argument("kv")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=CONTEXT - 64)
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    given = args.model, args.kv, args.folder, args.tokens
    found = timed(*given) if args.timed else filled(*given, args.seconds)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
