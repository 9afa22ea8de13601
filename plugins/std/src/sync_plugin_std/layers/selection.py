"""The layer `Select`: workers are sent what was given since the version that they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl
from sync_core.models import TensorStream, modules_in, place_of, plain_name, tensor_finder
from sync_plugin_std.layers.fingerprints import fingerprints
from sync_plugin_std.layers.left_out import LATER


class Select:
    """Sends the tensors that were given since the version that a worker holds. Named ``select``.

    Tensors that are chosen count as given with each send. Of the others, the first version brings
    all, and a later one those that have changed. A worker that lacks more, since it joined late, or
    missed or skipped a version, gets what it lacks with the next send.

    Weights given by hand may lack tensors, which count as not given: ``select("*")`` allows
    ``sender.send({"head.weight": tensor})``. Other tensors that a worker lacks are read
    from the sender's model, or from a copy, which is kept of weights given by hand that are not the
    model's own.

    A change of a tensor that is not chosen is noticed at the next send, however it was made: each
    send reads all bits of what is left out, about 3 GB/s on one core of a CPU.

    Each version brings a digest of what it leaves out. A worker whose tensors have another one
    refuses the version, and gets a whole one with the next send. The digest is compared again where
    a worker's tensors were changed.

    Args:
        names: patterns of the names of the tensors to choose; ``*`` stands for anything.
        trainable: choose the parameters that require a gradient, and all buffers, as is done where
            no names are given.
        send_rest: whether the tensors that are not chosen travel at all. If not, workers must have
            them from the start, such as the checkpoint that the trainer began with; the digest
            proves it, and a worker that does not have them refuses every version.

    Raises:
        ValueError: both names and ``trainable`` were given.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> source, target = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        ...                   for _ in range(2))
        >>> frozen = source[0].requires_grad_(False)
        >>> nbytes = []
        >>> with Sender("thread", source, num_workers=1, layers=[Select(trainable=True)]) as sender:
        ...     receiver = Receiver(sender.address(0), target)
        ...     for _ in range(2):
        ...         pending = sender.send_async()
        ...         version = receiver.receive()
        ...         nbytes.append(pending.wait().nbytes)
        >>> nbytes[0] > 10 * nbytes[1], torch.equal(source[1].weight, target[1].weight)
        (True, True)
    """

    capabilities = frozenset({"partial"})

    def __init__(self, *names: str, trainable: bool = False, send_rest: bool = True) -> None:
        if trainable and names:
            raise ValueError(f"give patterns or trainable=True, and not both: {names}")
        #: The layer that comes with this one; see `sync_plugin_std.layers.left_out`.
        self.followed_by: tuple[str, ...] = ("left-out",) if send_rest else ("held",)
        if names == ("*",):
            self.followed_by = ("given",)
        self._send_rest = send_rest
        self._names = names
        self._patterns = [re.compile(".*".join(map(re.escape, name.split("*")))) for name in names]
        self._travels = True
        # The layout of all tensors, and by name the version in which each was last given.
        self._whole: Layout | None = None
        self._given: dict[str, int] = {}
        # Of tensors that are not chosen, the fingerprint with which they were given.
        self._fingerprints: dict[str, bytes] = {}
        # Of tensors given by hand that are not the model's own.
        self._copies: dict[str, Tensor] = {}
        self._find: tuple[Any, Callable[[], Mapping[str, Tensor]]] | None = None
        # A stream that was read, the tensors of it that travel, and fingerprints of the others.
        self._passed: tuple[TensorStream, dict[str, Tensor], dict[str, bytes]] | None = None

    def bind(self, context: BindContext) -> Select:
        """A layer without a past, for one sender; an idle one where nothing travels."""
        bound = self._made()
        bound._travels = "same_object" not in context.capabilities
        return bound

    def _made(self) -> Select:
        return Select(*self._names, trainable=not self._names, send_rest=self._send_rest)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Leave out the tensors that the workers have.

        Raises:
            ModelError: nothing would be sent; a tensor has changed that workers must have from the
                start; or a worker lacks one that the sender does not have.
        """
        update = yield
        if self._travels:
            self._prepare(update, context)
        return update

    def _prepare(self, update: Update, context: SendContext) -> None:
        stream = None
        if isinstance(update.source, TensorStream) and not self._send_rest:
            # What never travels is read as it is made, and not held.
            stream = update.source
        tensors = update.tensors if stream is None else stream.stand_ins()
        named = dict(zip((s.name for s in update.layout.specs), tensors, strict=True))
        known = self._whole
        if known is None or update.layout.index.keys() >= known.index.keys():
            self._whole = known = update.layout
        chosen = self._chosen(update.layout, named, context)
        if known is update.layout and not chosen:
            raise ModelError(self._describe_none(update.layout, context.model))
        # A tied tensor may be given under another name than that under which it travels.
        given = {known.specs[known.index[name]].name: tensor for name, tensor in named.items()}
        chosen = {known.specs[known.index[name]].name for name in chosen}
        if context.stand_ins or (context.version == 0 and self._send_rest):
            return
        if stream is None:
            found = _prints({n: tensor for n, tensor in given.items() if n not in chosen})
        elif context.version == 0:
            passing = partial(self._pass_on, stream, tuple(given), chosen, first=True)
            update.source = TensorStream(update.layout, passing)
            return
        else:
            given, found = self._drain(stream, tuple(given), chosen)
        moved = self._moved(found)
        if context.version and moved and not self._send_rest:
            raise ModelError(self._describe_changed(min(moved)))
        self._fingerprints.update(found)
        if context.version:
            for name in chosen:
                self._fingerprints.pop(name, None)
            self._given.update(dict.fromkeys((*chosen, *moved), context.version))
            self._copy(given, context)
            self._leave_out(update, known, given, chosen, context)

    def _chosen(
        self, layout: Layout, named: Mapping[str, Tensor], context: SendContext
    ) -> set[str]:
        """Return the names of the tensors of an update that are chosen."""
        if self._patterns:
            return {n for n in named if any(each.fullmatch(n) for each in self._patterns)}
        parameters = self._parameters(context.model)
        names = {spec.name: [spec.name] for spec in layout.specs}
        for alias, owner in layout.aliases:
            names[owner].append(alias)
        return {
            name
            for name, tensor in named.items()
            # A layer before this one may have renamed tensors.
            if any(_is_trained(parameters.get(each, tensor)) for each in names[name])
        }

    def _parameters(self, model: Any) -> Mapping[str, Tensor]:
        """Return the tensors of what was read, which layers may have replaced in the update."""
        if model is None:
            return {}
        if self._find is None or self._find[0] is not model:
            self._find = model, tensor_finder(model, "tensordict")
        try:
            return self._find[1]()
        except ModelError:
            # Of a module that is sharded, and was sent by gathered(model).
            return dict(_named_parameters(model))

    def _moved(self, found: Mapping[str, bytes]) -> set[str]:
        """Return the names of the tensors that do not have the fingerprints noted last."""
        return {name for name, each in found.items() if each != self._fingerprints.get(name)}

    def _pass_on(
        self, source: TensorStream, names: Sequence[str], chosen: set[str], *, first: bool = False
    ) -> Iterator[Tensor]:
        """Yield the tensors of a stream; copy the chosen ones, and reduce each other one.

        Args:
            source: the stream.
            names: of its tensors.
            chosen: those names that are chosen.
            first: whether the fingerprints of the others are noted.
        """
        kept: dict[str, Tensor] = {}
        found: dict[str, bytes] = {}
        for name, tensor in zip(names, source.draw(), strict=True):
            if name in chosen:
                kept[name] = tensor.detach().clone()
            else:
                found |= _prints({name: tensor})
            yield tensor
        self._passed = source, kept, found
        if first:
            self._fingerprints.update(found)

    def _drain(
        self, source: TensorStream, names: Sequence[str], chosen: set[str]
    ) -> tuple[dict[str, Tensor], dict[str, bytes]]:
        """Return the chosen tensors of a stream, and the fingerprints of the others."""
        if self._passed is None or self._passed[0] is not source:
            for _ in self._pass_on(source, names, chosen):
                pass
        assert self._passed is not None
        (_, kept, found), self._passed = self._passed, None
        return kept, found

    def _copy(self, given: Mapping[str, Tensor], context: SendContext) -> None:
        """Keep the values of tensors given by hand, unless they are the model's own."""
        if not context.by_hand:
            self._copies.clear()
            return
        own = {} if context.own is None else context.own()
        for name, tensor in given.items():
            if name in own and place_of(own[name]) == place_of(tensor):
                self._copies.pop(name, None)
            elif self._given.get(name) == context.version:
                self._copies[name] = tensor.detach().to("cpu", copy=True)

    def _leave_out(
        self,
        update: Update,
        whole: Layout,
        given: Mapping[str, Tensor],
        chosen: Collection[str],
        context: SendContext,
    ) -> None:
        """Make an update one of all that the workers lack."""
        held = min(context.acknowledged.values(), default=0)
        if context.skipped:
            # Nothing is sent: what other layers are given is as small as with a next send.
            held = context.version - 1
        everything = [spec.name for spec in whole.specs]
        sent = [n for n in everything if self._given.get(n, 0) > held or held == 0]
        if not self._send_rest:
            sent = [name for name in sent if name not in self._fingerprints]
        if len(sent) < len(everything) or len(given) < len(everything):
            tensors = self._find_tensors(sent, given, whole, context)
            found = dict(zip(sent, tensors, strict=True))
            # The model may hold other values by now than the other workers were given.
            more = {n: t for n, t in found.items() if n not in given and n in self._fingerprints}
            prints = _prints(more)
            self._given.update(dict.fromkeys(self._moved(prints), context.version))
            self._fingerprints.update(prints)
            positions = tuple(whole.index[name] for name in sent)
            update.become(whole.subset(positions).with_tensors(tensors), tensors)
        left_out = set(everything) - set(sent)
        update.base = max((self._given.get(name, 0) for name in left_out), default=0)
        if "left-out" in self.followed_by and len(chosen) < len(everything):
            update.extras[LATER] = torch.empty(0)

    def _find_tensors(
        self,
        names: Collection[str],
        given: Mapping[str, Tensor],
        whole: Layout,
        context: SendContext,
    ) -> Sequence[Tensor]:
        found: dict[str, Tensor] = {n: given[n] for n in names if n in given}
        if len(found) < len(names):
            own = {} if context.own is None else context.own()
            found = {**own, **self._copies, **found}
        for name in names:
            spec, tensor = whole.specs[whole.index[name]], found.get(name)
            if tensor is None:
                raise ModelError(
                    f"a worker lacks {name!r}, which the sender does not have; send the whole model"
                )
            if name not in given and (tensor.dtype, tuple(tensor.shape)) != (
                spec.dtype,
                spec.shape,
            ):
                raise ModelError(
                    f"a worker lacks {name!r}, which another layer changes before this one; put "
                    "select(…) first in layers="
                )
        return [found[name] for name in names]

    def _describe_none(self, layout: Layout, model: Any) -> str:
        """Return what is wrong where nothing was chosen."""
        del model
        reason = f"no name matches {self._names}" if self._names else "none requires a gradient"
        return (
            f"the layer Select chooses none of {len(layout.names)} tensors: {reason}; give "
            f"patterns of their names, such as select({layout.names[0]!r})"
        )

    def _describe_changed(self, name: str) -> str:
        """Return what is wrong where a tensor was changed that is never sent."""
        return (
            f"{name!r}, which the layer Select leaves out, was changed after the sender was made, "
            "and send_rest=False does not send it; make a new sender, or leave that out"
        )


def _named_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in modules_in(model):
        plain = plain_name(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield prefix + plain(name), parameter


def _prints(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the fingerprint of each tensor by its name."""
    return dict(zip(tensors, fingerprints(list(tensors.values())), strict=True))


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)
