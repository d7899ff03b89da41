"""CLIP and SigLIP from folders to vectors, beside transformers: texts and images in one space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sdk import LLM, RequestError
from tests.dual_models import TEXTS, their_images, their_texts, their_tokenizer, write_dual
from tests.models.test_vision_formats import rewrite_fp8
from tests.vision_prompts import picture

EXACT: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "compute": "exact",
    "num_threads": 1,
}
PICTURES = [picture(40, 61, 1), picture(97, 30, 2), picture(56, 56, 3), picture(1, 9, 4)]


class Dual(NamedTuple):
    kind: str
    folder: Path
    theirs: Any
    llm: LLM


@pytest.fixture(scope="module", params=["clip", "siglip", "siglip2", "naflex"])
def dual(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dual]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_dual(request.param, folder)
    with LLM(str(folder), **EXACT) as llm:
        yield Dual(request.param, folder, theirs, llm)


def seen(image: Any, text: str = "") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image}}


def vectors(outputs: list[Any]) -> NDArray[np.float32]:
    return np.array([one.embedding for one in outputs], np.float32)


def test_texts_have_the_vectors_of_transformers(dual: Dual) -> None:
    found = dual.llm.embed(TEXTS)
    ids = their_tokenizer(dual.kind, dual.folder)(TEXTS).input_ids
    for own, other in zip(found, ids, strict=True):
        assert list(own.prompt_token_ids[: len(other)]) == other
    wanted = their_texts(dual.kind, dual.folder, dual.theirs, TEXTS).numpy()
    assert np.abs(vectors(found) - wanted).max() < 2e-6
    assert ((vectors(found) * wanted).sum(1) >= 0.99999).all()


def test_images_have_the_vectors_of_transformers(dual: Dual) -> None:
    """Images of odd sizes, in one batch."""
    found = vectors(dual.llm.embed([seen(one) for one in PICTURES]))
    wanted = their_images(dual.kind, dual.theirs, PICTURES).numpy()
    assert np.abs(found - wanted).max() < 2e-6
    assert ((found * wanted).sum(1) >= 0.99999).all()
    assert found.shape[1] == (48 if dual.kind == "clip" else 72)


def test_vectors_have_the_same_bits_alone_and_among_others(dual: Dual) -> None:
    mixed = [TEXTS[0], seen(PICTURES[0]), TEXTS[1], seen(PICTURES[1]), seen(PICTURES[0])]
    together = dual.llm.embed(mixed)
    for prompt, own in zip(mixed, together, strict=True):
        [alone] = dual.llm.embed(prompt)
        assert alone.embedding == own.embedding
    assert together[1].embedding == together[4].embedding != together[3].embedding


def test_labels_of_a_caller_have_the_probabilities_of_transformers(dual: Dual) -> None:
    found = dual.llm.classify([seen(one) for one in PICTURES[:2]], labels=TEXTS)
    logits = dual.llm.classify(seen(PICTURES[0]), labels=TEXTS, use_activation=False)
    texts = their_texts(dual.kind, dual.folder, dual.theirs, TEXTS)
    images = their_images(dual.kind, dual.theirs, PICTURES[:2])
    scale = dual.theirs.logit_scale.exp()
    wanted = (images @ texts.T * scale + getattr(dual.theirs, "logit_bias", 0.0)).detach()
    assert np.abs(np.array(logits[0].probs) - wanted[0].numpy()).max() < 1e-5
    chances = wanted.softmax(-1) if dual.kind == "clip" else wanted.sigmoid()
    for own, other in zip(found, chances, strict=True):
        assert own.labels == TEXTS and own.label == TEXTS[int(other.argmax())]
        assert np.abs(np.array(own.probs) - other.numpy()).max() < 1e-5


def test_scores_are_cosines_of_texts_and_images(dual: Dual) -> None:
    texts = vectors(dual.llm.embed(TEXTS[:3]))
    images = vectors(dual.llm.embed([seen(one) for one in PICTURES[:3]]))
    of_one = dual.llm.score(TEXTS[0], [seen(one) for one in PICTURES[:3]])
    pairs = dual.llm.score([seen(one) for one in PICTURES[:3]], TEXTS[:3])
    assert np.allclose([one.score for one in of_one], images @ texts[0], atol=1e-6)
    assert np.allclose([one.score for one in pairs], (images * texts).sum(1), atol=1e-6)


def test_a_prompt_is_a_text_or_one_image(dual: Dual) -> None:
    llm = dual.llm
    with pytest.raises(RequestError, match=r"a text or one image.* found 1 images and 'x'"):
        llm.embed(seen(PICTURES[0], "x"))
    with pytest.raises(RequestError, match="found 2 images and ''"):
        llm.embed(seen(PICTURES[:2]))
    with pytest.raises(RequestError, match="found 0 images"):
        llm.embed(seen([]))
    with pytest.raises(RequestError, match="prompt_token_ids: expected ids in 0"):
        llm.embed({"prompt_token_ids": [llm.model_config.vocab_size]})
    with pytest.raises(RequestError, match="embed"):
        llm.generate("x")
    assert llm.embed(TEXTS[0])  # nothing else suffers


def test_labels_are_refused_where_they_mean_nothing(dual: Dual) -> None:
    for given in ([], "cat", ["cat", 3], [""]):
        with pytest.raises(RequestError, match="labels: expected a list of texts"):
            dual.llm.classify(seen(PICTURES[0]), labels=given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="labels: expected different texts"):
        dual.llm.classify(seen(PICTURES[0]), labels=["a", "a"])
    with pytest.raises(RequestError, match=r"prompts\[1\]: expected an image"):
        dual.llm.classify([seen(PICTURES[0]), "a text"], labels=["a", "b"])


def test_texts_that_are_too_long_are_cut_as_by_transformers(dual: Dual) -> None:
    text = "a photo of a cat and a dog beside two red bicycles " * 4
    with pytest.raises(RequestError, match="tokens"):
        dual.llm.embed(text)
    [found] = dual.llm.embed(text, truncate_prompt_tokens=-1)
    wanted = their_texts(dual.kind, dual.folder, dual.theirs, [text])[0].numpy()
    assert np.abs(np.array(found.embedding) - wanted).max() < 2e-6


def test_a_text_ends_with_its_first_end(tmp_path: Path) -> None:
    """What CLIP's tokenizer finds behind it does not count."""
    theirs = write_dual("clip", tmp_path)
    texts = ["a cat<|endoftext|> and a dog", "a cat"]
    wanted = their_texts("clip", tmp_path, theirs, texts).numpy()
    assert np.abs(wanted[0] - wanted[1]).max() < 1e-6
    with LLM(str(tmp_path), **EXACT) as llm:
        assert np.abs(vectors(llm.embed(texts)) - wanted).max() < 2e-6


@pytest.mark.parametrize("kind", ["clip", "siglip", "naflex"])
def test_less_precision_changes_vectors_little(kind: str, tmp_path: Path) -> None:
    theirs = write_dual(kind, tmp_path)
    prompts = [*TEXTS, *(seen(one) for one in PICTURES)]
    wanted = torch.cat(
        [their_texts(kind, tmp_path, theirs, TEXTS), their_images(kind, theirs, PICTURES)]
    ).numpy()
    plain: dict[str, Any] = {}
    for options, least in ((plain, 0.999), ({"quantization": "int8"}, 0.99)):
        with LLM(str(tmp_path), num_threads=1, **options) as llm:
            found = vectors(llm.embed(prompts))
        assert (found * wanted).sum(1).min() >= least, options


def test_options_change_nothing_or_are_named(tmp_path: Path) -> None:
    theirs = write_dual("siglip", tmp_path)
    wanted = their_images("siglip", theirs, PICTURES[:1]).numpy()
    with LLM(str(tmp_path), **EXACT) as llm:
        assert llm.memory_plan.images is not None and llm.memory_plan.images.weights > 100_000
        with llm.fork() as other:
            assert np.abs(vectors(other.embed([seen(PICTURES[0])])) - wanted).max() < 2e-6
    with LLM(str(tmp_path), limit_mm_per_prompt={"image": 0}, **EXACT) as llm:
        found = vectors(llm.embed(TEXTS))
        assert np.abs(found - their_texts("siglip", tmp_path, theirs, TEXTS).numpy()).max() < 2e-6
        with pytest.raises(RequestError, match="multi_modal_data"):
            llm.embed(seen(PICTURES[0]))
    named = pytest.raises(RequestError, match=r"filled up to 24 tokens with '</s>'.* found 16")
    with LLM(str(tmp_path), max_model_len=16, **EXACT) as llm, named:
        llm.embed(TEXTS[0])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_packed_folders_have_the_vectors_of_their_values(kind: str, tmp_path: Path) -> None:
    """FP8 in both encoders and in the projections, as compressed-tensors writes it."""
    theirs = write_dual(kind, tmp_path)

    def chosen(name: str) -> bool:
        layers = ".layers." in name and name.endswith(("proj.weight", "fc1.weight", "fc2.weight"))
        return layers or "projection" in name or name.startswith("text_model.head.")

    rewrite_fp8(tmp_path, chosen, [])
    count = 0
    with torch.no_grad():
        for name, values in theirs.named_parameters():
            if values.dim() == 2 and chosen(name):
                scale = values.abs().amax(dim=1, keepdim=True) / 448
                codes = (values / scale).to(torch.float8_e4m3fn).float()
                values.copy_(codes * scale.to(torch.bfloat16).float())
                count += 1
    assert count == (38 if kind == "clip" else 37)
    wanted = torch.cat(
        [their_texts(kind, tmp_path, theirs, TEXTS), their_images(kind, theirs, PICTURES)]
    ).numpy()
    with LLM(str(tmp_path), **EXACT) as llm:
        found = vectors(llm.embed([*TEXTS, *(seen(one) for one in PICTURES)]))
    assert np.abs(found - wanted).max() < 3e-6
