"""The policy and the training step of the measured training loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ENVS = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1)}
#: The environments that `BenchPolicy` supports.
ENVS = tuple(_ENVS)

_EPOCHS = 4
_MINIBATCHES = 4


def change(policy: nn.Module) -> None:
    """Change the weights, as training does: senders warn about unchanged weights."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.neg_()


class BenchPolicy(nn.Module):
    """A policy with two layers of width 64: samples CartPole's actions, or returns Pendulum's.

    Args:
        env: the environment's id.

    Example:
        >>> BenchPolicy("CartPole-v1")(torch.zeros(4)).sum()
        tensor(1)
    """

    def __init__(self, env: str) -> None:
        super().__init__()
        seen, acts = _ENVS[env]
        self.layers = nn.Sequential(
            nn.Linear(seen, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, acts)
        )
        self.discrete = acts > 1

    def forward(self, observation: Tensor) -> Tensor:
        """Return the action."""
        out: Tensor = self.layers(observation)
        if not self.discrete:
            return 2 * out.tanh()
        noise = torch.empty_like(out).exponential_().log()
        return nn.functional.one_hot((out - noise).argmax(-1), out.shape[-1])


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """For ``with``: set torch's number of threads in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(policy: BenchPolicy, optimizer: torch.optim.Optimizer, observations: Tensor) -> None:
    """Make as many training steps as a small PPO makes per batch; the loss is arbitrary."""
    for _ in range(_EPOCHS):
        for minibatch in observations.chunk(_MINIBATCHES):
            optimizer.zero_grad()
            policy.layers(minibatch).square().mean().backward()
            optimizer.step()
