"""The public client library is the judge of the interface."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.clients import ServerProcess

openai = pytest.importorskip("openai", reason="needs the openai client: pip install openai")


@pytest.mark.capability("W9", clause="the public client library works")
def test_the_client_library_understands_the_server(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["run"]
        assert client.models.retrieve("run").id == "run"
        options: dict[str, Any] = {"model": "run", "prompt": "def ", "max_tokens": 12, "seed": 3}
        whole = client.completions.create(**options, n=2, logprobs=3)
        assert [choice.index for choice in whole.choices] == [0, 1] and whole.object == "text_completion"
        assert whole.usage.prompt_tokens == 4 and 2 <= whole.usage.completion_tokens <= 24
        logprobs = whole.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
        parts = list(
            client.completions.create(**options, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
        assert parts[-1].usage.prompt_tokens == 4 and parts[-2].choices[0].finish_reason in ("length", "stop")
        assert {p.system_fingerprint for p in parts} == {whole.system_fingerprint}
        stopped = client.completions.create(**options, stop=[whole.choices[0].text[3:5]])
        assert stopped.choices[0].finish_reason == "stop" and len(stopped.choices[0].text) <= 3
        extra = {"top_k": 1, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_window": 8}
        assert client.completions.create(**options, extra_body=extra).choices[0].text
        with pytest.raises(openai.BadRequestError, match="there is no parameter 'best_of'") as refused:
            client.completions.create(**options, best_of=3)
        assert refused.value.param == "best_of"
        with pytest.raises(openai.BadRequestError, match="max_tokens is 1000000000"):
            client.completions.create(**{**options, "max_tokens": 10**9})
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**options, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.chat.completions.create(model="run", messages=[{"role": "user", "content": "hi"}])
