"""All sizes of steps are captured at load, and none while requests are served or timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_card import on_a_card

from sdk.bench.gpu.engine import add, finish
from sdk.kernels.sized_graphs import buckets, token_buckets

REQUESTS, TOKENS = 21, 40
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": TOKENS}


def test_after_a_load_no_graph_is_captured_while_something_is_served(golden: Path) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    with on_a_card(path, max_num_seqs=REQUESTS, **SMALL) as (llm, card):
        engine, runner = llm._driver._engine, llm._runner()
        graphs = runner.strategy
        assert graphs.decodes is not None and graphs.pieces is not None
        plain = {size for size, shared in graphs.decodes.steps.graphs.sizes if not shared}
        shared = {size for size, shared in graphs.decodes.steps.graphs.sizes if shared}
        assert plain == set(buckets(REQUESTS)) == shared | {1}
        assert set(graphs.pieces.graphs.sizes) == set(token_buckets(TOKENS))
        captured, replayed = card.graphs, card.replays
        for i in range(REQUESTS):
            add(engine, str(i), runner.model.config.vocab_size, 3 + 2 * i, 1 + i % 7)
        finish(engine)
        assert card.graphs == captured and card.replays > replayed


@pytest.mark.slow
def test_a_size_without_a_graph_is_the_next_that_an_idle_engine_captures(golden: Path) -> None:
    """And runs operator by operator until then."""
    path = golden / "gguf-Q8_0" / "model.gguf"
    with on_a_card(path, max_num_seqs=REQUESTS, **SMALL) as (llm, card):
        engine, runner = llm._driver._engine, llm._runner()
        with runner.entered():
            runner.record()
        captured = card.graphs
        add(engine, "a", runner.model.config.vocab_size, 5, 4)
        while engine.has_unfinished:
            assert not engine.work_while_idle()  # it is not idle
            engine.step()
        assert card.graphs == captured
        decodes, pieces = runner.strategy.decodes, runner.strategy.pieces
        assert engine.work_while_idle()
        assert list(decodes.steps.graphs.sizes) == [(1, False)]
        while engine.work_while_idle():
            pass
        # the last that was asked for first: a decode step in pieces, and the prompt of 5 tokens
        assert list(pieces.graphs.sizes)[:2] == [1, 8] and card.graphs > captured
        captured = card.graphs
        assert not engine.work_while_idle() and card.graphs == captured
