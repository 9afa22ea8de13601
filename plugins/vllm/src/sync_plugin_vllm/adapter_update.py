"""Load each version of an adapter into an engine, under its own name."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sync_core import Address, Delivery, OptionError
from sync_plugin_vllm.adapter_model import base_samples, describe_adapter
from sync_plugin_vllm.clients import Client
from sync_plugin_vllm.driver import CONCLUDING, Driver, Options, left
from sync_plugin_vllm.votes import NotLoadedError, Votes


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A version of an adapter in an engine.

    Args:
        name: such as ``"policy-v7"``.
        lora_id: its number in vLLM; 0 if the server chooses it.
        directory: the directory with its files, on the engine's machine.
    """

    name: str
    lora_id: int
    directory: str


class AdapterDriver(Driver):
    """Loads each new version next to the old one, and unloads that when no request uses it."""

    #: The version that requests use; None before the first.
    _current: _Adapter | None = None
    #: The version that is being loaded.
    _next: _Adapter | None = None

    def __init__(self, client: Client, worker_ids: tuple[int, ...], options: Options) -> None:
        super().__init__(client, worker_ids, options)
        self._name = options.adapter or ""
        self._directory = options.adapter_directory or tempfile.gettempdir()

    @classmethod
    def describe(cls, model: Any, *, verify: bool) -> dict[str, Any]:
        described = {"adapter": asdict(describe_adapter(model))}
        return described | ({"base": base_samples(model)} if verify else {})

    def lora_request(self, index: int) -> Any:
        if self._client.names_adapters:
            raise OptionError(
                f'requests to {self._client.name} have the name of an adapter in the field "model":'
                f" type target.engines[{index}].adapter"
            )
        if self._current is None:
            raise OptionError(f"{self._client.name} has no adapter yet; type target.send()")
        from vllm.lora.request import LoRARequest

        return LoRARequest(self._current.name, self._current.lora_id, self._current.directory)

    def connect(
        self, addresses: Sequence[Address], described: dict[str, Any], deadline: float
    ) -> None:
        self._client.check_adapters(left(deadline))
        super().connect(addresses, described, deadline)

    def _bring(
        self,
        deliveries: Sequence[Delivery],
        described: dict[str, Any],
        votes: Votes,
        deadline: float,
    ) -> None:
        step, version = self._client.step, deliveries[0].version
        name, unique = f"{self._name}-v{version}", secrets.token_hex(4)
        # A large number, since users give small numbers to their own adapters.
        number = 0 if self._client.names_adapters else (1 << 30) | (int(unique, 16) >> 2)
        new = _Adapter(name, number, str(Path(self._directory) / f"{name}-{unique}"))
        step(left(deadline), step="stage")
        self._check_staged(deliveries, deadline)
        self._next = new
        self._agree(votes, "staged")
        fields = asdict(new) | {"version": version, "description": described["adapter"]}
        step(left(deadline), step="write", **fields)
        self._client.add_adapter(name, number, new.directory, left(deadline))
        # The adapter can still be unloaded, since no request knows it yet.
        self._agree(votes, "paused")
        confirm = partial(step, left(deadline), step="confirm", version=version)
        self._load(confirm, deliveries, deadline)

    def _refuse(self, reason: Exception) -> None:
        if self._next is not None:
            with suppress(Exception):
                # The ranks raise NotLoadedError themselves if the fault is not theirs.
                is_theirs = not isinstance(reason, NotLoadedError)
                text = f"{type(reason).__name__}: {reason}" if is_theirs else ""
                self._client.step(CONCLUDING, step="drop", reason=text)

    def _conclude(self, version: int, failure: Exception | None) -> None:
        """Set the status, and unload adapters that no request uses."""
        new = self._next
        if failure is not None:
            self.set(state="behind", error=failure)
            if new is not None:
                # The server may still list the adapter, although the ranks have dropped it.
                with suppress(Exception):
                    if new.name in self._client.served_adapters(self._name, CONCLUDING):
                        self._client.forget_adapter(new.name, CONCLUDING)
                self._refuse(failure)
                self._next = None
        elif new is not None:
            self._current, self._next = new, None
            self.set(state="current", version=version, error=None, adapter=new.name)
            self._retire(new.name)

    def _retire(self, current: str) -> None:
        """Unload all other versions, except those that requests may use.

        A server refuses new requests for them at once. Requests that it has accepted may not be in
        its metrics yet, so the files remain until the next send.
        """
        others = set(self._client.served_adapters(self._name, CONCLUDING)) - {current}
        for name in others:
            self._client.forget_adapter(name, CONCLUDING)
        used = self._client.adapters_in_use(CONCLUDING)
        if used is not None:
            names = [current, *others, *used]
            self._client.refuse_older(current, names, CONCLUDING)
            self._client.step(CONCLUDING, step="keep", name=f"{self._name}-v", names=names)
