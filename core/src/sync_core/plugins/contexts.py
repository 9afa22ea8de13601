"""The frozen contexts that hooks receive: one for each hook, extended only by new fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sync_core.plugins.options import Options, parse_options
from sync_core.transports.notice import Notice, unheard

if TYPE_CHECKING:
    from sync_core.plugins.address import Address
    from sync_core.weights.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What `create_transport` is given.

    Args:
        side: ``"sender"`` or ``"receiver"``: which transport is wanted.
        scheme: the name of the scheme, for messages.
        model_id: the name of the model that the weights belong to.
        models: (sender) the names of the models, where several travel as one.
        token: the secret of this sender. A transport refuses a peer that does not know it.
        timeout: the deadline, in seconds, of a call that may block.
        zero_copy: whether receivers keep views of what the transport delivers.
        options: the options that the user gave to `Sender`; read them with `parse_options`.
        worker_ids: (sender) the workers to serve.
        workers: (sender) handles of the workers, for a scheme that calls into them.
        layout: (sender) the layout of every payload that is not ``partial``; (receiver) the layout
            of the sender's model, before any layer changes it.
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
    zero_copy: bool = False
    models: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    worker_ids: tuple[int, ...] = ()
    workers: tuple[Any, ...] = ()
    layout: Layout | None = None
    make_address: Callable[..., Address] | None = None
    notify: Callable[[int, Notice], None] = unheard
    worker_id: int = -1
    endpoint: Any = None

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
    """What `prepare_weights` is given.

    Args:
        model_id: the name of the model.
        version: the version that the update will carry; 0 when the sender, once at its start,
            prepares an update only to learn the layout that travels.
        worker_ids: the workers that will get it.
    """

    model_id: str
    version: int
    worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyContext:
    """What `apply_weights` is given.

    Args:
        model_id: the name of the model.
        version: the version of the update; 0 for weights given by hand.
        worker_id: which worker this is.
        zero_copy: whether the model's parameters shall become the update's tensors.
        partial: whether the update may lack some of the model's tensors.
        layout: the layout that the update had on the sender before any layer changed it.
    """

    model_id: str
    version: int
    worker_id: int
    zero_copy: bool
    partial: bool
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipContext:
    """What `skip_update` is given.

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
