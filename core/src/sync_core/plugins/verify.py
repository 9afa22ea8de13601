"""What `Sender(verify=…)` adds: layers of the core's own, next to the wire and to the model."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from sync_core.errors import CorruptionError, OptionError, ReadbackError, WorkerError
from sync_core.models.extra_state import is_extra_state
from sync_core.models.extract import Strategy, named_tensors
from sync_core.plugins.contexts import ApplyContext, SendContext
from sync_core.plugins.hook_check import implemented
from sync_core.plugins.hookspecs import hookimpl
from sync_core.plugins.registry import LAYERS, Plugin
from sync_core.transports.answer import Answer
from sync_core.transports.transport import Delivery
from sync_core.weights.checksums import (
    check_installed,
    checksum,
    checksums,
    describe_bucket,
    from_tensor,
    sealed,
    to_tensor,
    unsealed,
)
from sync_core.weights.layout import Layout, place_of
from sync_core.weights.update import Update

#: What is proved of a send: see `Sender`, and docs/decisions/0011-verify.md.
Verify = Literal["checksum", "readback"]


class Verification:
    """What one sender or receiver does to verify what is sent.

    Nothing where nothing travels: with a scheme whose workers have the sender's own model.

    Args:
        mode: see `Sender`.
        backend: the scheme.
        layers: the user's.
        strategy: how the model is read back.

    Raises:
        OptionError: there is no such mode, the hash library is missing, or the scheme loads
            weights itself, so that they cannot be read back.
    """

    def __init__(
        self, mode: Verify | None, backend: Plugin, layers: Sequence[Plugin], strategy: Strategy
    ) -> None:
        if mode not in (None, "checksum", "readback"):
            raise OptionError(f"verify must be 'checksum', 'readback' or None, not {mode!r}")
        self.layers = tuple(layers)
        self._seal: _Seal | None = None
        self._readback: _Readback | None = None
        if mode is None or "same_object" in backend.capabilities:
            return
        check_installed()
        self._seal = _Seal()
        self.layers = (*self.layers, Plugin(LAYERS, "checksum", self._seal))
        if mode == "readback":
            if "apply_weights" in implemented(backend.object):
                raise OptionError(
                    f"{backend.describe()} loads weights itself, so that they cannot be read "
                    "back; use verify='checksum'"
                )
            self._readback = _Readback(strategy)
            self.layers = (Plugin(LAYERS, "readback", self._readback), *self.layers)
        self._unchanged = not any(
            hook in implemented(layer.object)
            for layer in layers
            for hook in ("prepare_weights", "apply_weights")
        )

    @property
    def digest(self) -> str | None:
        """The digest of what was last committed here; None where it is not read back."""
        return None if self._readback is None else self._readback.digest

    def guard(self, deliveries: Iterable[Delivery]) -> None:
        """Let no worker count as updated whose model does not hold what was just prepared."""
        if self._readback is None or self._seal is None:
            return
        layout, sums = self._seal.sent
        check = partial(_compare, layout, _digest(sums) if self._unchanged else None)
        for delivery in deliveries:
            delivery.require(check)


class _Seal:
    """The layer next to the wire: adds checksums to what travels, and takes them out again."""

    sent: tuple[Layout, Sequence[int]] = (Layout(()), ())

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        update = yield
        layout, tensors = update.layout, update.tensors
        travels = sealed(layout)
        # Version 0 is prepared for its layout alone.
        sums = checksums(layout, tensors) if context.version else [0] * travels.specs[-1].shape[0]
        self.sent = layout, sums
        update.become(travels, (*tensors, to_tensor(sums)))
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        layout = unsealed(update.layout)
        if layout is None:
            raise CorruptionError(
                context.worker_id, f"version {context.version} came without its checksums"
            )
        *tensors, sums = update.tensors
        expected, found = from_tensor(sums), checksums(layout, tensors)
        if expected != found:
            raise CorruptionError(
                context.worker_id,
                f"version {context.version} was changed on its way, and nothing of it was "
                f"applied: {_differences(layout, expected, found)}",
            )
        update.become(layout, tensors)
        return (yield)


class _Readback:
    """The layer next to the model: reads what was written, and compares."""

    def __init__(self, strategy: Strategy) -> None:
        self.digest: str | None = None
        self._strategy = strategy

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: Any, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        self.digest = None
        layout, given = update.layout, update.tensors
        expected = checksums(layout, given)
        result = yield
        named = named_tensors(model, self._strategy)
        # What a module makes of its extra state is its own affair.
        held = [
            mine if is_extra_state(spec.name) else named[spec.name]
            for spec, mine in zip(layout.specs, given, strict=True)
        ]
        found = checksums(layout, held)
        untied = _untied(layout, named)
        if expected != found or untied:
            wrong = [*_unequal(layout, given, held), *untied]
            raise ReadbackError(
                context.worker_id,
                f"version {context.version} was written, but the model holds other bits than "
                f"those written in {', '.join(map(repr, wrong))}; it is known bad until a newer "
                "version is committed, which the next send brings",
            )
        self.digest = _digest(found)
        return result


def _compare(
    layout: Layout, expected: str | None, delivery: Delivery, answer: Answer | None
) -> WorkerError | None:
    worker_id = delivery.worker_id
    digest = None if answer is None else answer.digest
    if digest is None:
        return WorkerError(
            worker_id,
            f"committed version {delivery.version}, and did not say what its model holds; the "
            "scheme brings no answers back, as verify='readback' needs",
        )
    if expected in (None, digest):
        return None
    return ReadbackError(
        worker_id,
        f"committed version {delivery.version}, but its model does not hold what was sent, and is "
        "known bad until the next send: "
        + _differences(layout, _sums(expected or ""), _sums(digest)),
    )


def _digest(sums: Sequence[int]) -> str:
    return "".join(f"{number:016x}" for number in sums)


def _sums(digest: str) -> list[str]:
    return [digest[start : start + 16] for start in range(0, len(digest), 16)]


def _differences(layout: Layout, expected: Sequence[object], found: Sequence[object]) -> str:
    if len(expected) != len(found):
        return f"{len(expected)} checksums were expected, and {len(found)} found"
    return "; ".join(
        f"{describe_bucket(layout, number)}: expected {_hex(wanted)}, found {_hex(got)}"
        for number, (wanted, got) in enumerate(zip(expected, found, strict=True))
        if wanted != got
    )


def _hex(value: object) -> str:
    return f"{value:016x}" if isinstance(value, int) else str(value)


def _unequal(layout: Layout, given: Sequence[Tensor], held: Sequence[Tensor]) -> list[str]:
    return [
        spec.name
        for spec, ours, theirs in zip(layout.specs, given, held, strict=True)
        if checksum([ours]) != checksum([theirs])
    ]


def _untied(layout: Layout, named: Mapping[str, Tensor]) -> list[str]:
    """Tied tensors that the model holds twice, with different bits."""
    return [
        name
        for name, owner in layout.aliases
        if not is_extra_state(name)
        and place_of(named[name]) != place_of(named[owner])
        and checksum([named[name]]) != checksum([named[owner]])
    ]
