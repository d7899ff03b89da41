"""What shapes and masks mean, in plain numpy; and random ones for the kernels that read them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sdk.kernels.operators.sampling import Change, ChangeKind, SampleBuffers, Shape, Tokens

F32 = np.float32
INF = float("inf")


def changed(row: np.ndarray, shape: Shape | None, mask: np.ndarray | None) -> np.ndarray:
    """A copy of a row ``[V]`` float32, number by number."""
    x = row.copy()
    for words in (mask, None if shape is None else shape.mask):
        if words is None:
            continue
        bits = np.unpackbits(np.asarray(words, "<u4").view(np.uint8), bitorder="little")[: len(x)]
        x[np.flatnonzero(bits == 0)] = -INF
        x[len(bits) :] = -INF
    with np.errstate(all="ignore"):
        for change in () if shape is None else shape.changes:
            _change(x, change)
    return x


def _change(x: np.ndarray, change: Change) -> None:
    ids = change.ids[: change.count].tolist()
    repetition, frequency, presence = map(F32, change.factors)
    if change.kind is ChangeKind.FORCE:
        x[:] = -INF
        ids = ids[:1]
    for i, token in enumerate(ids):
        if not 0 <= token < len(x):
            continue
        if change.kind is ChangeKind.FORCE:
            x[token] = 0
        elif change.kind is ChangeKind.FORBID:
            x[token] = -INF
        elif change.kind is ChangeKind.ADD:
            x[token] = x[token] + change.values[i]
        else:
            value, times = x[token], change.values[i]
            value = value / repetition if value > 0 else value * repetition
            value = value - frequency * times
            x[token] = value - presence if times > 0 else value


def some_ids(width: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct ones, both ends and strangers among them."""
    ids = rng.permutation(width)[:count]
    ends = [0, width - 1, -1, width, 2**31 - 1, -(2**31)]
    return np.array(list(dict.fromkeys([*ends, *ids.tolist()])), np.int32)


def some_change(kind: ChangeKind, width: int, rng: np.random.Generator) -> Change:
    ids = some_ids(width, int(rng.integers(0, 300)), rng)
    if kind is ChangeKind.ADD:
        return Change(kind, ids, rng.standard_normal(len(ids)) * 5)
    if kind is ChangeKind.PENALIZE:
        factors = tuple(rng.choice([[1.3, 0.2, 0.5], [1.0, -0.4, 0.0], [0.7, 0.0, -2.0]]))
        return Change(kind, ids, rng.integers(0, 4, len(ids)), factors)
    if kind is ChangeKind.FORCE:
        return Change(kind, [int(rng.integers(0, width)), 0])
    return Change(kind, np.concatenate((ids, ids[:3])))  # only here an id may come twice


def some_mask(width: int, rng: np.random.Generator) -> np.ndarray:
    words = -(-width // 32)
    mask = rng.integers(0, 2**32, words, np.uint32)
    return mask & rng.integers(0, 2**32, words, np.uint32)


def shapes_of(width: int, rng: np.random.Generator) -> list[Shape | None]:
    """None, each kind alone, nothing, masks (too short, too long, full, empty), and mixtures."""
    kinds = list(ChangeKind)
    full = np.full(-(-width // 32), 2**32 - 1, np.uint32)
    one = Change(ChangeKind.FORCE, [width // 2])
    everything = Change(ChangeKind.FORBID, np.arange(width))
    empty = [Change(kind) for kind in (ChangeKind.ADD, ChangeKind.PENALIZE)]
    return [
        None,
        *(Shape(None, [some_change(kind, width, rng)]) for kind in kinds),
        Shape(None, [*empty, Change(ChangeKind.FORBID)]),
        Shape(None, [Change(ChangeKind.FORCE)]),
        Shape(None, [Change(ChangeKind.FORCE, [width])]),
        Shape(),
        Shape(some_mask(width, rng)),
        Shape(some_mask(width, rng)[:-1]),
        Shape(np.append(full, full[:1])),
        Shape(np.zeros_like(full)),
        Shape(np.zeros_like(full), [one]),  # what is forbidden is forced
        Shape(None, [everything]),
        Shape(None, [everything, one]),
        Shape(None, [one, some_change(ChangeKind.ADD, width, rng)]),
        Shape(full, [Change(ChangeKind.ADD, [width - 1], [INF])]),
        Shape(None, [everything, Change(ChangeKind.ADD, [width // 2], [INF])]),  # NaN
        *(
            Shape(
                some_mask(width, rng) if rng.random() < 0.5 else None,
                [some_change(kinds[i], width, rng) for i in rng.integers(0, 3, 4)],
            )
            for _ in range(12)
        ),
    ]


def buffers_of(width: int, rng: np.random.Generator) -> SampleBuffers:
    """A row for each of :func:`shapes_of`, a third of them with a mask of their slot besides."""
    shapes = shapes_of(width, rng)
    buffers = SampleBuffers(len(shapes))
    for row, shape in enumerate(shapes):
        buffers.set_shape(row, shape)
    masks = buffers.use_masks(width, 5)
    masks[:4] = [some_mask(width, rng) for _ in range(4)]
    for row in range(0, len(shapes), 3):
        buffers.set_mask(row, int(rng.integers(0, 5)))
    return buffers


def logits_for(buffers: SampleBuffers, width: int, rng: np.random.Generator) -> Tensor:
    """Rows of logits, some with minus infinity, some equal, the last three not finite."""
    rows = len(buffers.tokens)
    x = (rng.standard_normal((rows, width)) * 3).astype(F32)
    x[::4] = np.round(x[::4])
    x[1::5][rng.random(x[1::5].shape) < 0.5] = -INF
    x[:, rng.integers(width)] = 4.0
    x[-1, rng.integers(width)], x[-2, rng.integers(width)], x[-3] = np.nan, INF, -INF
    return torch.from_numpy(x)


def expected(kernel, logits: Tensor, draws, buffers: SampleBuffers) -> Tokens:
    """The kernel's own outcome for rows that were changed by :func:`changed` before."""
    rows = logits.numpy().copy()
    finite = np.isfinite(rows.max(-1))
    for row in np.flatnonzero(finite):
        rows[row] = changed(rows[row], buffers.shapes[row], buffers.mask(row))
    found = SampleBuffers(len(rows))
    kernel.run(torch.from_numpy(rows), draws, found)
    found.probabilities[finite & ~np.isfinite(found.best)] = 0
    return found.read(len(rows))
