"""Image patches per second of towers of real shapes, here and in other engines.

``python -m tests.images.towers gemma3 --layers 4 --against transformers,llama.cpp=PEER/bin/python``

Random weights in a folder and, for llama.cpp, in a GGUF file with its ``mmproj`` file. Every engine
encodes the same number of patches in a process of its own, one after the other, in rounds. Beside
the time on the clock stands the CPU time of all threads, which other work on the machine changes
less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The encoders of Gemma 3 at 896 pixels (SigLIP-400M), of Qwen3-VL 2B at 1,024, and of SigLIP 2
#: (so400m) and CLIP (ViT-L/14) beside encoders of texts, for which there are no GGUF files.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
    "qwen3_vl": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 64,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 2],
    },
    "siglip": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 16,
    },
    "clip": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
}
SIDES = {"gemma3": 896, "qwen3_vl": 1024, "siglip": 384, "clip": 224}


def patches(name: str) -> int:
    return (SIDES[name] // SHAPES[name]["patch_size"]) ** 2


def write(name: str, layers: int, dtype: str, folder: Path) -> None:
    """The folder of a model with a tiny text part, and both GGUF files."""
    import torch

    from tests.gguf_models import ARRAY, F32, I32, STRING, U32, save_gguf
    from tests.models.tiny_mmproj import FAMILIES, mmproj_file, text_file
    from tests.models.tiny_vision import DUAL, MODELS, vision_model

    if name in DUAL:
        own = {**DUAL[name]["vision_config"], **SHAPES[name], "num_hidden_layers": layers}
        vision_model(name, vision_config=own).to(getattr(torch, dtype)).save_pretrained(folder)
        return
    vision = {**MODELS[name]["vision_config"], **SHAPES[name]}
    vision["depth" if "depth" in vision else "num_hidden_layers"] = layers
    text = {**MODELS[name]["text_config"], "vocab_size": 300}
    changes: dict[str, Any] = {"vision_config": vision, "text_config": text}
    if name == "gemma3":
        changes["mm_tokens_per_image"] = 256
    model = vision_model(name, **changes)
    file_of_text = text_file(model, name)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*(f"t{i}" for i in range(len(tokens), 299)), FAMILIES[name][2]]
    types = [2, 3, 3, *[6] * 256, *[1] * 40, 3]
    file_of_text.metadata |= {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * 300)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }
    save_gguf(folder / "model.gguf", file_of_text)
    file = mmproj_file(model, name)
    for key, (shape, _, data) in file.tensors.items():
        if len(shape) == 2 and "position" not in key:
            values = torch.frombuffer(bytearray(data), dtype=torch.float32)
            file.tensors[key] = (shape, 1, values.half().numpy().tobytes())
    save_gguf(folder / "mmproj-model-f16.gguf", file)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def timed(run: Callable[[], object], rounds: int) -> None:
    run()
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


def run_embedlm(name: str, folder: Path, threads: int, rounds: int) -> None:
    from sdk.kernels.operators.ops import Ops
    from sdk.loaders.open import open_checkpoint
    from sdk.models.parallel import Mesh
    from sdk.models.vision.tower import build_tower
    from tests.models.tiny_vision import image

    ops = Ops(num_threads=threads)
    tower = build_tower(open_checkpoint(folder), Mesh(), ops)
    assert tower is not None
    own = image(tower.config, [(SIDES[name], SIDES[name])], 1)

    def encode() -> None:
        found = tower.begin([own])
        while not found.advance(1000):
            pass
        found.rows()

    timed(encode, rounds)
    ops.close()


def run_transformers(name: str, folder: Path, threads: int, rounds: int, dtype: str) -> None:
    import torch
    import transformers

    from sdk.models.vision.family import vision_of
    from tests.models.tiny_vision import expected_rows, image

    torch.set_num_threads(threads)
    dual = name in ("clip", "siglip")
    kind = transformers.AutoModel if dual else transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    config = vision_of(model.config.to_dict())
    assert config is not None
    own = image(config, [(SIDES[name], SIDES[name])], 1)
    timed(lambda: expected_rows(model, config, [own]), rounds)


def run_llama_cpp(name: str, folder: Path, threads: int, rounds: int) -> None:
    """In the environment of llama-cpp-python, which has none of our packages."""
    import ctypes

    import llama_cpp
    from llama_cpp import mtmd_cpp as mtmd

    text = llama_cpp.Llama(str(folder / "model.gguf"), n_threads=threads, verbose=False)
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.print_timings = False, threads, False
    mmproj = str(folder / "mmproj-model-f16.gguf").encode()
    context = mtmd.mtmd_init_from_file(mmproj, text.model, params)
    side = SIDES[name]
    pixels = (ctypes.c_uint8 * (3 * side * side))(*[i * 37 % 251 for i in range(3 * side * side)])
    bitmap = mtmd.mtmd_bitmap_init(side, side, pixels)
    marker = mtmd.mtmd_default_marker()
    prompt = mtmd.mtmd_input_text(marker, len(marker), False, True)
    chunks = mtmd.mtmd_input_chunks_init()
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    status = mtmd.mtmd_tokenize(context, chunks, ctypes.byref(prompt), bitmaps, 1)
    assert status == 0, f"mtmd_tokenize: {status}"
    count = mtmd.mtmd_input_chunks_size(chunks)
    found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(count)]
    [own] = [one for one in found if mtmd.mtmd_input_chunk_get_tokens_image(one)]

    def encode() -> None:
        assert mtmd.mtmd_encode_chunk(context, own) == 0

    timed(encode, rounds)


def measure(options: argparse.Namespace, folder: Path) -> None:
    write(options.tower, options.layers, options.dtype, folder)
    engines = ["embedlm", *filter(None, options.against.split(","))]
    found: dict[str, list[list[float]]] = {engine: [] for engine in engines}
    for _ in range(options.rounds):
        for engine in engines:
            kind, _, python = engine.partition("=")
            arguments = [options.tower, "--run", kind, "--folder", str(folder)]
            arguments += ["--threads", str(options.threads), "--dtype", options.dtype]
            command = [sys.executable, "-m", "tests.images.towers", *arguments]
            if python:
                command = [python, __file__, *arguments]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                print(f"{kind}: {out.stderr[-2000:]}")
                continue
            found[engine] += map(json.loads, out.stdout.splitlines())
    for engine, times in found.items():
        if times:
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            rate, kind = patches(options.tower) / wall, engine.partition("=")[0]
            print(f"{kind:14} {rate:8.0f} patches/s  {wall:.3f} s, CPU {cpu:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tower", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of the folder, and transformers")
    parser.add_argument("--against", default="", help="transformers, llama.cpp=PYTHON")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name, folder, threads = options.tower, options.folder, options.threads
    if options.run == "embedlm":
        run_embedlm(name, folder, threads, 1)
    elif options.run == "transformers":
        run_transformers(name, folder, threads, 1, options.dtype)
    elif options.run == "llama.cpp":
        run_llama_cpp(name, folder, threads, 1)
    else:
        with tempfile.TemporaryDirectory() as own:
            measure(options, Path(own))


if __name__ == "__main__":
    main()
