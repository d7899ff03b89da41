"""The tokenizer of a Hugging Face folder.

``tokenizer.json`` holds the algorithm and the vocabulary. Small JSON files next to it have the
special tokens, the tokens that end an answer, and the chat template; each is optional, and none is
executed. Without it, a SentencePiece BPE model (``tokenizer.model``), that of SigLIP and the
vocabulary of an RWKV are read directly; other SentencePiece models and ``vocab.json`` +
``merges.txt`` are converted by transformers, which is imported only for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.kernels.lazy_torch import import_torch
from sdk.kernels.packages import missing, package
from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.json_file import TOKENIZER_DIGITS, read_json
from sdk.loaders.quiet import transformers_to_our_log
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.end_tokens import end_token_ids
from sdk.loaders.tokenizer.fim import fim_tokens
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.loaders.tokenizer.json_parts import (
    MAX_TOKENIZER_BYTES,
    check_parts,
    load_tokenizer_json,
)
from sdk.loaders.tokenizer.metadata import MAX_TEMPLATE_BYTES
from sdk.loaders.tokenizer.rwkv import VOCABULARY, folder_metadata
from sdk.loaders.tokenizer.sentencepiece import sentencepiece_metadata
from sdk.loaders.tokenizer.siglip import SIGLIP, siglip_tokenizer
from sdk.quant.errors import CheckpointError
from sdk.quant.tokenizer import Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(path: str | Path) -> Tokenizer | None:
    """The tokenizer in a folder, or None if it has no tokenizer files. Never runs code from it.

    :raises CheckpointError: a file is damaged.
    """
    folder = Path(path)
    config = _read_json(folder, "tokenizer_config.json")
    if folder_file(folder, "tokenizer.json") is None:
        tokenizer = _from_rwkv(folder, config) or _from_sentencepiece(folder, config)
        if tokenizer is not None:
            return tokenizer
    backend = _backend(folder)
    if backend is None:
        return None
    size = backend.get_vocab_size(with_added_tokens=True)
    names = _special_names(folder, config)
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    special |= {i for name in names.values() if (i := backend.token_to_id(name)) is not None}
    ends = end_token_ids(backend.token_to_id, special.__contains__)
    special |= ends
    eos = ends | _configured_eos(folder, size)
    named_eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    default, templates = _templates(folder, config)
    facts = TokenizerFacts(
        bos_token_id=bos,
        eos_token_ids=eos if named_eos is None else eos | {named_eos},
        special_ids=frozenset(special),
        chat_template=default,
        chat_templates=templates,
        names=names,
        fim=fim_tokens(backend.token_to_id),
    )
    add_bos = config.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        where = folder / "tokenizer_config.json"
        raise CheckpointError(f"{where}: add_bos_token: expected a bool, found {add_bos!r}")
    return JsonTokenizer(backend, facts, str(folder / "tokenizer.json"), add_bos=add_bos)


def _from_rwkv(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of an RWKV's vocabulary, if the folder has one."""
    file = folder_file(folder, VOCABULARY)
    if file is None:
        return None
    size = _read_json(folder, "config.json").get("vocab_size")
    metadata = folder_metadata(file, size if type(size) is int else 1 << 16)
    default, _ = _templates(folder, config)
    if default is not None:
        metadata["tokenizer.chat_template"] = default
    return tokenizer_from_gguf(metadata, str(file))


def _from_sentencepiece(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of ``tokenizer.model``, if that file has all the information needed."""
    file = folder_file(folder, "tokenizer.model")
    metadata = sentencepiece_metadata(file) if file is not None else None
    if metadata is None or config.get("legacy") is False:
        return None
    count = len(metadata["tokenizer.ggml.tokens"])
    added = config.get("added_tokens_decoder") or {}
    if (folder / "added_tokens.json").is_file() or not set(added) <= set(map(str, range(count))):
        return None  # tokens that are not in the model file
    default, templates = _templates(folder, config)
    if default is not None:
        metadata["tokenizer.chat_template"] = default
    for name, source in templates.items():
        metadata[f"tokenizer.chat_template.{name}"] = source
    for key, value in _special_names(folder, config).items():
        if key != "pad_token" and value in metadata["tokenizer.ggml.tokens"]:
            name = key.replace("unk_token", "unknown_token")
            place = metadata["tokenizer.ggml.tokens"].index(value)
            metadata[f"tokenizer.ggml.{name}_id"] = place
    for key in ("add_bos_token", "add_eos_token"):
        if config.get(key) is not None:
            metadata[f"tokenizer.ggml.{key}"] = config[key]
    eos = _configured_eos(folder, len(metadata["tokenizer.ggml.tokens"]))
    return tokenizer_from_gguf(metadata, str(file), extra_eos=eos)


def _backend(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of the folder, or None."""
    file = folder_file(folder, "tokenizer.json")
    if file is not None:
        return load_tokenizer_json(file, str(file))
    config = _read_json(folder, "tokenizer_config.json")
    pieces = folder_file(folder, "spiece.model")
    if pieces is not None and config.get("tokenizer_class") == SIGLIP:
        return siglip_tokenizer(pieces, config)
    known = (
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.json",
        "vocab.txt",
    )
    found = [name for name in known if folder_file(folder, name) is not None]
    if not found:
        return None
    for other in folder.iterdir():  # transformers reads those it knows
        if other.suffix != ".safetensors":
            folder_file(folder, other.name)
    import_torch()  # transformers would, but Ctrl-C must not meet it there
    tokenizer_file = folder / found[0]
    transformers = package("transformers", f"{tokenizer_file}: to convert it needs")
    try:
        with transformers_to_our_log():
            converted = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        backend = getattr(converted, "backend_tokenizer", None)
        if backend is not None:
            check_parts(backend, str(tokenizer_file))
    except CheckpointError:
        raise
    except ImportError as error:  # of what the conversion needs: sentencepiece, protobuf, tiktoken
        raise missing(error, f"{tokenizer_file}: to convert it needs") from error
    except Exception as error:  # it can fail in many ways
        raise CheckpointError(f"{tokenizer_file}: expected a tokenizer, found {error}") from None
    if backend is None:
        raise CheckpointError(
            f"{tokenizer_file}: expected a tokenizer that can be written as tokenizer.json, "
            f"found {type(converted).__name__}; save a fast one with save_pretrained"
        )
    return backend


def _special_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as spelled in the two configuration files."""
    values = {**_read_json(folder, "special_tokens_map.json"), **config}
    names: dict[str, str] = {}
    for key in _NAMES:
        value = values.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            names[key] = value
        elif value is not None:
            where = folder / "tokenizer_config.json"
            raise CheckpointError(f"{where}: {key}: expected a string, found {value!r}")
    return names


def _configured_eos(folder: Path, size: int) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder, name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                where = folder / name
                raise CheckpointError(f"{where}: eos_token_id: expected ids, found {token_id!r}")
            if token_id < size:
                found.add(token_id)
    return frozenset(found)


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The default template and the named ones: files first, then tokenizer_config.json."""
    where = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
                raise CheckpointError(f"{where}: chat_template: expected names and templates")
            named[item["name"]] = _checked(item.get("template"), where)
    elif value is not None:
        named["default"] = _checked(value, where)
    for more in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        file = folder_file(folder, f"{more.parent.name}/{more.name}")
        if file is not None:
            named[file.stem] = _read_template(file)
    file = folder_file(folder, "chat_template.jinja")
    if file is not None:
        named["default"] = _read_template(file)
    return named.pop("default", None), named


def _read_template(file: Path) -> str:
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        size = file.stat().st_size
        raise CheckpointError(f"{file}: expected at most {MAX_TEMPLATE_BYTES} bytes, found {size}")
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: expected UTF-8 text, found {error}") from None


def _checked(source: object, where: Path) -> str:
    if not isinstance(source, str):
        kind = type(source).__name__
        raise CheckpointError(f"{where}: chat_template: expected a string, found {kind}")
    size = len(source.encode("utf-8", "replace"))
    if size > MAX_TEMPLATE_BYTES:
        limit = f"expected at most {MAX_TEMPLATE_BYTES} bytes"
        raise CheckpointError(f"{where}: chat_template: {limit}, found {size}")
    return source


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder; empty if there is no such file."""
    file = folder_file(folder, name)
    if file is None:
        return {}
    return read_json(file, MAX_TOKENIZER_BYTES, max_digits=TOKENIZER_DIGITS)
