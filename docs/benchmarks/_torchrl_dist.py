"""Runs both sides of TorchRL's weight updates over process groups and RPC, without its collectors.

Written against torchrl 0.14.1. Its schemes accept any object with the attributes of a collector
that they use. They use the default process group, in which the trainer has rank 0. Both schemes
receive into the model's memory, and then copy the model onto itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import DistributedWeightSyncScheme, RPCWeightSyncScheme

_MODEL_ID = "policy"


@dataclass(eq=False)
class Collector:
    """Stands for the collector in a worker.

    Args:
        policy: the model to update; a scheme finds it by this name.
        rank: the worker's rank in the default process group.
        scheme: a copy of the sender's scheme, or an equal one.
    """

    policy: nn.Module
    rank: int
    scheme: Any

    def __post_init__(self) -> None:
        self.scheme.init_on_receiver(model_id=_MODEL_ID, context=self, worker_idx=self.rank)
        self.scheme.connect(worker_idx=self.rank)

    def _receive_weights_scheme(self) -> None:
        """Called by the sender of the RPC scheme."""
        self.scheme.receive()

    def close(self) -> None:
        """End the receiving thread after the sender has stopped it."""
        self.scheme.shutdown()


@dataclass(eq=False)
class _Collectors:
    """Stands for the collector in the trainer, for the RPC scheme."""

    collector_infos: list[Any]
    collector_rrefs: list[Any]
    collector_class: type = Collector


class DistSending:
    """The trainer's side of DistributedWeightSyncScheme.

    Args:
        model: the trainer's model.
        workers: the number of workers.
        sync: the scheme's option: send one tensor after the other, or all at once.
        timeout: deadline in seconds.
    """

    def __init__(self, model: nn.Module, workers: int, *, sync: bool, timeout: float) -> None:
        self.scheme = DistributedWeightSyncScheme(sync=sync, timeout=timeout)
        self.scheme.init_on_sender(model_id=_MODEL_ID, num_workers=workers, model=model)
        self._weights = TensorDict.from_module(model).data

    def connect(self) -> None:
        """Send the first weights, while the workers make their `Collector`."""
        self.scheme.connect()

    def send(self) -> None:
        """Send; returns when every worker has applied and acknowledged the weights."""
        self.scheme.send(self._weights)

    def close(self) -> None:
        """Stop the receiving threads."""
        self.scheme._send_instruction("stop")
        self.scheme.shutdown()


def rpc_sending(model: nn.Module, infos: list[Any], rrefs: list[Any]) -> Callable[[], None]:
    """Return the trainer's side of RPCWeightSyncScheme: a function that sends.

    Args:
        model: the trainer's model.
        infos: the RPC infos of the workers, in the order of their ranks.
        rrefs: the `Collector` of each.
    """
    collectors = _Collectors(infos, rrefs)
    scheme = RPCWeightSyncScheme()
    scheme.init_on_sender(model_id=_MODEL_ID, context=collectors, num_workers=len(infos))
    scheme.connect()
    weights = TensorDict.from_module(model).data

    def send() -> None:
        # The scheme keeps only a weak reference to these.
        assert scheme.context is collectors
        scheme.send(weights)

    return send
