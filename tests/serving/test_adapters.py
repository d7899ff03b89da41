"""Adapters are models for clients."""

from __future__ import annotations

from pathlib import Path

from sdk import LLM, SamplingParams
from sdk.serving import create_app
from sdk.testing import tiny_adapter, tiny_model
from tests.serving.serving import running

ASK = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


def test_an_adapter_is_a_model_with_a_parent(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    adapter = tiny_adapter(tmp_path / "adapter", model, scale=8.0)
    with LLM(model, enable_lora=True) as llm, running(create_app({"base": llm})) as client:
        assert client.post("/v1/completions", {**ASK, "model": "sql"}).status == 404
        llm.add_lora("sql", adapter)
        listed = {one["id"]: one["parent"] for one in client.get("/v1/models").json["data"]}
        assert listed == {"base": None, "sql": "base"}
        found = {}
        for name in listed:
            made = client.post("/v1/completions", {**ASK, "model": name}).json
            assert made["model"] == name
            found[name] = made["choices"][0]["text"]
        params = SamplingParams(max_tokens=8, temperature=0)
        [base] = llm.generate("Hello", params)
        [adapted] = llm.generate("Hello", params, lora_request="sql")
        assert found == {"base": base.outputs[0].text, "sql": adapted.outputs[0].text}
        assert found["base"] != found["sql"]
        vectors = [
            client.post("/v1/embeddings", {"model": name, "input": "Hello"}).json["data"][0]
            for name in listed
        ]
        assert vectors[0]["embedding"] != vectors[1]["embedding"]
        scored = {"model": "sql", "text_1": "Hello", "text_2": "Hi"}
        assert client.post("/v1/score", scored).status == 200
        assert "sql" in llm.stats().by_adapter
        llm.remove_lora("sql")
        assert client.get("/v1/models/sql").status == 404
