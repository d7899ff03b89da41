"""What `embedlm bench gpu` runs before it times requests, on a card made of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_card import on_a_card

from sdk.cli.bench.gpu.engine import add, finish, warm
from sdk.kernels.sized_graphs import buckets, token_buckets

REQUESTS, TOKENS = 21, 40
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": TOKENS}


def test_after_warming_no_graph_is_captured_while_something_is_timed(golden: Path) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    bench_card: Any = SimpleNamespace(size=lambda real, tiny: tiny)
    with on_a_card(path, max_num_seqs=REQUESTS, **SMALL) as (llm, card):
        engine, runner = llm._driver._engine, llm._runner()
        runner.record()
        graphs = runner.strategy
        config = runner.model.config
        loaded: Any = SimpleNamespace(
            engine=engine, runner=runner, facts=SimpleNamespace(model_config=config)
        )
        warm(bench_card, loaded, REQUESTS)
        assert graphs.decodes is not None and graphs.pieces is not None
        decoded = {size for size, *_ in graphs.decodes.graphs.captured.sizes}
        assert decoded == set(buckets(REQUESTS))
        # a step of one token is a decode step
        assert {1, *graphs.pieces.captured.sizes} == set(token_buckets(TOKENS))
        captured = card.graphs
        for i in range(REQUESTS):
            add(engine, str(i), config.vocab_size, 3 + 2 * i, 1 + i % 7)
        finish(engine)
        assert card.graphs == captured
