"""The weight transfer of TRL's `AsyncGRPOTrainer` over any scheme."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from sync_core import Layout, ModelError, OptionError, Sender, SendReport
from sync_core.models import ComputedWeights, Strategy, TensorStream, named_tensors


class Transfers(Protocol):
    """The interface of an existing sender: `sync_core.Sender`, or `Rollouts`."""

    @property
    def model(self) -> Any:
        """A model of the trainer's architecture."""

    def send(self, weights: Any = None) -> SendReport:
        """Send weights, and wait until every worker has committed them."""
        ...

    def close(self) -> None:
        """Close the sender."""


class SyncTransfer:
    """The ``weight_transfer`` of `trl.experimental.async_grpo.AsyncGRPOTrainer`.

    The trainer streams its parameters tensor by tensor, and each is packed before the next is
    gathered. The trainer does not stream frozen parameters and buffers, so their values come from
    ``model``. If a worker fails, training ends with `sync_core.SendError`, unless the sender has
    another ``on_failure``. The protocol is `trl.experimental.async_grpo.WeightTransferProtocol`.

    Args:
        scheme: the name of an installed scheme or a plugin object; or an existing sender, such as
            `Rollouts`.
        model: a model of the trainer's architecture and dtype, such as the workers' initial model.
            None for the model of an existing sender.
        **options: other arguments of `sync_core.Sender`, such as ``num_workers``, and options of
            the scheme; only together with a scheme.

    Attributes:
        sender: the sender; pass ``sender.address(i)`` to `sync_core.Receiver`.

    Raises:
        OptionError: a scheme without a model, or options for an existing sender.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> transfer = SyncTransfer("thread", model, num_workers=0)
        >>> transfer.init_weight_transfer()
        >>> transfer.send_weights(iter(model.named_parameters()))
        >>> transfer.destroy()
    """

    sender: Transfers

    def __init__(self, scheme: Any, model: Any = None, **options: Any) -> None:
        self._owned = not (hasattr(scheme, "send") and hasattr(scheme, "model"))
        if not self._owned:
            if model is not None or options:
                raise OptionError(
                    f"SyncTransfer({type(scheme).__name__}, …) sends what that sender's model is "
                    "like, with that sender's options; give it alone"
                )
            self.sender = scheme
            return
        if model is None:
            raise OptionError(
                "a scheme needs a model of the trainer's architecture; type "
                "SyncTransfer(scheme, model, num_workers=…)"
            )
        self.sender = Sender(scheme, model, **options)

    def init_weight_transfer(self) -> None:
        """Do nothing: workers connect by their addresses."""

    def pause(self) -> None:
        """Do nothing: workers and engines pause only for their own commit."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send a version, and wait until every worker has committed it.

        Args:
            iterator: names and unsharded tensors, in the order of ``model.named_parameters()``.

        Raises:
            ModelError: the iterator raised, or returned a tensor that ``model`` does not have.
            SendError: some workers failed; the others have the version.
        """
        self.sender.send(_Streamed(self.sender.model, iterator))

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Close the sender if this object made it."""
        if self._owned:
            self.sender.close()


class _Streamed(ComputedWeights):
    """The trainer's streamed tensors, completed by those of a model that are not streamed."""

    def __init__(self, model: Any, iterator: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__(model)
        self._iterator = iterator

    def read(self, strategy: Strategy) -> TensorStream:
        own = named_tensors(self.model, strategy)
        layout = Layout.of(own)
        return TensorStream(layout, partial(_together, layout, own, self._iterator))


def _together(
    layout: Layout, own: dict[str, Tensor], iterator: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layout: streamed ones from the iterator, others from the model."""
    name, tensor = next(iterator, (None, None))
    for wanted in layout.names:
        if wanted != name or tensor is None:
            yield wanted, own[wanted]
            continue
        yield wanted, tensor
        name, tensor = next(iterator, (None, None))
    if name is not None:
        raise ModelError(
            f"the trainer streams {name!r}, which the sender's model has not, or has earlier; give "
            "SyncTransfer a model of the trainer's architecture"
        )
