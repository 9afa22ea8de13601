"""The four hooks of a plugin, the contexts that they get, and the capabilities they declare."""

from __future__ import annotations

import difflib
import hashlib
import hmac
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import pluggy

from sync_core.checks import Options, parse_options, read_option
from sync_core.errors import AddressError, UnknownHookError
from sync_core.transports.transport import Notice, unheard

if TYPE_CHECKING:
    from torch import Tensor

    from sync_core.models.extract import Strategy
    from sync_core.transports.transport import ReceiverTransport, SenderTransport
    from sync_core.weights.layout import Layout
    from sync_core.weights.payload import Update

__all__ = [
    "HOOKS",
    "LAYER_CAPABILITIES",
    "SCHEME_CAPABILITIES",
    "WORKER_CAPABILITIES",
    "Finding",
    "FindingsContext",
    "FindsProblems",
    "implemented",
    "read_option",
]


def check_endpoint(scheme: str, plugin: object, endpoint: object) -> None:
    """Raise `AddressError` for an endpoint that is not of the scheme's ``endpoint_type``."""
    kind: Any = getattr(plugin, "endpoint_type", None)
    if kind is None or isinstance(endpoint, kind):
        return
    # Of the type alone, as the value may be a secret.
    raise AddressError(
        f"the endpoint of an address of scheme {scheme!r} must be of type "
        f"{getattr(kind, '__name__', kind)}, got {type(endpoint).__name__}; type "
        "sender.address(worker_id)"
    )


#: Of schemes. A scheme may declare others, which its own documentation explains.
SCHEME_CAPABILITIES = MappingProxyType(
    {
        "aborts": "no worker commits a version that was given up, or that one worker cannot stage",
        "all_or_none": "a worker commits a version once all workers of the send have staged it",
        "background": "weights take time to come: Receiver(…, background=True) stages them",
        "broadcast": "a version is packed or put once, however many workers get it",
        "compares": "its transport compares versions, and leaves out what a worker has already",
        "cross_host": "workers may be on other machines",
        "cross_process": "workers may be in other processes",
        "cuda": "tensors on a GPU travel without a copy in the memory of the host",
        "descriptors": "each worker needs an open file, such as the end of a pipe",
        "joined": "the addresses of several senders make one of a receiver; versions are whole",
        "late_join": "workers may be added while the sender runs",
        "publishes": "versions are for readers that the sender does not know: ``num_workers`` may "
        "be left out, and then `Sender.address` needs no id",
        "pull": "workers fetch what they want; the sender need not be able to reach them",
        "same_object": "workers act with the trainer's own object, so nothing travels",
        "worker_paths": "handles of workers may be paths, looked up in the sender's context",
        "zero_copy": "parameters of workers may become views of what arrived",
    }
)

#: Of layers, which need declare none.
LAYER_CAPABILITIES = MappingProxyType(
    {
        "cast": "floating-point tensors may travel in another dtype than the worker's model has",
        "checks": "its ``apply_weights`` changes no update, so that a worker's model is compared "
        "with the layout when its receiver is made",
        "checksums": "it proves that updates arrive unchanged; of a version that travels in parts, "
        "each part is proved instead",
        "from_start": "it needs values at version 0: weights that are made at each send are "
        "prepared as version 0 by it, and by the layers before it, right before the first send",
        "partial": "updates may lack tensors that the workers have: see Update.base; a layer "
        "at both ends has to declare it, or one that is ``followed_by`` such a layer",
        "regions": "tensors are renamed, fused and cut, and nothing else: its ``region_sources()`` "
        "tells how, and is used instead of its hook where the model is spread over ranks",
    }
)

#: Of worker groups.
WORKER_CAPABILITIES = MappingProxyType(
    {
        "add": "workers can be added later",
        "cross_host": "workers may be on other machines",
        "cross_process": "workers are in other processes",
        "descriptors": "open files that multiprocessing can pass on may be arguments of calls",
        "parallel": "workers run at the same time",
        "restart": "the place of a worker that was lost can be taken by a new one",
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that stops no command, and will be felt; one line in the output of doctor.

    Args:
        about: what it is about, such as ``"/dev/shm"``.
        problem: what is wrong.
        remedy: what to type, or to do.

    Example:
        >>> print(Finding("/mnt/run", "is read-only", "type: mount -o remount,rw /mnt/run"))
        /mnt/run: is read-only; type: mount -o remount,rw /mnt/run
    """

    about: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.about}: {self.problem}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsContext:
    """The argument of a scheme's ``findings``.

    Args:
        scheme: the name of the scheme, for messages.
        options: the options that follow the scheme in the command, such as
            ``sync-core doctor shm --slots 5``; read them with `parse_options`.
    """

    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def parse_options(self, options_type: type[Options]) -> Options:
        """Return the options as an instance of a dataclass that declares them.

        Args:
            options_type: a dataclass whose fields are the scheme's options.

        Raises:
            OptionError: as `TransportContext.parse_options` raises it. A ``findings`` that does not
                catch it finds nothing: trying the scheme reports the same error.

        Example:
            >>> from dataclasses import dataclass
            >>> @dataclass(frozen=True)
            ... class Options:
            ...     slots: int = 3
            >>> FindingsContext(scheme="shm").parse_options(Options)
            Options(slots=3)
        """
        return parse_options(options_type, self.options, f"scheme {self.scheme!r}")


@runtime_checkable
class FindsProblems(Protocol):
    """A scheme that reports problems around it to ``sync-core doctor``."""

    def findings(self, context: FindingsContext) -> Iterable[Finding]:
        """Return the problems; called before the scheme is tried, and to change nothing."""


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:32]


def worker_token(secret: str, worker_id: int) -> str:
    """Return the token of a worker, from which neither the secret nor another token follows.

    Args:
        secret: what only the sender has.
        worker_id: the worker.
    """
    return _derived(secret, f"worker {worker_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """The argument of `create_transport`.

    Args:
        side: ``"sender"`` or ``"receiver"``: which transport is wanted.
        scheme: the name of the scheme, for messages.
        model_id: the name of the model that the weights belong to.
        models: (sender) the names of the models, where several travel as one.
        token: the secret that this sender shares with all its workers. Names derived from it keep
            senders apart; a peer that proves it may be any worker, see `worker_token`.
        secret: (sender) what the tokens of its workers are derived from, and no worker has;
            (receiver) the token of its address. `worker_token` reads it.
        channel: which of the sender's transports this is; see `for_channel`.
        timeout: the deadline, in seconds, of a call that may block.
        zero_copy: whether receivers keep views of what the transport delivers.
        background: (receiver) whether the newest version is staged in its own thread; see
            `WrappingScheme.inner_receiver`. A transport need not look at it.
        options: the options that the user gave to `Sender`; read them with `parse_options`.
        layers: (sender) the layers that the user gave; see `WrappingScheme.adopt`.
        worker_ids: (sender) the workers to serve.
        workers: (sender) handles of the workers, for a scheme that calls into them.
        layout: (sender) the layout of every payload that is not ``partial``; (receiver) one that
            payloads are likely to have.
        make_address: (sender) makes the `Address` of a worker, for a transport that makes the
            receiver itself: ``make_address(worker_id=…, endpoint=…)``.
        notify: (sender) tells the sender what the transport knows of a worker between sends; it
            may be called from any thread, with locks held, or never.
        worker_id: (receiver) which worker this is.
        endpoint: (receiver) what `SenderTransport.address` gave for this worker.
    """

    side: Literal["sender", "receiver"]
    scheme: str
    model_id: str
    token: str = field(repr=False)
    timeout: float
    secret: str = field(default="", repr=False)
    channel: str = ""
    zero_copy: bool = False
    background: bool = False
    models: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    layers: tuple[Any, ...] = field(default=(), repr=False)
    worker_ids: tuple[int, ...] = ()
    workers: tuple[Any, ...] = ()
    layout: Layout | None = None
    make_address: Callable[..., Any] | None = None
    notify: Callable[[int, Notice], None] = unheard
    worker_id: int = -1
    endpoint: Any = field(default=None, repr=False)

    def worker_token(self, worker_id: int | None = None) -> str:
        """Return the secret that the sender shares with one worker, and with no other.

        Both ends prove to each other that they know it, before either believes what the other
        says. It is not sent, nor written where others read it.

        Args:
            worker_id: the worker; a receiver knows its own token only, and may leave it out.

        Example:
            >>> sender = TransportContext(
            ...     side="sender", scheme="x", model_id="policy", token="shared", timeout=60.0,
            ...     secret="c0ffee")
            >>> sender.worker_token(0) == sender.worker_token(1)
            False
        """
        if not self.token:
            return ""  # of a context that was made by hand, and has no secret
        own = self.secret
        if self.side == "sender" or not own:
            own = worker_token(
                own or self.token, self.worker_id if worker_id is None else worker_id
            )
        return _derived(own, self.channel) if self.channel else own

    def for_channel(self, name: str, **changed: Any) -> Self:
        """Return the context of a further transport between the same ends, with other secrets.

        Args:
            name: tells it from the others, such as ``"decisions"``; both ends give the same.
            changed: other fields in which it differs.
        """
        token = f"{self.token}-{name}" if self.token else ""
        return replace(self, token=token, channel=f"{self.channel}-{name}", **changed)

    def parse_options(self, options_type: type[Options]) -> Options:
        """The options as an instance of a dataclass that declares them.

        Args:
            options_type: a dataclass whose fields are the scheme's options.

        Raises:
            OptionError: an option that the dataclass lacks, or one that it needs is missing, or is
                of another type than it declares.

        Example:
            >>> from dataclasses import dataclass
            >>> @dataclass(frozen=True)
            ... class Options:
            ...     slots: int = 3
            >>> context = TransportContext(
            ...     side="sender", scheme="shm", model_id="policy", token="", timeout=60.0,
            ...     options={"slots": 5})
            >>> context.parse_options(Options)
            Options(slots=5)
        """
        return parse_options(options_type, self.options, f"scheme {self.scheme!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendContext:
    """The argument of `prepare_weights`.

    Args:
        model_id: the name of the model.
        version: the version that the update will carry; 0 when the sender, once at its start,
            prepares an update only to learn the layout that travels.
        worker_ids: the workers that will get it.
        model: the sender's model, or what a reference leads to; None if the sender has none, or
            is given weights by hand.
        acknowledged: for each of these workers, the version that its model has completely; 0 for
            none. Empty where the scheme compares versions itself, and needs them whole.
        own: where `Sender.send` was given weights, and the sender has a model: returns the tensors
            of that model, by name. None otherwise.
        by_hand: whether `Sender.send` was given weights.
        skipped: whether no worker gets the update, as layers hold all back: nothing is sent. Only
            senders that have a layer with the capability ``partial`` prepare such updates.
        stand_ins: whether the tensors hold no values: at version 0, those of weights that are made
            at each send.
    """

    model_id: str
    version: int
    worker_ids: tuple[int, ...]
    model: Any = None
    acknowledged: Mapping[int, int] = field(default_factory=dict)
    own: Callable[[], Mapping[str, Tensor]] | None = None
    by_hand: bool = False
    skipped: bool = False
    stand_ins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyContext:
    """The argument of `apply_weights`.

    Args:
        model_id: the name of the model.
        version: the version of the update; 0 for weights given by hand.
        worker_id: which worker this is.
        zero_copy: whether the model's parameters shall become the update's tensors.
        partial: whether the update may lack some of the model's tensors.
        cast: whether a floating-point tensor may be written to one of another floating-point
            dtype; see the capability ``cast`` of layers.
        held: the version that the model has; 0 for none.
        layout: for a layer, the layout that its `prepare_weights` was given: what it has to
            restore.
        source_layout: the layout of the trainer's model, before any layer changed it.
        strategy: how the model is read and written; see `sync_core.Sender`.
    """

    model_id: str
    version: int
    worker_id: int
    zero_copy: bool
    partial: bool
    cast: bool = False
    held: int = 0
    layout: Layout | None = None
    source_layout: Layout | None = None
    strategy: Strategy = "tensordict"


@dataclass(frozen=True, slots=True, kw_only=True)
class BindContext:
    """The argument of ``bind``, by which a layer or a scheme makes the object for one end.

    The hooks of that object share its state. A scheme inside of another one is not bound.

    Args:
        side: the end that the object is for.
        model_id: the name of the model.
        worker_id: (receiver) the worker.
        layout: (receiver) the layout that a layer was given in `prepare_weights`; for a scheme, the
            one that travels.
        source_layout: (receiver) the layout of the trainer's model.
        capabilities: those of the scheme.
        strategy: how modules are read; see `sync_core.Sender`.
        cast: (sender) whether a layer has the capability ``cast``.
    """

    side: Literal["sender", "receiver"]
    model_id: str
    worker_id: int = -1
    layout: Layout | None = None
    source_layout: Layout | None = None
    capabilities: frozenset[str] = frozenset()
    strategy: Literal["tensordict", "state_dict", "checkpoint"] = "tensordict"
    cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipContext:
    """The argument of `skip_update`.

    Args:
        model_id: the name of the model.
        worker_id: the worker that is about to be updated.
        version: the newest version before this push.
        pushes: how many pushes to this worker, this one included, since one last went out.
        updated: whether one ever went out to this worker.
    """

    model_id: str
    worker_id: int
    version: int
    pushes: int
    updated: bool


PROJECT = "sync"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def create_transport(context: TransportContext) -> SenderTransport | ReceiverTransport | None:
    """Make one side of a transport; backends only.

    Args:
        context: says by ``context.side`` which side is wanted, and with what options.

    Returns:
        A `SenderTransport` or a `ReceiverTransport`, as asked for.
    """


@hookspec(firstresult=True)
def prepare_weights(update: Update, context: SendContext) -> Update | None:
    """Give the update to send.

    Its tensors are the trainer's own, so an implementation puts others in their place and
    changes none of them. A layer is a wrapper that changes the update after its ``yield`` and
    returns it; layers do so in the order in which the user gave them.

    Args:
        update: the weights as extracted from the model.
        context: the version, and the workers that it is for.
    """


@hookspec(firstresult=True)
def apply_weights(update: Update, model: Any, context: ApplyContext) -> bool | None:
    """Load an update into a model, all of it or nothing, and return True.

    A layer is a wrapper that changes the update in place before its ``yield``, so that layers
    undo themselves in mirrored order. A backend that returns None leaves the loading to the core.

    Args:
        update: what arrived; its tensors are good only during the call, unless
            ``context.zero_copy`` is set.
        model: what the receiver was given as its model.
        context: the version, the worker, and how to load.
    """


@hookspec(firstresult=True)
def skip_update(context: SkipContext) -> bool | None:
    """Say whether a worker is left out of a push: True, False, or None for no opinion.

    Args:
        context: the worker, and how many pushes it has missed.
    """


#: The names of the hooks.
HOOKS = ("create_transport", "prepare_weights", "apply_weights", "skip_update")


class HookManager(pluggy.PluginManager):
    """A manager of pluggy that looks for hooks only under names that a hook can have.

    pluggy looks at every attribute, of which most are Python's own: that took 6 of the 9 ms in
    which a `Sender` was made.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if name.startswith("__"):
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return super().parse_hookspec_opts(module_or_class, name) if name in HOOKS else None


# pluggy itself says what is marked, so that both see the same functions in every version of it.
_reader = HookManager()


def implemented(plugin: object) -> dict[str, bool]:
    """The names of a plugin's hook implementations, and whether each is a wrapper."""
    return {
        name: bool(mark["wrapper"] or mark["hookwrapper"]) for name, mark in _marks(plugin).items()
    }


def check_hooks(owner: str, plugin: object) -> tuple[str, ...]:
    """The names of a plugin's hooks, of which none is misspelt and all have fitting signatures.

    Args:
        owner: names the plugin in messages.
        plugin: an object, a class or a module.

    Raises:
        UnknownHookError: the message says what to write instead.
    """
    marks = _marks(plugin)
    for name, mark in marks.items():
        if name in HOOKS:
            _check_signature(owner, name, getattr(plugin, name))
        elif not mark["optionalhook"]:
            near = difflib.get_close_matches(name, HOOKS, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownHookError(
                f"{owner} implements {name!r}, which is not a hook; {meant}"
                f"The hooks are: {', '.join(HOOKS)}"
            )
    return tuple(marks)


def _marks(plugin: object) -> dict[str, Any]:
    marks = {
        name: _reader.parse_hookimpl_opts(plugin, name)
        for name in dir(plugin)
        # Which pluggy 1.6 would compute.
        if not name.startswith("__")
        and not isinstance(inspect.getattr_static(plugin, name, None), property)
    }
    return {name: mark for name, mark in marks.items() if mark is not None}


def _check_signature(owner: str, hook: str, function: Any) -> None:
    wanted = list(inspect.signature(globals()[hook]).parameters)
    given = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
    # What pluggy passes for a default or after a bare * depends on its version.
    if all(_is_plain(parameter) and parameter.name in wanted for parameter in given):
        return
    raise UnknownHookError(
        f"{owner} implements {hook}({', '.join(map(_written, given))}); the hook is "
        f"{hook}({', '.join(wanted)}), of which an implementation may leave out what it does "
        "not need, without defaults, * or **"
    )


def _is_plain(parameter: inspect.Parameter) -> bool:
    return (
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    )


def _written(parameter: inspect.Parameter) -> str:
    bare = parameter.replace(annotation=parameter.empty)
    return f"*, {bare}" if parameter.kind is parameter.KEYWORD_ONLY else str(bare)
