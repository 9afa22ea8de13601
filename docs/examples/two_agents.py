"""Two agents of a PettingZoo environment, each with its own policy: they learn a signal.

    python docs/examples/two_agents.py

The speaker sees a colour, and the listener sees what the speaker said. Both are rewarded when the
listener names the colour. ``Collector`` adapts PettingZoo's environments itself. Ends with status 0
when the mean return of the last 100 episodes has reached ``--goal``; random actions reach about 2.7
of 8.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Categorical

from sync_collector import BatchOptions, Collector

GAMMA, CLIP, ENTROPY = 0.6, 0.2, 0.03
EPOCHS, LEARNING_RATE = 8, 1e-2
COLOURS, ROUNDS = 3, 8
AGENTS = ("speaker", "listener")


class Signals(ParallelEnv[str, Any, Any]):
    """The speaker says one of three words, which the listener hears in the next round."""

    metadata: ClassVar[dict[str, Any]] = {"name": "signals_v0"}
    possible_agents: ClassVar[list[str]] = list(AGENTS)

    def observation_space(self, _: str) -> Box:
        """Return the space of a one-hot vector: the colour, or the word that was said."""
        return Box(0, 1, (COLOURS,), np.float32)

    def action_space(self, _: str) -> Discrete:
        """Return the space of a word or a colour."""
        return Discrete(COLOURS)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Begin an episode."""
        del options
        if seed is not None or not hasattr(self, "_random"):
            self._random = np.random.default_rng(seed)
        self.agents, self._round = list(self.possible_agents), 0
        self._colour, self._word, self._meant = int(self._random.integers(COLOURS)), 0, 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Reward both, then let the listener hear the word, and draw the next colour."""
        reward = float(self._round > 0 and actions["listener"] == self._meant)
        self._word, self._meant = int(actions["speaker"]), self._colour
        self._colour, self._round = int(self._random.integers(COLOURS)), self._round + 1
        over, seen, agents = self._round > ROUNDS, self._seen(), list(self.agents)
        self.agents = [] if over else agents
        each = [dict.fromkeys(agents, value) for value in (reward, over, False)]
        return seen, *each, {agent: {} for agent in agents}

    def _seen(self) -> dict[str, Any]:
        rows = np.eye(COLOURS, dtype=np.float32)
        return {"speaker": rows[self._colour], "listener": rows[self._word]}


class Policies(nn.Module):
    """A network for each agent, with logits and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict()
        for agent in AGENTS:
            first, last = nn.Linear(COLOURS, 32), nn.Linear(32, COLOURS + 1)
            self.of[agent] = nn.Sequential(first, nn.Tanh(), last)

    def outputs(self, agent: str, observation: Tensor) -> tuple[Categorical, Tensor]:
        """Return an agent's distribution of actions, and the value."""
        out = self.of[agent](observation)
        return Categorical(logits=out[..., :COLOURS]), out[..., COLOURS]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the action of each agent."""
        for agent in AGENTS:
            distribution, value = self.outputs(agent, tensordict[agent, "observation"])
            action = distribution.sample()
            tensordict[agent, "action"], tensordict[agent, "value"] = action, value
            tensordict[agent, "log_prob"] = distribution.log_prob(action)
        return tensordict


def advantages(reward: Tensor, value: Tensor, done: Tensor) -> Tensor:
    """Return discounted returns minus the values; time is the last dimension."""
    running, returns = value[..., -1] * 0, []
    for t in reversed(range(reward.shape[-1])):
        running = reward[..., t] + GAMMA * running * ~done[..., t]
        returns.append(running)
    return torch.stack(returns[::-1], -1) - value


def learn(batch: TensorDictBase, policies: Policies, optimizer: torch.optim.Optimizer) -> None:
    """Train each agent with its own frames."""
    done = batch["next", "done"].squeeze(-1)
    for agent in AGENTS:
        part, reward = batch[agent], batch["next", agent, "reward"].squeeze(-1)
        advantage = advantages(reward, part["value"], done)
        target, gain = advantage + part["value"], advantage / (advantage.std() + 1e-8)
        for _ in range(EPOCHS):
            distribution, value = policies.outputs(agent, part["observation"])
            ratio = (distribution.log_prob(part["action"]) - part["log_prob"]).exp()
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss = loss - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            (loss + 0.5 * (value - target).square().mean()).backward()
            optimizer.step()


def run(scheme: str, frames: int, goal: float, seed: int) -> bool:
    """Train, and return whether the goal was reached."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policies = Policies()
    optimizer = torch.optim.Adam(policies.parameters(), LEARNING_RATE)
    with Collector(
        Signals, policies, scheme=scheme, num_workers=2, frames_per_batch=300, sync=True,
        total_frames=frames, batch=BatchOptions(episode_stats=True),
    ) as collector:  # fmt: skip
        collector.set_seed(seed)
        for batch in collector:
            learn(batch, policies, optimizer)
            collector.update_policy_weights_()
            stats = collector.stats()
            print(f"{stats.frames:>8,} frames  return {stats.episode_reward:6.2f}")
            if stats.episodes >= 100 and stats.episode_reward >= goal:
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="shm", help="how weights travel (sync-core list)")
    parser.add_argument("--frames", type=int, default=100_000, help="give up after these frames")
    parser.add_argument("--goal", type=float, default=7.5)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
