"""The scheme ``store``: a trainer writes each version once for any number of readers."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sync_core import (
    Address,
    Answer,
    Layout,
    OptionError,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_core.hooks import implemented
from sync_core.registry import LAYERS, find
from sync_core.wrapping import WrappingReceiver
from sync_plugin_std.stores import StoreOptions, store_transport
from sync_plugin_store.folders import OwnFolder
from sync_plugin_store.format import MOST_VERSIONS
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Objects, open_all, open_objects
from sync_plugin_store.pieces import PieceWriter
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.reader import RunReader
from sync_plugin_store.reading import ReadingReceiver
from sync_plugin_store.transport import (
    AnsweringSender,
    PartsEndpoint,
    PublishedVersions,
    Publishing,
    PublishingSender,
    ReadVersions,
    RecordStore,
    StoreEndpoint,
)

if TYPE_CHECKING:
    from sync_plugin_scale import Holding

__all__ = ["StoreScheme", "StoreSchemeOptions"]

_log = logging.getLogger("sync_core")
# Polling a directory costs nothing; a request costs money and some milliseconds.
_NEAR_POLL, _FAR_POLL = 0.005, 1.0
_NEAR_LOST_AFTER, _FAR_LOST_AFTER = 5.0, 60.0
# Half of the versions that readers accept in a head; the rest is for names and leases.
_MOST_KEPT = MOST_VERSIONS // 2
# The least size of a piece, in bytes.
_LEAST_PIECE = 1 << 10


@dataclass(frozen=True)
class StoreSchemeOptions:
    """Options of the scheme ``store``.

    Args:
        url: a directory, ``s3://bucket/run``, ``gs://…`` or ``az://…``; ``{run}`` becomes the run's
            id. None for a temporary directory, which the sender removes when it closes.
        answers: the URL to which workers of ``num_workers=`` write answers; None for ``url``.
        key: a PEM file with the Ed25519 key that signs the run; made if missing. With it, a
            restarted trainer continues the run. None for a new key in memory.
        keep: how many of the newest versions are kept, at most 5000. Versions with names or leases
            are kept too.
        piece_mb: the size of a version's objects, in MiB; at least 0.001.
        grace: how long to keep objects of dropped versions, for readers that still read them, in
            seconds.
        poll: seconds between two looks for a new version; None for 0.005 in a directory, and 1
            elsewhere, where each look is a request.
        lost_after: seconds without a sign of life after which a worker counts as dead; None for 5
            in a directory, and 60 elsewhere.
        streams: the number of concurrent reads or writes.
        chunks: whether a reader of a shard can read only its chunks instead of whole pieces; the
            trainer then hashes each version twice. None for True, except in a directory.
        anchor_every: publish one version in this many whole, as an anchor, and the others as
            increments on the version before; None to publish only whole versions.

    Raises:
        OptionError: an option is not valid.

    Example:
        >>> StoreSchemeOptions(url="s3://bucket/run", keep=0)
        Traceback (most recent call last):
        ...
        sync_core.errors.OptionError: keep must be an integer >= 1, got 0
    """

    url: str | None = None
    answers: str | None = None
    key: str | None = None
    keep: int = 5
    piece_mb: float = 16.0
    grace: float = 600.0
    poll: float | None = None
    lost_after: float | None = None
    streams: int = 8
    chunks: bool | None = None
    anchor_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "streams", "anchor_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be an integer >= 1, got {value}")
        if self.keep > _MOST_KEPT:
            raise OptionError(f"keep must be {_MOST_KEPT} at most, got {self.keep}")
        for name in ("piece_mb", "poll", "lost_after"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= threading.TIMEOUT_MAX:
                raise OptionError(f"{name} must be a finite number above 0, got {value}")
        if self.piece_mb * (1 << 20) < _LEAST_PIECE:
            raise OptionError(f"piece_mb must be a number >= 0.001, got {self.piece_mb}")
        if not 0 <= self.grace <= threading.TIMEOUT_MAX:
            raise OptionError(f"grace must be a finite number of seconds >= 0, got {self.grace}")

    def poll_of(self, objects: Objects) -> float:
        """Return the seconds between two looks into a store."""
        return self.poll or (_NEAR_POLL if objects.near else _FAR_POLL)

    def writing(self, objects: Objects) -> dict[str, Any]:
        """Return the options for writing pieces into a store."""
        return {
            "piece_nbytes": round(self.piece_mb * (1 << 20)),
            "streams": self.streams,
            "chunks": self.chunks if self.chunks is not None else not objects.near,
        }

    def record_options(self, objects: Objects) -> StoreOptions:
        """Return the options for the records of workers that answer."""
        lost_after = self.lost_after or (_NEAR_LOST_AFTER if objects.near else _FAR_LOST_AFTER)
        return StoreOptions(poll=self.poll_of(objects), lost_after=lost_after, keep=self.keep)


class StoreScheme:
    """Publishes signed versions to an object store or a directory, from which readers fetch them.

    Without ``num_workers``, the sender does not know its readers: `Sender.send` returns as soon as
    the version can be read, and `Sender.address` returns one address for all. With it, each worker
    has its own address and answers.
    """

    capabilities = frozenset(
        {"background", "broadcast", "cross_host", "cross_process", "late_join", "publishes", "pull"}
    )
    endpoint_type = StoreEndpoint

    def resolve(self, address: Address, model: Any, timeout: float) -> tuple[Address, Any]:
        """Adapt an address and a model, if the model has only parts of the trainer's tensors.

        The address of a rank has no layout, so this reads the layout of the run's newest version.

        Raises:
            StoreError: the run has no version within the timeout.
            OptionError: a layer works only on whole tensors.
            LayoutMismatchError: the model does not fit the trainer's.
        """
        # Imported late, since it loads the shards of sync-plugin-scale.
        from sync_plugin_scale.shards import is_divided

        if not address.layout.specs:
            address = _laid_out(address, timeout)
        if not is_divided(model):
            return address, model
        try:
            return _divided(address, model)
        except Exception as error:
            if address.endpoint.answers:
                _refuse(address, error, timeout)
            raise

    def create_rank(self, context: TransportContext, holding: Holding) -> SenderTransport | None:
        """Return the transport of one rank, if all ranks of a trainer write each version together.

        Any scheme that publishes versions can have this method; `sync_plugin_scale.Sharded` calls
        it.

        Args:
            context: the context of the rank's sender, with the layout of the rank's parts.
            holding: the parts that the rank holds.

        Returns:
            None if readers answer, so that each reader asks each rank for its parts.

        Raises:
            OptionError: with these options, the ranks cannot write one run.
        """
        options = context.parse_options(StoreSchemeOptions)
        return None if options.answers else _rank(context, holding, options)

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Return the sender's or a receiver's transport."""
        options = context.parse_options(StoreSchemeOptions)
        if context.side == "sender":
            return _sender(context, options)
        return _receiver(context, options)


def _laid_out(address: Address, timeout: float) -> Address:
    """Return the address of a rank, with the layout of whole versions filled in."""
    endpoint: StoreEndpoint = address.endpoint
    run = endpoint.run or None
    reader = RunReader(open_all(endpoint.urls, timeout), endpoint.key, run, timeout=timeout)
    with closing(reader):
        layout = reader.layout(endpoint.version, timeout)
    return replace(
        address,
        layout=layout,
        source_layout=layout,
        layouts=tuple(layout for _ in address.layouts),
    )


def _divided(address: Address, model: Any) -> tuple[Address, Any]:
    """Return the address with the parts that a model needs, and views of the model's tensors."""
    from sync_plugin_store.parts import parts_of

    for layer in address.layers:
        plugin = find(LAYERS, layer)
        if "apply_weights" in implemented(plugin.object):
            raise OptionError(
                f"{plugin.describe()} works on whole tensors, and this model has parts of them; "
                "leave it out of the trainer's layers=, or give Receiver a whole model"
            )
    parts, views, layout = parts_of(model, address.layout, cast=address.cast)
    endpoint = PartsEndpoint(**vars(address.endpoint), parts=parts)
    return replace(address, endpoint=endpoint, layout=layout, source_layout=layout), views


def _refuse(address: Address, error: Exception, timeout: float) -> None:
    """Connect only to report to the sender, at once, why this worker cannot receive."""
    # The caller gets this reason, not an error about an unreachable store.
    with suppress(Exception), closing(address.connect(timeout)) as transport:
        payload = transport.receive(0.0)
        if payload is not None:
            payload.release()
            transport.acknowledge(Answer.refusal(payload.version, error))
        transport.leave(f"refused to receive: {type(error).__name__}: {error}")


def _sender(context: TransportContext, options: StoreSchemeOptions) -> SenderTransport:
    if options.url is not None:
        return _sender_in(options.url, None, context, options)
    folder = OwnFolder()
    try:
        return _sender_in(str(folder.path), folder, context, options)
    except BaseException:
        folder.close()
        raise


def _sender_in(
    url: str, folder: OwnFolder | None, context: TransportContext, options: StoreSchemeOptions
) -> SenderTransport:
    url = url.replace("{run}", secrets.token_hex(8))
    _check_written(url)
    if options.anchor_every is not None and (context.worker_ids or options.answers):
        raise OptionError(
            "anchor_every= is for readers that the trainer does not know; for those that answer, "
            'type Sender("increments::store", …)'
        )
    key = SigningKey.generate() if options.key is None else SigningKey.of_file(Path(options.key))
    if context.make_address is None:
        # A companion's own channel, next to the sender's run.
        url, key = f"{url}/channels/{secrets.token_hex(8)}", SigningKey.generate()
    # A temporary directory need not outlast a loss of power.
    objects = open_objects(url, context.timeout, durable=folder is None)
    publisher = RunPublisher(
        objects,
        key,
        keep=options.keep,
        grace=options.grace,
        **options.writing(objects),
    )
    answers = options.answers or (url if context.worker_ids else "")
    endpoint = StoreEndpoint(urls=[url], key=key.public, run=publisher.run)
    increments = None
    if options.anchor_every is not None:
        # Imported late, since it loads the increments of sync-plugin-scale.
        from sync_plugin_store.increments import IncrementWriter

        increments = IncrementWriter(options.anchor_every)
    address = _address_maker(context, endpoint)
    publishing = Publishing(publisher, endpoint, address, folder, increments)
    try:
        publisher.collect()
        if not answers:
            return PublishingSender(publishing)
        publishing.endpoint = replace(endpoint, answers=answers)
        place = open_objects(answers, context.timeout)
        records = store_transport(
            context,
            RecordStore(place),
            options.record_options(place),
            PublishedVersions(publishing),
        )
        assert isinstance(records, SenderTransport)
        return AnsweringSender(records, publishing)
    except BaseException:
        # No `close`: readers of the run must not see that a sender failed to start.
        publisher.writer.close()
        raise


def _rank(
    context: TransportContext, holding: Holding, options: StoreSchemeOptions
) -> SenderTransport:
    # Imported late, since it loads the shards of sync-plugin-scale.
    from sync_plugin_store.first_rank import FirstRank
    from sync_plugin_store.later_rank import LaterRank

    _check_rank(holding, options)
    assert options.url is not None
    assert options.key is not None
    key = SigningKey.of_file(Path(options.key))
    objects = open_objects(options.url, context.timeout)
    waiting = {"timeout": context.timeout, "poll": options.poll_of(objects)}
    if holding.rank:
        writer = PieceWriter(objects, **options.writing(objects))
        return LaterRank(objects, key, holding, writer, **waiting)
    publisher = RunPublisher(
        objects,
        key,
        keep=options.keep,
        # Objects that another rank is writing are younger.
        grace=max(options.grace, context.timeout),
        session=secrets.token_hex(16),
        **options.writing(objects),
    )
    endpoint = StoreEndpoint(urls=[options.url], key=key.public, run=publisher.run)

    def address(layout: Layout) -> bytes | None:
        return _address_maker(context, endpoint, scheme=context.scheme, layout=layout)()

    try:
        publisher.collect()
        return FirstRank(
            objects, key, holding, publisher, endpoint=endpoint, make_address=address, **waiting
        )
    except BaseException:
        publisher.writer.close()
        raise


def _check_written(url: str) -> None:
    if url.startswith(("http://", "https://")):
        raise OptionError(
            f"url={url!r} can be read and not written; give the trainer the directory or the "
            "bucket behind it"
        )


def _check_rank(holding: Holding, options: StoreSchemeOptions) -> None:
    """Raise `OptionError` if ranks cannot write one run with these options."""
    example = "Sender(Sharded('store', rank, size), model, url='s3://bucket/run', key='FILE')"
    if options.url is None or "{run}" in options.url:
        raise OptionError(
            f"the ranks of a trainer write one run, so each needs the same url=, without {{run}}, "
            f"got {options.url!r}; type {example}"
        )
    _check_written(options.url)
    if options.key is None:
        raise OptionError(
            f"the ranks of a trainer sign one run, so each needs the same key; type {example}, "
            "with copies of one file on every machine"
        )
    if options.anchor_every is not None:
        raise OptionError(
            "anchor_every= is for a trainer of one process; leave it out, as ranks write whole "
            "versions, and no piece that did not change"
        )
    if holding.verified:
        raise OptionError(
            "readers of a run check each byte by its SHA-256, and no other checksums are written "
            "by ranks; leave the layer that adds them out of layers="
        )


def _receiver(context: TransportContext, options: StoreSchemeOptions) -> ReceiverTransport:
    endpoint: StoreEndpoint = context.endpoint
    # Half, so that a call with the whole timeout can report why a store failed.
    sources = open_all(endpoint.urls, context.timeout / 2)
    if not sources:
        raise OptionError("the address of a run must have a URL; type sender.address()")
    parts = endpoint.parts if isinstance(endpoint, PartsEndpoint) else None
    # A receiver of parts reads from versions with the whole layout.
    layout = context.layout if parts is None else parts.layout
    reader = RunReader(
        sources,
        endpoint.key,
        endpoint.run or None,
        most_nbytes=(Layout(()) if layout is None else layout).most_nbytes,
        timeout=context.timeout,
        streams=options.streams,
    )
    if parts is not None:
        context = replace(context, layout=parts.layout)
    try:
        if not endpoint.answers:
            poll = options.poll_of(sources[0])
            return ReadingReceiver(reader, version=endpoint.version, poll=poll, parts=parts)
        place = open_objects(endpoint.answers, context.timeout)
        versions = ReadVersions(reader, context.timeout, parts)
        records = store_transport(
            context, RecordStore(place), options.record_options(place), versions
        )
        assert isinstance(records, ReceiverTransport)
        return _AnsweringReceiver(records, versions)
    except BaseException:
        reader.close()
        raise


class _AnsweringReceiver(WrappingReceiver):
    """A receiver that answers the sender.

    Args:
        transport: reads and writes the records.
        versions: the versions of the run.
    """

    def __init__(self, transport: ReceiverTransport, versions: ReadVersions) -> None:
        super().__init__(transport)
        self._versions = versions

    def close(self) -> None:
        """Disconnect, and cancel all reads."""
        self.transport.close()
        self._versions.close()


def _address_maker(
    context: TransportContext,
    endpoint: StoreEndpoint,
    *,
    scheme: Any = None,
    layout: Layout | None = None,
) -> Callable[[], bytes | None]:
    """Return a function that returns the readers' address as JSON, without the sender's token.

    Args:
        context: the sender's context.
        endpoint: the readers' endpoint.
        scheme: the readers' scheme; None for the sender's.
        layout: the layout of whole versions, if the sender has only parts.
    """
    make: Callable[..., Address] | None = context.make_address

    def address() -> bytes | None:
        if make is None:
            return None
        token = hashlib.sha256(endpoint.run.encode()).hexdigest()[:32]
        made = replace(
            make(worker_id=0, endpoint=endpoint), token=token, sender_token="", options={}
        )
        if layout is not None:
            layouts = tuple(layout for _ in made.layouts)
            made = replace(
                made, scheme=scheme, layout=layout, source_layout=layout, layouts=layouts
            )
        try:
            return made.to_json().encode()
        except AddressError as error:
            # With layers that are objects, readers need a pickled address.
            _log.info("no address is published with the run: %s", error)
            return None

    return address
