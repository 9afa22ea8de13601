"""Clients that call an engine in this process, in a Ray actor, or over HTTP."""

from __future__ import annotations

import inspect
import ipaddress
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from sync_core import OptionError, SyncError

#: The treatment of requests in progress while weights are loaded; see vLLM's ``/pause``.
Pause: TypeAlias = Literal["keep", "wait", "abort"]


#: The setting that a server needs for weight updates.
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1, which adds the calls for weights"
_RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which adds the calls for adapters"
_METRICS = "its metrics: leave out --disable-log-stats"
#: The metric that names the adapters of requests in progress.
_GAUGE = "vllm:lora_requests_info"
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class EngineError(SyncError):
    """A call of an engine failed or did not return in time."""


class Client(ABC):
    """Makes the calls of one engine that an update needs, each with a timeout in seconds."""

    #: The engine's name in messages.
    name: str

    @abstractmethod
    def call(self, method: str, timeout: float, *args: Any) -> Any:
        """Call a method of vLLM with a request."""

    @abstractmethod
    def world_size(self, timeout: float) -> int:
        """The number of ranks."""

    def init(self, info: dict[str, Any], timeout: float) -> None:
        """Connect the ranks to the sender; ``info`` has the fields of ``SyncCoreInitInfo``."""
        self.call("init_weight_transfer_engine", timeout, {"init_info": info})

    def step(self, timeout: float, **fields: Any) -> None:
        """Take a step for which vLLM has no call; the fields are those of ``EngineStep``."""
        self.init({"step": fields}, timeout)

    def start(self, timeout: float) -> None:
        """Stage the newest version."""
        self.call("start_weight_update", timeout)

    def update(self, version: int, timeout: float) -> None:
        """Load the staged version."""
        self.call("update_weights", timeout, {"update_info": {"version": version}})

    def finish(self, timeout: float) -> None:
        """End the update."""
        self.call("finish_weight_update", timeout)

    @abstractmethod
    def pause(self, mode: Pause, timeout: float) -> None:
        """Stop scheduling tokens, and clear the caches of prompts, images and encoders."""

    def is_paused(self, timeout: float) -> bool:
        """Return whether the engine is paused already, by something other than `pause`."""
        del timeout
        return False

    @abstractmethod
    def label(self, version: str, timeout: float) -> None:
        """Label all later outputs with a version."""

    @abstractmethod
    def resume(self, timeout: float) -> None:
        """Schedule tokens again."""

    #: Whether vLLM's server chooses the numbers of adapters, and requests use adapters by name.
    names_adapters = False

    @abstractmethod
    def add_adapter(self, name: str, lora_id: int, directory: str, timeout: float) -> None:
        """Load an adapter into all ranks from a directory of the engine's machine."""

    def check_adapters(self, timeout: float) -> None:
        """Raise if the engine does not have the calls for adapters."""
        del timeout

    def served_adapters(self, name: str, timeout: float) -> list[str]:
        """Return the versions of an adapter that requests may use, except users' own adapters."""
        del name, timeout
        return []

    def forget_adapter(self, name: str, timeout: float) -> None:
        """Refuse new requests for an adapter."""
        del name, timeout

    def refuse_older(self, newest: str, kept: Collection[str], timeout: float) -> None:
        """Refuse requests for older versions of an adapter, except for kept ones."""
        del newest, kept, timeout

    @abstractmethod
    def adapters_in_use(self, timeout: float) -> set[str] | None:
        """Return the adapters that requests in progress use; None if unknown."""


class LlmClient(Client):
    """An engine in this process: an object with the methods of ``vllm.LLM``.

    Its ``generate`` returns when all requests have ended, so `pause` only clears the caches. Calls
    have no timeout, but `VllmTarget` makes them in a thread.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.name = f"the {type(llm).__name__} in this process"

    def call(self, method: str, timeout: float, *args: Any) -> Any:
        del timeout
        return getattr(self._llm, method)(*args)

    def world_size(self, timeout: float) -> int:
        return int(self.call("get_world_size", timeout))

    def pause(self, mode: Pause, timeout: float) -> None:
        del mode
        for method in ("reset_prefix_cache", "reset_mm_cache"):
            self.call(method, timeout)
        self.reset_encoder_cache(timeout)

    def reset_encoder_cache(self, timeout: float) -> None:
        """Clear the cache of encoded images, for which `LLM` itself has no method."""
        del timeout
        _reset_encoder_cache(self._llm)

    def label(self, version: str, timeout: float) -> None:
        self.call("update_weight_version", timeout, version)

    def resume(self, timeout: float) -> None:
        del timeout

    def add_adapter(self, name: str, lora_id: int, directory: str, timeout: float) -> None:
        self.apply(_add_adapter, timeout, name, lora_id, directory)

    def refuse_older(self, newest: str, kept: Collection[str], timeout: float) -> None:
        self.apply(_refuse_older, timeout, newest, frozenset(kept))

    def adapters_in_use(self, timeout: float) -> set[str] | None:
        return None if self.apply(_is_busy, timeout) else set()

    def apply(self, function: Callable[..., Any], timeout: float, *args: Any) -> Any:
        """Call a function of this module with the engine."""
        del timeout
        return function(self._llm, *args)


class RayClient(LlmClient):
    """A Ray actor with the methods of ``vllm.LLM``, such as ``ray.remote(LLM).remote(…)``."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.name = repr(handle)

    def call(self, method: str, timeout: float, *args: Any) -> Any:
        import ray

        reference = getattr(self._llm, method).remote(*args)
        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name}: {method} failed: {error}") from error

    def reset_encoder_cache(self, timeout: float) -> None:
        self.apply(_reset_encoder_cache, timeout)

    def apply(self, function: Callable[..., Any], timeout: float, *args: Any) -> Any:
        return self.call("__ray_call__", timeout, function, *args)


class HttpClient(Client):
    """A server that ``vllm serve`` started with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        url: the server's URL, such as ``"http://localhost:8000"``.
        api_key: the server's ``--api-key``; None if it has none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise OptionError(f"an engine's URL is like 'http://localhost:8000', not {url!r}")
        self.name = url.rstrip("/")
        self._proxy = _proxy_for(url)
        # No proxy for loopback addresses, which it cannot reach.
        handlers = [] if self._proxy else [urllib.request.ProxyHandler({})]
        self._opener = urllib.request.build_opener(*handlers)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, method: str, timeout: float, *args: Any) -> Any:
        """Send a request to the path with the method's name."""
        return self._parsed(method, self.request(method, timeout, *args))

    def get(self, path: str, timeout: float) -> Any:
        """Return the JSON reply to a GET request."""
        return self._parsed(path, self.request(path, timeout, method="GET"))

    def _parsed(self, path: str, reply: bytes) -> Any:
        try:
            return json.loads(reply or b"null")
        except ValueError as error:
            raise EngineError(f"{self.name}/{path}: {error}{self._proxy}") from error

    def request(
        self,
        path: str,
        timeout: float,
        body: Any = None,
        *,
        method: str = "POST",
        setting: str = _DEV_MODE,
    ) -> bytes:
        """Send an HTTP request.

        Args:
            path: the path, relative to the server's URL.
            timeout: the timeout in seconds.
            body: the body, sent as JSON.
            method: the HTTP method.
            setting: the setting that the server needs for this path, for the error message.

        Returns:
            The body of the reply.

        Raises:
            EngineError: the server cannot be reached, or answers with an error.
        """
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        request = urllib.request.Request(  # noqa: S310  # checked in the constructor
            f"{self.name}/{path}", data, self._headers, method=method
        )
        try:
            with self._opener.open(request, timeout=timeout) as reply:
                found: bytes = reply.read()
                return found
        except urllib.error.HTTPError as error:
            text = error.read(4000).decode(errors="replace")
            advice = ""
            if error.code == 404:
                advice = f"; start it with {setting}"
            message = f"{self.name}/{path}: {error.code} {text}{advice}{self._proxy}"
            raise EngineError(message) from error
        except OSError as error:
            raise EngineError(f"{self.name}/{path}: {error}{self._proxy}") from error

    def world_size(self, timeout: float) -> int:
        return int(self.get("get_world_size", timeout)["world_size"])

    def pause(self, mode: Pause, timeout: float) -> None:
        self.call(f"pause?mode={mode}&clear_cache=true", timeout)

    def is_paused(self, timeout: float) -> bool:
        return bool(self.get("is_paused", timeout)["is_paused"])

    def label(self, version: str, timeout: float) -> None:
        self.call("update_weight_version", timeout, {"new_version": version})

    def resume(self, timeout: float) -> None:
        self.call("resume", timeout)

    names_adapters = True

    def add_adapter(self, name: str, lora_id: int, directory: str, timeout: float) -> None:
        del lora_id
        self.request(
            "v1/load_lora_adapter",
            timeout,
            {"lora_name": name, "lora_path": directory},
            setting=_RUNTIME_LORA,
        )

    def check_adapters(self, timeout: float) -> None:
        try:
            self.request("v1/load_lora_adapter", timeout, {}, setting=_RUNTIME_LORA)
        except EngineError as error:
            # A server with this call refuses a body without names.
            if not isinstance(cause := error.__cause__, urllib.error.HTTPError) or (
                cause.code not in (400, 422)
            ):
                raise
        self._metrics(timeout)

    def served_adapters(self, name: str, timeout: float) -> list[str]:
        models = self.get("v1/models", timeout)["data"]
        # A user's own adapter with such a name is in another directory.
        ours = re.compile(rf"(?:.*/)?({re.escape(name)}-v[0-9]+)-[0-9a-f]{{8}}/?")
        found = {model["id"]: ours.fullmatch(model.get("root") or "") for model in models}
        return [each for each, match in found.items() if match and match[1] == each]

    def forget_adapter(self, name: str, timeout: float) -> None:
        body = {"lora_name": name}
        self.request("v1/unload_lora_adapter", timeout, body, setting=_RUNTIME_LORA)

    def adapters_in_use(self, timeout: float) -> set[str] | None:
        text = self._metrics(timeout)
        if hides_adapters(text) or self.is_paused(timeout):
            return None
        return adapters_in_progress(text)

    def _metrics(self, timeout: float) -> str:
        text = self.request("metrics", timeout, method="GET", setting=_METRICS).decode()
        if f"# TYPE {_GAUGE} " not in text:
            raise EngineError(f"{self.name} has no metric {_GAUGE}; start it with {_METRICS}")
        return text


def _proxy_for(url: str) -> str:
    """Return a clause about the proxy for a URL; empty if there is none."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return ""
    proxied = parts.scheme in urllib.request.getproxies()
    if not proxied or urllib.request.proxy_bypass(host):
        return ""
    return (
        f"; the proxy was asked that {parts.scheme}_proxy names: for a server that is reached "
        f"without one, type export no_proxy={host}"
    )


def adapters_in_progress(text: str) -> set[str]:
    r"""Return the adapters of requests in progress, from a server's metrics.

    Each sample of the gauge has the adapters' names in its labels and a time as its value.

    Args:
        text: the reply of ``/metrics``.

    Example:
        >>> gauge = 'vllm:lora_requests_info{running_lora_adapters="%s",waiting_lora_adapters=""}'
        >>> sorted(adapters_in_progress(f"{gauge % 'a-v1'} 1.5e9\n{gauge % 'a-v1,a-v2'} 1.6e9"))
        ['a-v1', 'a-v2']
    """
    samples = []
    for line in text.splitlines():
        if line.startswith(f"{_GAUGE}{{"):
            labels, _, value = line.rpartition(" ")
            samples.append((float(value), dict(_LABEL.findall(labels))))
    labels_of_newest = max(samples, key=lambda sample: sample[0])[1] if samples else {}
    kinds = ("running_lora_adapters", "waiting_lora_adapters")
    return {n for kind in kinds for n in labels_of_newest.get(kind, "").split(",") if n}


def hides_adapters(text: str) -> bool:
    r"""Return whether requests may use adapters that are missing in a server's metrics.

    Metrics show the adapter of a request only after its first token, and only for one engine of a
    server with data parallelism.

    Example:
        >>> hides_adapters('vllm:num_requests_waiting{engine="0"} 0.0')
        False
        >>> hides_adapters('vllm:num_requests_waiting{engine="0"} 3.0')
        True
    """
    waiting, running = (
        [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
        for name in ("vllm:num_requests_waiting{", "vllm:num_requests_running{")
    )
    return any(waiting) or (len(running) > 1 and any(running))


def _add_adapter(llm: Any, name: str, lora_id: int, directory: str) -> None:
    from vllm.lora.request import LoRARequest

    llm.llm_engine.add_lora(LoRARequest(name, lora_id, directory))


class _Requests:
    """Wraps ``LLMEngine.add_request`` to refuse requests for unloaded adapters.

    vLLM looks for an adapter's files just before its ranks compute. If the files are gone, the
    engine dies.

    Args:
        add_request: the engine's own method.
    """

    def __init__(self, add_request: Callable[..., Any]) -> None:
        self._add_request = add_request
        self._signature = inspect.signature(add_request)
        #: By adapter name: its newest version, and the older versions that are still loaded.
        self.loaded: dict[str, tuple[str, frozenset[str]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        request = given.get("lora_request") or getattr(given.get("prompt"), "lora_request", None)
        asked = getattr(request, "lora_name", "")
        name, number = _version_of(asked)
        newest, kept = self.loaded.get(name, ("", frozenset()))
        if newest and number < _version_of(newest)[1] and asked not in kept:
            raise ValueError(
                f"the adapter {asked!r} was unloaded when {newest!r} had been loaded; ask for the "
                "newest before each generate: lora_request=target.lora_request()"
            )
        return self._add_request(*args, **kwargs)


def _version_of(adapter: str) -> tuple[str, int]:
    """Split an adapter's name into name and version; for a user's own adapter, there is none."""
    name, _, number = adapter.rpartition("-v")
    return (name, int(number)) if number.isdecimal() else ("", 0)


def _refuse_older(llm: Any, newest: str, kept: frozenset[str]) -> None:
    engine = llm.llm_engine
    if not isinstance(engine.add_request, _Requests):
        engine.add_request = _Requests(engine.add_request)
    engine.add_request.loaded[_version_of(newest)[0]] = newest, kept


def _is_busy(llm: Any) -> bool:
    return bool(llm.llm_engine.has_unfinished_requests())


def _reset_encoder_cache(llm: Any) -> None:
    engine = getattr(llm, "llm_engine", None)
    if engine is not None:
        engine.reset_encoder_cache()


def client_for(engine: Any) -> Client:
    """Return the client for a URL, a Ray actor, or an object with the methods of ``LLM``."""
    if isinstance(engine, Client):
        return engine
    if isinstance(engine, str):
        return HttpClient(engine)
    if type(engine).__module__.startswith("ray."):
        return RayClient(engine)
    if callable(getattr(engine, "init_weight_transfer_engine", None)):
        return LlmClient(engine)
    raise OptionError(
        f"{engine!r} is not an engine; give an LLM(…, weight_transfer_config=…), a Ray actor that "
        "is one, or the URL of a server"
    )
