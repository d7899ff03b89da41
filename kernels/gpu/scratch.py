"""Scratch of kernels, computed from shapes alone: memory plans count it before anything runs, and
kernels stay within it.

One operator runs at a time, so a model needs the largest scratch of any operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.operators.batch import WorkShape
from sdk.kernels.packed_shapes import packed_bytes
from sdk.kernels.scratch import Matrix, Products

#: Bytes for a dequantized weight, for shares of K, and for quantized activations: limits memory,
#: not speed.
SCRATCH = 64 << 20
#: Two tiles for each of the 132 multiprocessors of an H100, and the sides of a tile of the library.
FULL_CARD, LIBRARY_TILE = 264, 128
#: Bytes for the dequantized weights of many experts; 128 of 2048 x 1536 (3 Mi values of 16 bits
#: each) then take four turns.
EXPERTS_SCRATCH = 256 << 20
#: Queries and keys of a library's attention are padded to a multiple of this.
ATTENTION_STEP = 512
#: Bytes for each value of its queries: see :func:`queries_at_once`.
ATTENTION_BYTES = 2 + 2 + 2 + 4 + 4 + 2
#: torch's workspace for library products, per stream that has used one: 32 MiB on NVIDIA's cards
#: from 9.0 on, 8 before (its documentation of ``CUBLAS_WORKSPACE_CONFIG``).
LIBRARY, OLDER_LIBRARY = 32 << 20, 8 << 20
#: Keys of a split of attention; larger by powers of two if a context would have too many splits,
#: and how many are too many: see :func:`most_splits`.
SPLIT = 256
FEW_SPLITS, MANY_SPLITS = 32, 128
#: Bytes of one query's parts that one program adds up: 2.3 us at the 64 bytes per cycle that a
#: processor of an H100 gets from the second-level cache.
JOINED = 256 << 10
#: The most queries of a request that decode attention handles: the token and drafts to verify.
MOST_QUERIES = 8
#: So many times longer are the splits of a request with several queries, because their parts are
#: several times larger (512 keys in 16 bits and the parts of 8 queries of 4 heads: 8 to 1), and of
#: a step that reads a shared prefix once, whose parts come in addition.
LONGER = 2
#: Logits that one program of the sampler reads, bins in which it counts them, and candidates of a
#: row that it lists: 32 KiB.
SAMPLER_CHUNK, SAMPLER_BINS, SAMPLER_ROOM = 8192, 256, 8192
#: The most shares of K that the rule of ``tuning.py`` and ``embedlm tune`` use for a weight.
MOST_SHARES = 16
#: Tiles of the largest product whose K is shared among programs (``shares.py``). A vocabulary of
#: 262,144 in tiles of 16 rows has 16,384; shares of more tokens than tiles have do not fit SCRATCH.
COUNTERS = 1 << 15
#: Float32 copies of x that exist at once in ``reference/fake_quantize.py``.
ROUNDED_COPIES = 6
#: The largest number of values in one program's result.
_TILE = 64 * 64
#: Rows that ``reference/linear.py`` dequantizes at a time, as float32.
_REFERENCE_ROWS = 2048


def runs(count: int, step: int) -> Iterator[slice]:
    """``count`` rows, ``step`` at a time."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def decoded_rows(n: int, k: int, itemsize: int, tokens: int) -> int:
    """Rows of a weight ``[n, k]`` that are dequantized at a time.

    As many as fit in :data:`SCRATCH`, or more if the library's product with ``tokens`` would not
    have :data:`FULL_CARD` tiles: with 512 tokens up to 8,448 rows.
    """
    across = -(-tokens // LIBRARY_TILE)
    filling = -(-FULL_CARD // across) * LIBRARY_TILE
    return min(n, max(16, SCRATCH // (k * itemsize) // 16 * 16, filling))


def decoded_experts(count: int, n: int, k: int, itemsize: int) -> int:
    """Experts of ``[n, k]`` that are dequantized at a time."""
    return max(1, min(count, EXPERTS_SCRATCH // (padded(n, k) * itemsize)))


def padded(n: int, k: int) -> int:
    """Values from one dequantized expert to the next: kernels load 16 at a time."""
    return -(-n * k // 16) * 16


def grouped_rows(n: int, k: int) -> int:
    """Rows of experts ``[n, k]`` that a library multiplies at a time, gathered and with results of
    16 bits."""
    return max(16, EXPERTS_SCRATCH // (2 * (n + k)))


def queries_at_once(heads: int, head_dim: int) -> int:
    """Queries of a request that a library's attention handles at a time: of each value two copies
    (rounded, then padded) and a result in 16 bits, and where results are merged two in float32 and
    one in 16 bits."""
    return _of_steps(EXPERTS_SCRATCH // (heads * head_dim * ATTENTION_BYTES))


def keys_at_once(kv_heads: int, head_dim: int) -> int:
    """Keys behind which those queries come that it handles at a time: with their values in 16 bits,
    gathered from pages."""
    return _of_steps(EXPERTS_SCRATCH // (kv_heads * head_dim * 4))


def padded_run(tokens: int) -> int:
    return -(-tokens // ATTENTION_STEP) * ATTENTION_STEP


def _of_steps(tokens: int) -> int:
    """A power of two of :data:`ATTENTION_STEP`, so that there are few shapes: a library plans each
    of them anew."""
    return ATTENTION_STEP << max(0, (tokens // ATTENTION_STEP).bit_length() - 1)


def columns_at_once(n: int, rows: int) -> int:
    """Columns of ``rows`` float32 results that are converted to another type at a time."""
    return min(n, max(16, SCRATCH // (4 * max(rows, 1))))


def rows_of_parts(n: int, split: int) -> int:
    """Rows of x that are multiplied at a time if ``split`` programs share K."""
    return max(16, SCRATCH // (4 * n * split))


def most_shares(rows: int, n: int) -> int:
    """Programs that may share K if all rows of x must be multiplied at once."""
    return max(1, SCRATCH // (4 * n * rows))


def rows_of_codes(k: int) -> int:
    """Rows of x that are quantized to bytes at a time, whole tiles where there are that many.

    16 MiB stay in the second-level cache (A100: 40 MiB, H100: 50) while all weights pass by.
    """
    rows = SCRATCH // (4 * k)
    return max(16, rows // 128 * 128 or rows)


def rows_rounded(k: int) -> int:
    """Rows of x that are quantized at a time by the reference's operations."""
    return max(16, SCRATCH // (4 * k * ROUNDED_COPIES))


def most_splits(programs: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The most splits of a request's keys in decode attention, a power of two.

    One request then has about a program for each processor; ``programs``: four for each. On an H100
    these are 64 with 2 key heads, 128 with 1, and with 4 or more :data:`FEW_SPLITS`. No more than
    what :data:`JOINED` has room for (64 of 4 heads of 256 numbers), as one program adds up the
    parts of a request and key head.
    """
    filling = programs // 4 / kv_heads
    room = JOINED / (4 * (heads // kv_heads) * head_dim)
    return 1 << round(math.log2(min(max(FEW_SPLITS, min(filling, room)), MANY_SPLITS)))


def work_shape(programs: int, requests: int, heads: int, kv_heads: int, head_dim: int) -> WorkShape:
    """The list of a step's splits, see ``attention_work.py``."""
    return WorkShape(requests + 1, most_splits(programs, heads, kv_heads, head_dim), kv_heads)


def split_count(longest: int, most: int, coarse: int = 1) -> int:
    """How many splits a context of at most ``longest`` tokens can have, each ``coarse`` times as
    long as usual; ``most``: see :func:`most_splits`."""
    return min(-(-longest // (SPLIT * coarse)), most // coarse)


def part_count(longest: int, most: int, queries: int, *, shared: bool) -> int:
    """The most parts of one head's results, of a request with up to ``queries`` queries in a step.

    With one split there are none, as the result is written at once.
    """

    def parts(coarse: int) -> int:
        splits = split_count(longest, most, coarse)
        if shared:
            return 2 * split_count(longest, most, LONGER * coarse)
        return splits if splits > 1 else 0

    return parts(1) if queries == 1 else max(parts(1), queries * parts(LONGER))


def requests_at_once(requests: int, heads: int, parts: int, head_dim: int, queries: int) -> int:
    """Requests whose parts are in scratch at a time: all if they have one query each."""
    if queries == 1 or not parts:
        return requests
    return min(requests, max(1, SCRATCH // (4 * heads * parts * (head_dim + 2))))


def sampler_bytes(rows: int, width: int) -> int:
    """What the sampler allocates beside its result for ``rows`` rows of ``width`` logits, all of
    them changed.

    Of a chunk: maxima and their places before and after changes, counts, three sums in float64,
    where its candidates begin. Of a row: candidates and six bounds.
    """
    of_chunk = 2 * (4 + 4) + 4 * SAMPLER_BINS + 3 * 8 + 4
    return rows * (-(-width // SAMPLER_CHUNK) * of_chunk + 4 * SAMPLER_ROOM + 4 * 6)


@dataclass(frozen=True, slots=True)
class CardScratch:
    """The scratch of one model on one card: see :class:`sdk.kernels.scratch.Scratch`.

    ``programs``, ``dense_from``, ``experts_dense_from``: see
    :class:`sdk.kernels.gpu.tuning.Tuning`; ``tuned``: whether there is a table. ``library``: bytes
    per stream, see :data:`LIBRARY`. ``wide_sums``: the library writes float32 results of 16-bit
    products itself, see ``dense.py``. ``libraries``: what libraries do, see ``tuning.py``.
    """

    products: Products
    programs: int
    dense_from: int
    experts_dense_from: int
    tuned: bool
    library: int
    wide_sums: bool
    libraries: Mapping[tuple[Any, ...], int] = field(default_factory=dict)

    def nbytes(self, tokens: int, requests: int, context: int) -> int:
        given = [(matrix, tokens) for matrix in self.products.matrices]
        given.append((self.products.head, requests))
        asked = [self._attention(tokens, requests, context)]
        asked += [self._product(matrix, rows) for matrix, rows in given]
        library = any(m.plain or self._decodes(m, rows) for m, rows in given if not m.experts)
        return max(asked) + (self.library if library else 0)

    def kept(self, requests: int) -> int:
        width = self.products.head.n  # recorded steps keep what the sampler allocates
        kept = packed_bytes(requests, width) + sampler_bytes(requests, width) + 4 * COUNTERS
        # while weights are loaded, experts are moved into one memory, of which this is then free
        moved = [2 * m.experts * m.n * m.k for m in self.products.matrices if self._groups(m)]
        return max(kept + self._packed_twice(), *moved, 0)

    def _packed_twice(self) -> int:
        """Weights that a library also has in its own layout: codes, and a ninth of it for scales
        (groups of 32 and more)."""
        if self.products.exact or self.products.fixed or self.products.blocks:
            return 0
        entries = [key[1:] for key in self.libraries if key[0] == "humming"]
        kept = 0
        for m in self.products.matrices:
            if m.packed and not m.experts:
                bits = [_bits(kind) for kind, n, k in entries if not m.n % n and not m.k % k]
                kept += m.n * m.k * max(bits, default=0) // 8 * 9 // 8
        return self.products.layers * kept

    def _groups(self, m: Matrix) -> bool:
        """Whether a library multiplies such experts, or a rank's, which has parts of them."""
        if not m.experts or not m.plain or self.products.exact or self.products.fixed:
            return False
        shapes = [key[-2:] for key in self.libraries if key[0] == "grouped_mm"]
        return any(not m.n % n and not m.k % k for n, k in shapes)

    def _decodes(self, m: Matrix, rows: int) -> bool:
        """Whether a packed weight is dequantized first."""
        if not m.packed or self.products.exact or self.products.fixed:
            return False
        if m.experts:
            return rows * m.per_token // m.experts >= self.experts_dense_from
        return rows >= self.dense_from

    def _attention(self, tokens: int, requests: int, context: int) -> int:
        """Parts of one query per request, and of several where there may be; and the list of work,
        for a batch without one."""
        if self.products.fixed:
            return 0
        heads, width = self.products.heads, self.products.head_dim
        work = work_shape(self.programs, requests, heads, self.products.kv_heads, width)
        asked = 0
        for queries in (1, MOST_QUERIES) if tokens > requests else (1,):
            parts = part_count(context, work.splits, queries, shared=True)
            count = requests_at_once(requests, heads, parts, width, queries)
            asked = max(asked, 4 * count * heads * parts * (width + 2))
        asked = max(asked, self._attention_of_library(tokens, context))
        return asked + work.nbytes

    def _attention_of_library(self, tokens: int, context: int) -> int:
        heads, width = self.products.heads, self.products.head_dim
        if not any(x[0] == "cudnn_attention" and x[2] == width for x in self.libraries):
            return 0
        # a run begins up to a step before its first query, and its length is padded
        queries = min(queries_at_once(heads, width), padded_run(ATTENTION_STEP - 1 + tokens))
        of_key = 4 * heads * width
        keys = min(max(EXPERTS_SCRATCH, ATTENTION_STEP * of_key), padded_run(context) * of_key)
        sums = 4 * 4 * queries * heads
        return heads * width * ATTENTION_BYTES * queries + max(keys, queries * of_key) + sums

    def _product(self, m: Matrix, rows: int) -> int:
        asked = 0
        if m.plain:
            asked = self._plain(m, rows)
        if self._decodes(m, rows):
            asked = max(asked, self._decoded(m, rows))
        if m.packed:
            asked = max(asked, self._tiled(m, rows) + self._rounded(m, rows))
        return asked

    def _plain(self, m: Matrix, rows: int) -> int:
        if self.products.exact or self.products.fixed:  # the reference handles 16 bits
            return 4 * m.k * (min(m.n, _REFERENCE_ROWS) + rows)
        if m.experts:
            return self._grouped(m, rows) if self._groups(m) else 0
        results = 0 if self.wide_sums else 4 * rows * columns_at_once(m.n, rows)
        return self.products.copied * rows * m.k + results

    def _grouped(self, m: Matrix, rows: int) -> int:
        """Gathered rows and results, and a copy of x, which has a row for each token or expert."""
        every = rows * m.per_token
        return self.products.copied * every * m.k + 2 * (m.n + m.k) * min(
            every, grouped_rows(m.n, m.k)
        )

    def _decoded(self, m: Matrix, rows: int) -> int:
        if m.experts:
            count = decoded_experts(m.experts, m.n, m.k, 2)
            return self.products.copied * rows * m.per_token * m.k + 2 * count * padded(m.n, m.k)
        at_once = decoded_rows(m.n, m.k, 2, rows)
        return 2 * at_once * m.k + self._plain(m, rows)

    def _tiled(self, m: Matrix, rows: int) -> int:
        """Shares of K, and the sums of 16 columns of inputs."""
        if not (self.products.exact or self.products.fixed):
            rows = min(rows, self.experts_dense_from * m.experts or self.dense_from)
        rows *= m.per_token
        shares = MOST_SHARES
        if self.products.fixed and not self.tuned:  # the rule shares K to fill the card, no further
            shares = min(shares, self.programs // -(-m.n // 64))
        if shares < 2 or (self.products.fixed and m.experts):
            return rows * m.k // 4
        parts = min(4 * shares * rows * m.n, SCRATCH + 4 * 16 * shares * m.n)
        if not (self.tuned or self.products.fixed):
            parts = min(parts, 4 * self.programs * _TILE)
        return parts + rows * m.k // 4

    def _rounded(self, m: Matrix, rows: int) -> int:
        if not self.products.rounds or self.products.exact:
            return 0
        rows *= m.per_token
        whole = 4 * rows * m.k if m.experts else 0  # any row may belong to any expert
        return whole + 4 * ROUNDED_COPIES * m.k * min(rows, rows_rounded(m.k))


def _bits(kind: str) -> int:
    """Of a weight's type such as ``int4g128``."""
    found = re.match(r"int(\d+)", kind)
    return 8 if found is None else int(found[1])
