"""A layer that sends the largest changes in each update, and the rest in later ones.

    python docs/examples/top_k.py --fraction 0.01

With the scheme ``increments::``, an update is only as large as the chosen changes. The others are
not lost: the layer compares each update with the workers' weights, so small changes add up until
they are among the largest (error feedback).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sync_core import BindContext, Receiver, SendContext, Sender, Update, hookimpl


class TopK:
    """Sends the elements that differ most from the workers' weights.

    The first version is whole. If the weights stay the same, workers have all of them after
    ``ceil(1 / fraction)`` updates. Tensors that are not floating-point are sent unchanged.

    Args:
        fraction: the share of all elements that one update changes, above 0 and up to 1.

    Raises:
        ValueError: ``fraction`` is not in this range.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and up to 1, got {fraction!r}")
        self.fraction = fraction
        self._sent: dict[str, Tensor] = {}

    def bind(self, context: BindContext) -> TopK:
        """Return a layer with separate state for one sender."""
        del context
        return TopK(self.fraction)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Replace the weights by the weights that the workers will have."""
        update = yield
        if context.version == 0:
            return update  # needed only for the layout
        weights = [tensor.detach() for tensor in update.tensors]
        names = [spec.name for spec in update.layout.specs]
        sent = [self._keep(name, tensor) for name, tensor in zip(names, weights, strict=True)]
        choose_largest(weights, sent, self.fraction)
        update.replace(sent)
        return update

    def _keep(self, name: str, weight: Tensor) -> Tensor:
        """Return the workers' tensor; a copy of the weight at first, and for integers."""
        kept = self._sent.get(name)
        if kept is None or kept.shape != weight.shape or not _is_chosen(weight):
            kept = self._sent[name] = weight.clone()
        return kept


def choose_largest(weights: list[Tensor], sent: list[Tensor], fraction: float) -> None:
    """Copy the elements that differ most from ``weights`` to ``sent``.

    Args:
        weights: the trainer's tensors.
        sent: tensors of the same shapes; changed in place.
        fraction: the share of all elements to copy.
    """
    pairs = [pair for pair in zip(weights, sent, strict=True) if _is_chosen(pair[0])]
    changes = [_change(weight, held) for weight, held in pairs]
    if not changes:
        return
    joined = torch.cat(changes)
    count = math.ceil(fraction * joined.numel())
    chosen = torch.zeros_like(joined, dtype=torch.bool)
    chosen[joined.topk(count, sorted=False).indices] = True
    masks = chosen.split([change.numel() for change in changes])
    for (weight, held), mask in zip(pairs, masks, strict=True):
        held.copy_(torch.where(mask.view(weight.shape), weight, held))


def _is_chosen(weight: Tensor) -> bool:
    """Return whether an update may leave out some elements of the tensor."""
    return weight.dtype.is_floating_point and weight.element_size() > 1


def _change(weight: Tensor, held: Tensor) -> Tensor:
    """Return by how much each element differs; infinite if either is not a number."""
    change = (weight.double() - held.double()).abs().flatten()
    change = change.nan_to_num_(torch.inf, torch.inf)
    return change.masked_fill_((weight == held).flatten(), 0.0)


def train(scheme: str, layers: list[TopK], steps: int) -> tuple[list[int], float]:
    """Train a model of 2.1 MB, and send each step to a worker; return the bytes and the distance.

    Args:
        scheme: the scheme.
        layers: the layers of the sender.
        steps: the number of training steps.

    Returns:
        The bytes of each update, and the final distance of the worker's model from the trainer's,
        relative to the distance between the trainer's first and last model.
    """
    torch.manual_seed(0)
    policy, copy, task = nn.Linear(512, 1024), nn.Linear(512, 1024), nn.Linear(512, 1024)
    start = policy.weight.detach().clone()
    optimizer = torch.optim.SGD(policy.parameters(), lr=30.0)
    nbytes = []
    with ExitStack() as stack:
        sender = stack.enter_context(Sender(scheme, policy, num_workers=1, layers=layers))
        receiver = stack.enter_context(Receiver(sender.address(0), copy))
        for _ in range(steps):
            pending = sender.send_async()
            receiver.receive()
            nbytes.append(pending.wait().workers[0].nbytes)
            inputs = torch.randn(64, 512)
            loss = nn.functional.mse_loss(policy(inputs), task(inputs).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    distance = (policy.weight - copy.weight).norm() / (policy.weight - start).norm()
    return nbytes, distance.item()


def main() -> None:
    """Print the bytes of updates: whole, as increments, and with the layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fraction", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    print("scheme            layer        first update  last update  distance")
    for scheme, layers in (
        ("shm", []),
        ("increments::shm", []),
        ("increments::shm", [TopK(arguments.fraction)]),
    ):
        nbytes, distance = train(scheme, layers, arguments.steps)
        layer = f"TopK({arguments.fraction:g})" if layers else "none"
        print(f"{scheme:17} {layer:12} {nbytes[0]:12,} {nbytes[-1]:12,}  {distance:8.2f}")


if __name__ == "__main__":
    main()
