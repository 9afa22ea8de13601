"""The address of one worker: all that a receiver must know to reach and to fit its sender."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import isclass
from typing import Any, ClassVar, Self, get_args

from sync_core import registry
from sync_core.checks import parse_options
from sync_core.errors import AddressError, NotAPluginError, OptionError, PayloadError
from sync_core.hooks import ApplyContext, TransportContext
from sync_core.models.extract import Strategy
from sync_core.transports.transport import ReceiverTransport
from sync_core.weights.layout import Layout
from sync_core.wrapping import WrappingScheme, endpoint_from_json, endpoint_to_json, make_receiver

#: The version of the JSON form, and the entry that holds it.
_FORMAT = 1
_MARK = "sync_address"
# The entry that an endpoint has which receivers resolve: the name of its kind.
_INDIRECT = "sync_endpoint"
_TYPE = "type sender.address(worker_id).to_json()"
_TOKEN = re.compile("[0-9a-f]{32}")
# What tokens and names of sockets have, and no name of a plugin.
_SECRET = re.compile("[0-9a-f]{16}")
#: A longer text is refused before it is parsed.
_MAX_CHARACTERS = 200_000_000


class IndirectEndpoint(ABC):
    """The endpoint of an address that workers share: a receiver resolves it before it connects.

    A companion of a sender makes such addresses from `Sender.address_template`. The endpoint
    pickles, and works where its class is installed. An entry point of the group
    ``sync.endpoints`` refers to the class, so that it has a JSON form.

    Attributes:
        kind: the name of the entry point.
    """

    kind: ClassVar[str]

    @abstractmethod
    def resolve(self, address: Address, timeout: float) -> Address:
        """Return the address of this worker; called again by one that has lost its sender.

        Args:
            address: the address that has this endpoint.
            timeout: in seconds.
        """

    @abstractmethod
    def to_json(self, inner: Callable[[Any], Any]) -> Any:
        """Return it as plain values.

        Args:
            inner: writes an endpoint of the address's scheme.
        """

    @classmethod
    @abstractmethod
    def from_json(cls, value: Any, inner: Callable[[Any], Any]) -> Self:
        """Return the endpoint that `to_json` wrote.

        Args:
            value: any plain value.
            inner: reads an endpoint of the address's scheme.

        Raises:
            AddressError: it is something else; without the value, which may be a secret.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one worker's weights, made by `Sender.address`.

    It can be pickled, and it has a JSON form, which names plugins and runs nothing when it is read.

    Args:
        scheme: the scheme's name, or the plugin object that the sender was given.
        layers: the layers that the receiver needs, as they were given to the sender.
        layouts: for each of them, the layout that it was given in `prepare_weights`.
        options: the options of the scheme.
        worker_id: the worker that the address is for.
        model_id: the model's name.
        endpoint: what the transport needs to reach its sender.
        token: the secret of this worker and its sender, by which each proves to the other that it
            is the one.
        sender_token: the secret that the sender shares with all its workers; see
            `TransportContext`. Empty where that is the token.
        strategy: how weights are read and written.
        zero_copy: whether the receiver's parameters become views of what arrives.
        cast: whether what arrives is cast to the dtypes of the receiver's model.
        timeout: the default deadline of blocking calls, in seconds.
        layout: the layout that the receiver's model must have, but for ``cast``: that of the
            trainer's model as the layers have changed it that no receiver undoes.
        source_layout: the layout of the trainer's model, before any layer changes it.
    """

    scheme: Any
    layers: tuple[Any, ...]
    layouts: tuple[Layout, ...] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    worker_id: int
    model_id: str
    endpoint: Any = field(repr=False)
    token: str = field(repr=False)
    strategy: Strategy
    zero_copy: bool
    cast: bool
    timeout: float
    layout: Layout = field(repr=False)
    source_layout: Layout = field(repr=False)
    sender_token: str = field(default="", repr=False)

    def transport_context(
        self, scheme: str, timeout: float, *, background: bool = False
    ) -> TransportContext:
        """Return what the receiver's transport is made from."""
        return TransportContext(
            side="receiver",
            scheme=scheme,
            model_id=self.model_id,
            token=self.sender_token or self.token,
            secret=self.token,
            timeout=timeout,
            zero_copy=self.zero_copy,
            background=background,
            options=self.options,
            worker_id=self.worker_id,
            endpoint=self.endpoint,
            layout=self.layout,
        )

    def connect(self, timeout: float) -> ReceiverTransport:
        """Make the receiver's side of the transport, and no `Receiver`.

        For addresses of a side channel: see `Sender.side_channel`.

        Args:
            timeout: in seconds.

        Raises:
            SenderLostError: the sender is gone.
        """
        plugin = registry.find(registry.SCHEMES, self.scheme)
        return make_receiver(plugin, self.transport_context(plugin.name, timeout))

    def apply_context(self, version: int, held: int = 0, *, partial: bool = False) -> ApplyContext:
        """Return the context for loading a version."""
        return ApplyContext(
            model_id=self.model_id,
            version=version,
            worker_id=self.worker_id,
            zero_copy=self.zero_copy,
            partial=partial,
            cast=self.cast,
            held=held,
            layout=self.layout,
            source_layout=self.source_layout,
            strategy=self.strategy,
        )

    def to_json(self) -> str:
        """Return the address as JSON, with its tokens: secrets.

        Schemes and layers are named in it, so it reaches receivers that have them installed. A
        scheme that wraps another is written with its options, which must be plain values.

        Raises:
            AddressError: the scheme or a layer is an object rather than a name, or the endpoint
                cannot be written as JSON, such as an open pipe or a Ray actor.

        Example:
            >>> import sync_core, torch
            >>> with sync_core.Sender("shm", torch.nn.Linear(2, 1), num_workers=1) as sender:
            ...     text = sender.address(0).to_json()
            ...     Address.from_json(text) == sender.address(0)
            True
        """
        scheme = _plain_scheme(self.scheme)
        for layer in self.layers:
            if not isinstance(layer, str):
                raise AddressError(_is_object(layer))
        headers = [self.layout]
        for layout in (self.source_layout, *self.layouts):
            if layout not in headers:
                headers.append(layout)
        content = {
            _MARK: _FORMAT,
            **{name: getattr(self, name) for name in _FITS},
            "scheme": scheme,
            "endpoint": self._plain_endpoint(),
            # Mostly one and the same.
            "headers": [layout.header[8:].decode() for layout in headers],
            "layout": 0,
            "source_layout": headers.index(self.source_layout),
            "layouts": [headers.index(layout) for layout in self.layouts],
        }
        if not _is_plain(self.options):
            raise AddressError(
                f"an option of scheme {self.scheme!r} has no JSON form, among: "
                f"{', '.join(self.options)}; give text, numbers and lists, or pickle the address"
            )
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The address that `to_json` wrote.

        The text is checked entirely before anything is made from it: no plugin is loaded but the
        installed scheme that it names, and no connection is made.

        Raises:
            AddressError: it is not such a text; the message names the wrong entry.
            PluginNotFoundError: the scheme is not installed here.
        """
        content = _parse(text)
        _check_tokens(content, text)
        try:
            layout, source_layout, *before = _take_layouts(content)
            endpoint = content.pop("endpoint")
        except KeyError as error:
            raise AddressError(f"an address must have the entry {error}; {_TYPE}") from None
        except (TypeError, UnicodeError, PayloadError):
            # Not from the cause, which has the value: it may be a secret in the wrong place.
            raise AddressError(f"an address must have the layouts of a sender; {_TYPE}") from None
        for name, fits in _FITS.items():
            if name not in content or not fits(content[name]):
                # The value may be a token, its own or one that is in the wrong place.
                kind = type(content[name]).__name__ if name in content else "nothing"
                raise AddressError(f"an address cannot have this {name}, which is of type {kind}")
        if unknown := content.keys() - _FITS.keys():
            name = min(unknown)
            found = f"{name:.20}" if _is_name(name) else "of such a name"
            raise AddressError(f"an address has no entry {found}; {_TYPE}")
        if len(before) != len(content["layers"]):
            raise AddressError("an address needs a layout for each of its layers")
        content["layers"] = tuple(content["layers"])
        content["scheme"] = _read_scheme(content["scheme"])
        endpoint = _read_endpoint(_found(content["scheme"]), endpoint)
        if content["worker_id"] < 0 and not isinstance(endpoint, IndirectEndpoint):
            raise AddressError(f"an address of one worker needs its worker_id; {_TYPE}")
        return cls(
            **content,
            endpoint=endpoint,
            layout=layout,
            source_layout=source_layout,
            layouts=tuple(before),
        )

    def _plain_endpoint(self) -> Any:
        write = partial(endpoint_to_json, registry.find(registry.SCHEMES, self.scheme))
        given = self.endpoint
        if isinstance(given, IndirectEndpoint):
            endpoint: Any = {_INDIRECT: given.kind, "value": given.to_json(write)}
        else:
            endpoint = write(given)
        if not _is_plain(endpoint):
            raise AddressError(
                f"scheme {self.scheme!r} has no JSON form of its addresses, as they hold a "
                f"{type(self.endpoint).__name__}; pickle the address, or use a scheme such as "
                "'shm' or 'dist'"
            )
        return endpoint


def _take_layouts(content: dict[str, Any]) -> list[Layout]:
    headers, of_layers = content.pop("headers"), content.pop("layouts")
    if not (isinstance(headers, list) and isinstance(of_layers, list)):
        raise AddressError("an address needs lists of its layouts")
    layouts = [_read_layout(header) for header in headers]
    chosen = [content.pop("layout"), content.pop("source_layout"), *of_layers]
    if not all(type(index) is int and 0 <= index < len(layouts) for index in chosen):
        raise AddressError("an address names a layout that is not in it")
    return [layouts[index] for index in chosen]


def _is_object(plugin: object) -> str:
    return (
        f"an address with the plugin object {plugin!r} has no JSON form; give the sender schemes "
        "and layers by their installed names"
    )


def _plain_scheme(scheme: Any) -> Any:
    """Return a scheme as it is written: a name, a chain, or a scheme that wraps one of these."""
    if isinstance(scheme, str):
        return scheme
    if not isinstance(scheme, WrappingScheme):
        raise AddressError(_is_object(scheme))
    options = {f.name: getattr(scheme, f.name) for f in fields(scheme) if f.name != "inner"}
    if not _is_plain(options) or registry.wrapper(scheme.wrapper) is not type(scheme):
        raise AddressError(_is_object(scheme))
    return {"wrapper": scheme.wrapper, "inner": _plain_scheme(scheme.inner), "options": options}


def _read_scheme(written: Any) -> Any:
    if isinstance(written, str):
        return written
    given = {"inner": _read_scheme(written["inner"]), **written["options"]}
    try:
        kind = registry.wrapper(written["wrapper"])
        made = parse_options(kind, given, f"scheme {written['wrapper']!r}")
    except (NotAPluginError, OptionError):
        # Not from the cause, which has the value: it may be a secret.
        raise AddressError(
            f"the scheme of an address must have options of {written['wrapper']!r}; {_TYPE}"
        ) from None
    return made


def _read_endpoint(scheme: registry.Plugin, written: Any) -> Any:
    read = partial(endpoint_from_json, scheme)
    if not (isinstance(written, dict) and written.keys() == {_INDIRECT, "value"}):
        return read(written)
    name = written[_INDIRECT]
    if not _is_name(name):
        raise AddressError(f"an address cannot have an endpoint of this kind; {_TYPE}")
    entry = registry.entry_point(registry.ENDPOINTS, name)
    owner = registry.describe(registry.ENDPOINTS, entry)
    kind = registry.imported(owner, entry)
    if not (isclass(kind) and issubclass(kind, IndirectEndpoint)):
        raise AddressError(f"{owner} is not a subclass of sync_core.IndirectEndpoint")
    return kind.from_json(written["value"], read)


# More schemes do not wrap each other.
_DEEPEST = 8


def _is_scheme(value: Any, deepest: int = _DEEPEST) -> bool:
    if isinstance(value, WrappingScheme):
        return True  # `_plain_scheme` writes it
    if not isinstance(value, dict):
        return _is_name(value)
    return (
        deepest > 0
        and value.keys() == {"wrapper", "inner", "options"}
        and _is_name(value["wrapper"])
        and _is_scheme(value["inner"], deepest - 1)
        and isinstance(value["options"], dict)
        and "inner" not in value["options"]
        and _is_plain(value["options"])
    )


def _found(scheme: Any) -> registry.Plugin:
    """Return the scheme of an address, with those that it wraps."""
    try:
        plugin = registry.find(registry.SCHEMES, scheme)
        _ = plugin.innermost
    except (NotAPluginError, OptionError) as error:
        raise AddressError(f"the scheme of an address cannot be used: {error}") from error
    return plugin


def _check_tokens(content: dict[str, Any], text: str | bytes) -> None:
    """Refuse a text in which a token is not where it belongs, so that no message prints it."""
    shared = content.setdefault("sender_token", "")
    for token in (content.get("token"), *(() if shared == "" else (shared,))):
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            kind = "nothing" if token is None else f"another {type(token).__name__}"
            raise AddressError(
                f"the token of an address must be 32 hex digits, got {kind}; {_TYPE}"
            )
        found = text.count(token) if isinstance(text, str) else text.count(token.encode())
        if found != 1:
            raise AddressError(f"an address must have its token in one entry, got {found}; {_TYPE}")


def _read_layout(header: object) -> Layout:
    if not isinstance(header, str):
        raise TypeError("a layout must be a text")
    data = header.encode()
    return Layout.from_header(len(data).to_bytes(8, "little") + data)


def _parse(text: str | bytes) -> dict[str, Any]:
    if not isinstance(text, str | bytes) or len(text) > _MAX_CHARACTERS:
        raise AddressError(f"an address in JSON is a text, not a {type(text).__name__}")
    try:
        content = json.loads(text)
        # JSON may have half of a surrogate pair, which no file, socket or log takes as text.
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeError:
        raise AddressError(f"not an address in JSON: its text is not Unicode; {_TYPE}") from None
    except (ValueError, RecursionError) as error:
        raise AddressError(f"not an address in JSON: {error}; {_TYPE}") from error
    if not isinstance(content, dict) or content.pop(_MARK, None) != _FORMAT:
        raise AddressError(
            f"not an address in JSON of format {_FORMAT}; {_TYPE} "
            "with the same sync-core at both ends"
        )
    return content


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives back a value as it was."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value)


def _is_name(value: Any) -> bool:
    # A message may print the name of a plugin, but no secret passed as one.
    return _is_text(value) and not _SECRET.search(value)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


# What each entry of an address in JSON may hold, but for layouts and the endpoint.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "scheme": _is_scheme,
    "layers": lambda value: isinstance(value, list | tuple) and all(map(_is_name, value)),
    "options": lambda value: isinstance(value, dict) and _is_plain(value),
    # -1: of an address that workers share.
    "worker_id": lambda value: type(value) is int and -1 <= value < 1 << 63,
    "model_id": _is_text,
    "token": _is_text,
    "sender_token": lambda value: type(value) is str,
    "strategy": lambda value: value in get_args(Strategy),
    "zero_copy": _is_flag,
    "cast": _is_flag,
    "timeout": lambda value: type(value) in (int, float) and 0 < value < math.inf,
}
