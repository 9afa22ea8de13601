"""Requests for adapters of an `LLM`: those that were unloaded never reach vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sync_plugin_vllm.clients import LlmClient


class Engine:
    """The call of an ``LLMEngine`` by which all requests come."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def add_request(
        self, request_id: str, prompt: Any, params: Any, lora_request: Any = None
    ) -> str:
        self.asked.append(lora_request or getattr(prompt, "lora_request", None))
        return request_id


def named(name: str) -> Any:
    return SimpleNamespace(lora_name=name)


def test_requests_for_older_versions_are_refused() -> None:
    engine = Engine()
    client = LlmClient(SimpleNamespace(llm_engine=engine))
    client.refuse_older("policy-v3", ["policy-v3"], 1.0)
    client.refuse_older("policy-v12", ["policy-v12", "policy-v3"], 1.0)
    client.refuse_older("other-v2", [], 1.0)
    # The newest, a next one, one that is still used, adapters of a user's own, and none.
    accepted = ["policy-v12", "policy-v13", "policy-v3", "mine", "mine-v1", "policy-vx"]
    for name in accepted:
        assert engine.add_request("0", "prompt", None, lora_request=named(name)) == "0"
    engine.add_request("0", "prompt", None)
    assert [getattr(each, "lora_name", None) for each in engine.asked] == [*accepted, None]
    for old in ("policy-v4", "other-v1"):
        message = rf"'{old}' was unloaded .*=target.lora_request"
        with pytest.raises(ValueError, match=message):
            engine.add_request("1", "prompt", None, named(old))
        with pytest.raises(ValueError, match=message):
            engine.add_request("1", SimpleNamespace(lora_request=named(old)), None)
    assert len(engine.asked) == len(accepted) + 1
