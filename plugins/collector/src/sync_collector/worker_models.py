"""The models of a worker: finds them by name, updates, saves and loads them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from sync_collector.policies import called_module, module_of
from sync_collector.schemes import POLICY, is_part
from sync_core import (
    Address,
    Layout,
    OptionError,
    Receiver,
    SenderLostError,
    Update,
)
from sync_core.models import Binding, check_match, named_tensors, resolve
from sync_plugin_std import receive_together

# A worker spends at most one part in this number of its time on looking for weights. A look takes 5
# µs in shared memory, compared to 160 for a step, and a millisecond or more over the network.
_SHARE = 50
# If all cores are busy, a thread that waits for an answer runs only after the scheduler takes a
# core from another thread, up to 5 ms later. To free a core, a worker waits for newer weights after
# a commit, as long as the commit took, within these bounds in seconds
# (docs/decisions/0010-collector.md).
_SHORTEST_REST, _LONGEST_REST = 0.001, 0.004


class WorkerModels:
    """The models of a worker, by name, and the receivers that update them.

    A single model is committed between two steps, as soon as its weights have arrived. Several
    models are committed when the driver names the versions that belong together, all or none.

    Args:
        parts: the objects in which names are looked up: ``policy``, ``env``, and the other models.
        rests: whether to leave the core to the trainer for a moment after a commit between two
            steps.
    """

    def __init__(self, parts: SimpleNamespace, *, rests: bool = False) -> None:
        self._parts = parts
        self._rests = rests
        self._receivers: dict[str, Receiver] = {}
        # Whether the parameters of each model are views of received buffers.
        self._views: dict[str, bool] = {}
        # The receiver of the only model; None if there are several models.
        self._single: Receiver | None = None
        # The same receiver, if that model is a part of the policy.
        self._part: Receiver | None = None
        self._lost: SenderLostError | None = None
        # An error between two steps that the sender does not know about.
        self._error: Exception | None = None
        # The version that was set, and the version that had been received by then.
        self._set = (0, 0)
        # The seconds that a look takes, the time of the next look, and the version at the last look
        # that found nothing newer.
        self._cost = math.inf
        self._due = 0.0
        self._looked_beyond: int | None = None

    @property
    def version(self) -> int:
        """The policy's version, counted by its sender or the sender of its only part."""
        version, received = self._set
        policy = self._receivers.get(POLICY, self._part)
        if policy is None or policy.version == received:
            return version
        return max(version, policy.version)

    def set_version(self, version: int) -> None:
        """Set the policy's version, until its sender sends a newer one."""
        policy = self._receivers.get(POLICY, self._part)
        self._set = version, 0 if policy is None else policy.version

    def connect(self, name: str, address: Address, *, single: bool) -> Receiver:
        """Receive a model's weights from a sender from now on.

        Args:
            name: the model's name.
            address: the sender's address for this worker.
            single: whether it is the only model, which is committed as soon as weights arrive.

        Raises:
            ModelPathError: there is no such model here.
            OptionError: the model shares parameters with another one, and only one of them has
                zero_copy.
        """
        if name in self._receivers:
            self._receivers.pop(name).close()
        self._check_shared(name, views=address.zero_copy)
        model = self._found(name) if name == POLICY else name
        receiver = Receiver(
            address,
            model,
            context=self._parts,
            on_commit=self._on_commit(name),
            # The policy is the worker's own copy, and only the worker's calls read it.
            consolidate=name == POLICY,
        )
        self._receivers[name], self._views[name] = receiver, address.zero_copy
        self._single = receiver if single else None
        self._part = receiver if single and is_part(name) else None
        self._lost = self._error = None
        return receiver

    def has(self, versions: Mapping[str, int], timeout: float) -> bool:
        """Return whether models have these versions, or newer ones.

        Args:
            versions: the version of each model.
            timeout: seconds to wait for the version of a single model.
        """
        if self._single is not None and self._single.version < max(versions.values(), default=0):
            # The sender reports the error.
            with suppress(Exception):
                self.reach(versions, timeout)
        return all(
            name in self._receivers and self._receivers[name].version >= version
            for name, version in versions.items()
        )

    def reach(self, versions: Mapping[str, int], timeout: float) -> bool:
        """Commit versions that were sent, unless the models already have them.

        Args:
            versions: the version of each model.
            timeout: seconds to wait for versions that have not arrived yet.

        Returns:
            False if a single model's version did not arrive in time, or if one of several models
            was sent a newer version meanwhile. True if all are committed, or if a single model
            refused its version and the sender was notified. Raises an error that the sender does
            not know about.
        """
        if self._single is None:
            return receive_together(self._receivers, versions, timeout)
        if self._lost is not None:
            raise self._lost
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        version = max(versions.values(), default=0)
        deadline = time.monotonic() + timeout
        while max(self._single.version, self._single.refused) < version:
            try:
                if self._single.receive(max(0.0, deadline - time.monotonic())) is None:
                    return False
            except Exception:
                if self._single.refused < version:
                    raise
        return True

    def commit(self, timeout: float = 0.0) -> bool:
        """Commit weights that have arrived, or arrive in time; return whether there were any.

        For a single model only. An error is kept for `reach`, unless the sender knows about it.
        """
        receiver = self._single
        if receiver is None or self._lost is not None:
            return False
        refused = receiver.refused
        try:
            if receiver.receive(timeout) is None:
                return False
        except SenderLostError as error:
            self._lost = error
            return False
        except Exception as error:
            if receiver.refused == refused:
                self._error = error
            return False
        self._error = None
        return True

    def look(self) -> None:
        """Commit arrived weights in the middle of a batch; if there are none, look less often."""
        if self._single is None or self._lost is not None:
            return
        began = time.monotonic()
        self._due = 0.0
        if self.commit():
            if self._rests:
                took = time.monotonic() - began
                self.commit(min(max(took, _SHORTEST_REST), _LONGEST_REST))
            return
        # The first look after new weights may have to request the next ones, as over Ray; later
        # looks only check whether they have arrived.
        if self._looked_beyond != self._single.version:
            self._looked_beyond = self._single.version
            return
        now = time.monotonic()
        # The shortest time so far, since longer ones include waiting for a core.
        self._cost = min(self._cost, now - began)
        self._due = now + _SHARE * self._cost

    def look_soon(self) -> None:
        """Look after the next step, because weights have arrived. Any thread may call this."""
        self._due = 0.0

    def between_steps(self) -> int:
        """Commit arrived weights, unless the last look was recent; return the policy's version."""
        if time.monotonic() >= self._due:
            self.look()
        return self.version

    def read(self, name: str) -> Mapping[str, Tensor]:
        """Return a copy of the weights of one model, found by its name; empty if it has none.

        Raises:
            ModelPathError: there is no such model.
        """
        model = self._models([name]).get(name)
        return {} if model is None else _read(model, None)

    def read_all(self) -> dict[str, Mapping[str, Tensor]]:
        """Return a copy of the weights of each model by name, including models found by a path."""
        models = self._models(self._receivers)
        return {name: _read(model, self._receivers.get(name)) for name, model in models.items()}

    def write(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load weights from `read_all`; models that are not in it keep theirs.

        Raises:
            LayoutMismatchError: a model has other tensors than when it was saved; it was not
                changed.
            ModelError: a model is missing.
        """
        models = self._models(saved)
        # A zero-copy receiver's tensors may be part of another model. Write through the receivers
        # first: afterwards, that model has its own memory.
        for name in sorted(saved, key=lambda name: name not in self._receivers):
            if name in self._receivers:
                self._receivers[name].apply_weights(saved[name])
            else:
                Binding(models[name]).write(Update.of(saved[name]))
        for name in saved:
            if (on_commit := self._on_commit(name)) is not None:
                on_commit(self.version)

    def resemble(self, policy: Any) -> None:
        """Copy the parts of a policy that are not tensors: modes (``training``), numbers and flags.

        Args:
            policy: the policy to copy from; modules that it lacks are not changed.
        """
        module, other = called_module(getattr(self._parts, POLICY, None)), called_module(policy)
        if module is None or other is None:
            return
        others = dict(other.named_modules())
        for path, part in module.named_modules():
            for name, value in vars(others.get(path, part)).items():
                if type(value) in (bool, int, float):
                    vars(part)[name] = value

    def check(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise unless `write` can write these weights.

        Raises:
            LayoutMismatchError: a model has other tensors than when it was saved.
            ModelPathError: the worker has no such model.
        """
        for name, model in self._models(saved).items():
            mine = Layout.of(_read(model, self._receivers.get(name)))
            check_match(Layout.of(saved.get(name, {})), mine)

    def execute(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the object at a path, or the result of calling it.

        Raises:
            ModelPathError: the path does not exist.
            TypeError: there are arguments, but the object is not callable.
        """
        found = resolve(self._parts, path)
        if callable(found):
            return found(*args, **kwargs)
        if args or kwargs:
            raise TypeError(
                f"{path!r} leads to a {type(found).__name__}, which takes no arguments; leave "
                "them out"
            )
        return found

    def close(self) -> None:
        """Close the receivers."""
        for receiver in self._receivers.values():
            receiver.close()

    def _models(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the worker's models by name, and the objects at these names."""
        own = {name: part for name, part in vars(self._parts).items() if name != "env"}
        own[POLICY] = module_of(own.get(POLICY))
        by_path = {name: resolve(self._parts, name) for name in names if name not in own}
        return by_path | {name: model for name, model in own.items() if model is not None}

    def _found(self, name: str) -> Any:
        found = resolve(self._parts, name)
        return module_of(found) if name == POLICY else found

    def _on_commit(self, name: str) -> Callable[[int], object] | None:
        """Return the `on_commit` method of a model, or of the policy that contains it."""
        names = [name, POLICY] if is_part(name) else [name]
        hooks = (getattr(self._found(each), "on_commit", None) for each in names)
        return next(filter(callable, hooks), None)

    def _check_shared(self, name: str, *, views: bool) -> None:
        # A copy into a parameter that views a received buffer would change the memory of other
        # workers. If that memory is read-only, the write would kill the process.
        own = _parameters(self._found(name))
        for other in self._receivers:
            if views != self._views[other] and own & _parameters(self._found(other)):
                raise OptionError(
                    f"{name!r} and {other!r} share parameters, and only one of them has "
                    "zero_copy: what is copied would be written into memory that workers only "
                    "read; write 'zero_copy': True for both, or leave it out"
                )


def _read(model: Any, receiver: Receiver | None) -> Mapping[str, Tensor]:
    read = None if receiver is None else receiver.snapshot()
    return dict(Update.of(named_tensors(model)).copied().items()) if read is None else read


def _parameters(model: Any) -> set[int]:
    return set(map(id, model.parameters())) if isinstance(model, nn.Module) else set()
