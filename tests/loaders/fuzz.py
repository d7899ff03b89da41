"""Damaged model files: each runs, or ends in an exception of ours, soon and in little memory.

``python tests/loaders/fuzz.py --seconds 600 --seed 1`` damages the checkpoints of tests/golden, one
place or a few at a time, opens what comes out as an engine and lets it answer. It stops at the
first other exception and keeps that file; a case that hangs ends the process with its traceback.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import logging
import random
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
#: Seconds and bytes a damaged file of a megabyte may take; loading the sound one takes 0.1 s.
MAX_SECONDS, MAX_BYTES = 20, 400 << 20
_NUMBERS = (0, 1, 2, 3, 5, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, -1, -2, 0.5, 1e308, float("nan"), float("inf"), None, True, False, "", "4",
    "x" * 300, [], {}, [0], [[]], {"": {}}, [1] * 400, "int4", "float", "group", "../x",
    "\ud800",
)  # fmt: skip


def checkpoints() -> list[Path]:
    """What is damaged: GGUF files, and folders with config.json."""
    found = [*GOLDEN.glob("*/model.gguf"), *(path.parent for path in GOLDEN.glob("**/config.json"))]
    return sorted(found)


def damaged(source: Path, to: Path, rng: random.Random) -> str:
    """A damaged copy of ``source`` at ``to``; returns what was done."""
    if source.is_file():
        to.write_bytes(_damage_bytes(source.read_bytes(), rng, 40_000))
        return f"{source.parent.name}: bytes of the file"
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("golden.npz", "origin.json"))
    files = [path for path in to.iterdir() if path.suffix in (".json", ".safetensors")]
    names = sorted(path.name for path in files if "token" not in path.name or rng.random() < 0.2)
    path = to / rng.choice([*names, "config.json"])
    if path.suffix == ".json":
        path.write_text(_damage_json(path.read_text(), rng))
        return f"{source.name}: {path.name}"
    return f"{source.name}: {_damage_safetensors(path, rng)}"


def _damage_safetensors(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    kind = rng.randrange(4)
    if kind == 0:
        header = _damage_json(data[8 : 8 + size].decode(), rng).encode("utf-8", "surrogatepass")
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
        return "values of the header"
    if kind == 1:
        path.write_bytes(_damage_bytes(data, rng, 8 + size))
        return "bytes of the header"
    if kind == 2:
        header = json.loads(data[8 : 8 + size])
        name = rng.choice([name for name in header if name != "__metadata__"])
        begin, end = header[name]["data_offsets"]
        body = bytearray(data)
        for _ in range(rng.choice((1, 4, 64))):
            at = 8 + size + begin + rng.randrange(max(end - begin, 1))
            if at < len(body):
                body[at] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(body)
        return f"values of {name}"
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([name for name in header if name != "__metadata__"])
    header[f"{name}{rng.choice(('x', '_inv', '.SCB', '.qweight'))}"] = header.pop(name)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return f"the name of {name}"


def _damage_bytes(data: bytes, rng: random.Random, head: int) -> bytes:
    """Mostly within the first ``head`` bytes."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(head, len(body)) if rng.random() < 0.9 else len(body))
        kind = rng.randrange(6)
        if kind == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            body[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
        elif kind == 2:
            body[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del body[at : at + rng.choice((1, 8, 100))]
        elif kind == 4:
            body[at:at] = body[at : at + rng.choice((1, 8, 100))]
        else:
            del body[rng.randrange(len(body)) :]
        if not body:
            break
    return bytes(body)


def _damage_json(text: str, rng: random.Random) -> str:
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 3))):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        elif rng.random() < 0.2 and isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1))
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return json.dumps(value)


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every value in lists and objects, as its holder and key."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = value
    elif isinstance(value, list):
        keys = range(min(len(value), 8))
    for key in keys:
        yield value, key
        if depth < 6:
            yield from _places(value[key], depth + 1)


def answer(path: Path) -> None:
    """Load ``path`` and generate three tokens. :raises SdkError: where that is refused."""
    from sdk import LLM, SamplingParams

    bare = path.is_dir() and not (path / "tokenizer.json").exists()
    room = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 32}
    with LLM(path, num_threads=1, skip_tokenizer_init=bare, **room) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))


def peak_bytes() -> int:
    """The largest resident size since the last :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def fuzz(seed: int, more: Callable[[int], bool], keep: Path) -> Counter[str]:
    """Damaged files until ``more(count)`` is false; returns how they ended, counted.

    :raises AssertionError: for one that took too much time or memory, or ended otherwise; it then
        lies in ``keep``.
    """
    from sdk import SdkError

    rng = random.Random(seed)
    sources = checkpoints()
    ends: Counter[str] = Counter()
    answer(GOLDEN / "gguf-Q4_0" / "model.gguf")  # all imports
    while more(sum(ends.values())):
        source = rng.choice(sources)
        keep.mkdir(parents=True, exist_ok=True)
        to = keep / ("model.gguf" if source.is_file() else "model")
        what = damaged(source, to, rng)
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        forget_peak()
        before, start = peak_bytes(), time.perf_counter()
        try:
            answer(to)
            ends["answered"] += 1
        except SdkError as error:
            ends[type(error).__name__] += 1
            assert str(error), f"{what}: an error without words"
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}; see {to}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        grown, seconds = peak_bytes() - before, time.perf_counter() - start
        assert grown < MAX_BYTES, f"{what}: {grown >> 20} MiB; see {to}"
        assert seconds < MAX_SECONDS, f"{what}: {seconds:.0f} s; see {to}"
        shutil.rmtree(keep)
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # transformers has much to say about damaged configs
    stop = time.monotonic() + args.seconds
    keep = Path(tempfile.mkdtemp(prefix="embedlm-fuzz-")) / "case"
    ends = fuzz(args.seed, lambda _: time.monotonic() < stop, keep)
    print(f"{sum(ends.values())} damaged files: {dict(ends)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
