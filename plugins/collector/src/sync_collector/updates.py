"""Updates of a collector's models, and calls of objects in its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack, overload

from sync_collector.collector_worker import CollectorWorker
from sync_collector.models_elsewhere import ModelsElsewhere
from sync_collector.multi_model import MultiModelWeights
from sync_collector.policy_weights import PolicyWeights
from sync_collector.relay import Relay
from sync_collector.replacement import Replacement
from sync_collector.schemes import POLICY
from sync_collector.update_arguments import UpdateArguments, chosen
from sync_collector.worker_pool import WorkerPool
from sync_core import Address, PendingSend, Sender, SendReport
from sync_core.checks import check_path, check_seconds
from sync_core.workers import gather

# How long what was sent before a collector registered may take, in seconds.
_SOON = 0.5


class Updates:
    """The part of `Collector` about weights; not for use alone."""

    _timeout: float
    _pool: WorkerPool
    _weights: PolicyWeights | MultiModelWeights
    _elsewhere: ModelsElsewhere
    _relay: Relay
    _replacement: Replacement

    @property
    def sender(self) -> Sender | None:
        """Return the policy's sender; None as long as there are no weights to send."""
        return self.senders.get(POLICY)

    @property
    def senders(self) -> Mapping[str, Sender]:
        """Return the sender of each model that has weights to send."""
        return {**self._weights.senders, **self._elsewhere.senders}

    @overload
    def update_policy_weights_(
        self,
        policy_or_weights: Any = ...,
        *,
        blocking: Literal[True] = ...,
        **given: Unpack[UpdateArguments],
    ) -> SendReport: ...

    @overload
    def update_policy_weights_(
        self, policy_or_weights: Any = ..., *, blocking: bool, **given: Unpack[UpdateArguments]
    ) -> SendReport | PendingSend: ...

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> SendReport | PendingSend:
        """Send the policy's weights as a new version, and let the workers commit them.

        A worker commits between two steps, also in the middle of a batch: ``policy_version`` says
        which frames were made with which weights. One with several models commits between two
        batches: all that an update names, or nothing. If a `skip_update` hook skips one of these
        models for a worker, all of them are skipped for that worker.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict; None for the trainer's own.
            weights: the same, by another name.
            policy: the same, by another name.
            worker_ids: one worker or several; None for all.
            model_id: whose weights they are; the policy's by default, or those of all models that
                the collector's workers hold if none were given. A model that other workers hold,
                ``weight_sync_schemes={name: {"scheme": "ray", "workers": [actor]}}``, is updated
                only by its name; ``worker_ids`` are those of its holders then.
            weights_dict: weights by the name of their model, instead of all the above; None for
                the trainer's own.
            blocking: wait until the workers have committed the version. Otherwise what is
                returned tells; an update that is under way when the next one begins is waited
                for first.

        Returns:
            A report, whose version is that of `stats` and of frames made with the weights.

        Raises:
            SendError: some workers do not have the version; the others do. Dead ones are replaced
                instead if they were given.
            ModelError: there are no weights to send, or no policy to load them into.
            KeyError: a model that there is not.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        given = chosen(
            (policy_or_weights, weights, policy),
            model_id,
            weights_dict,
            (*self._weights.names, *self._elsewhere.senders),
        )
        held = self._elsewhere.among(given)
        if held is not None:
            return self._elsewhere.update(held, given[held], worker_ids, blocking=blocking)
        if self._pool.dismissed:
            # After the last batch, as in every other round of a training loop.
            return SendReport(self._weights.version, 0.0, {})
        return self._replacement.see_through(
            lambda: self._weights.update(given, worker_ids, blocking=blocking)
        )

    def register_scheme_receiver(
        self, addresses: Mapping[str, Address], *, synchronize_weights: bool = True
    ) -> None:
        """Get models from senders elsewhere, as the worker that this collector is to them.

        Weights received, before every batch and by `receive_weights`, are passed on to this
        collector's own workers, and is acknowledged when they have committed it. A model that only
        the workers have, such as a policy of ``policy_factory``, is received into a copy of its
        tensors.

        Args:
            addresses: what each model's sender gave for this collector, by model.
            synchronize_weights: take what has been sent so far, if it comes within half a second.

        Raises:
            KeyError: a model that there is not.
            ModelError: neither the collector nor its workers have weights of that name.
        """
        self._check_open()
        self._relay.register(addresses)
        if synchronize_weights:
            self._relay.receive(_SOON)

    def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        timeout: float | None = None,
    ) -> Mapping[str, int]:
        """Receive models from senders elsewhere, or take the policy's weights, and pass them on.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict for the collector's own
                policy, if no senders were registered.
            weights: the same, by another name.
            policy: the same, by another name.
            timeout: seconds to wait for a version of any model; None for the collector's.

        Returns:
            The versions received, by model.

        Raises:
            ValueError: weights where there are senders, or neither.
            SenderLostError: a sender is gone.
            SendError: some workers do not have the version; its sender knows.
        """
        self._check_open()
        limit = self._timeout if timeout is None else check_seconds(timeout)
        return self._relay.receive_or_load((policy_or_weights, weights, policy), limit)

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call, or return, the object at a path in every worker, in the order of their ids.

        Args:
            path: from ``env``, ``policy`` or another model on: ``"env.transform[0].reset"``.
            *args: for what is called.
            **kwargs: its keyword arguments.

        Raises:
            RemoteCallError: the path leads nowhere in a worker, or what was called raised.
        """
        self._check_open()
        check_path(path, "path")
        calls = self._pool.call_all(CollectorWorker.execute, path, args, kwargs)
        return gather(calls, self._timeout, f"execute {path!r}")

    def increment_version(self) -> None:
        """Count a new version of the weights that reached the workers another way.

        Frames made from now on carry it.
        """
        self._check_open()
        self._weights.increment_version()

    def _check_open(self) -> None:
        """Raise unless the collector can still be used."""
        raise NotImplementedError
