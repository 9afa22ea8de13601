"""Environments of several agents that act at once: PettingZoo's parallel environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from sync_collector.envs.arrays import Arrays, as_array, put_row
from sync_collector.envs.gym import EnvOptions, InfoReader, next_seed
from sync_collector.envs.normal import no_flags
from sync_collector.envs.protocol import FLAGS, close_env

__all__ = ["AgentsEnv"]


class AgentsEnv:
    """A parallel environment of PettingZoo: each agent has its entries under its own name.

    An agent has ``(agent, "observation")``, or the entries of its Dict space, and
    ``(agent, "action")``; under ``"next"`` also ``(agent, "reward")`` and the flags
    ``(agent, "done")``, ``(agent, "terminated")`` and ``(agent, "truncated")``. The episode ends
    when all agents have left: with the flags ``"done"``, ``"terminated"`` and ``"truncated"`` at
    the top. An agent that left before observes zeros, has the reward 0, and ``(agent, "done")`` at
    the root. A policy takes the TensorDict and sets the action of each agent.

    Args:
        env: has ``possible_agents``, and ``reset()`` and ``step(actions)`` that return dicts.
        options: see `sync_collector.envs.GymEnv`; a mask is looked for in each agent's observation
            and info.

    Raises:
        TypeError: agents take turns in the environment (AEC), or a space has no arrays.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> class Duet:
        ...     possible_agents = agents = ["left", "right"]
        ...     def observation_space(self, agent):
        ...         return Box(0, 9, (1,))
        ...     def action_space(self, agent):
        ...         return Discrete(2)
        ...     def reset(self, seed=None, options=None):
        ...         return {agent: np.zeros(1) for agent in self.agents}, {}
        ...     def step(self, actions):
        ...         def each(value):
        ...             return dict.fromkeys(self.agents, value)
        ...         return each(np.ones(1)), each(1.0), each(False), each(False), each({})
        >>> env = AgentsEnv(Duet())
        >>> td = env.step(env.rand_action(env.reset()))
        >>> td["next", "left", "observation"], td["next", "right", "reward"]
        (tensor([1.]), tensor([1.]))
    """

    batch_size = torch.Size()
    device = None

    def __init__(self, env: Any, options: EnvOptions | None = None) -> None:
        # Not before there is an environment, which needs gymnasium for its spaces.
        from sync_collector.envs.spaces import ObservationCodec, action_codec, check_maskable

        if hasattr(env, "agent_iter"):
            raise TypeError(
                f"the agents of {env} take turns (AEC), and a collector steps all agents at once; "
                "type pettingzoo.utils.aec_to_parallel(env), or make it by parallel_env()"
            )
        self._env = env
        self._options = given = EnvOptions() if options is None else options
        self.is_closed = False
        self.agents: tuple[str, ...] = tuple(env.possible_agents)
        self._spaces = {agent: env.action_space(agent) for agent in self.agents}
        self._actions = {
            agent: action_codec(space, categorical=given.categorical)
            for agent, space in self._spaces.items()
        }
        self._observations = {
            agent: ObservationCodec(
                env.observation_space(agent), categorical=bool(given.categorical)
            )
            for agent in self.agents
        }
        self._infos = {
            agent: InfoReader(given.info_keys, list(codec.specs))
            for agent, codec in self._observations.items()
        }
        if given.action_mask is not None:
            for space in self._spaces.values():
                check_maskable(space)
        self._masks: dict[str, Any] = {}
        self._left: dict[str, dict[str, bool]] = {}
        self.action_keys = [(agent, "action") for agent in self.agents]
        self.reward_keys = [(agent, "reward") for agent in self.agents]
        self.done_keys = ["done", *((agent, "done") for agent in self.agents)]

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        """Begin an episode."""
        del tensordict
        observations, infos = self._env.reset()
        self._left = {}
        root = {agent: self._observed(agent, observations, infos) for agent in self.agents}
        return _nested({agent: {**root[agent], **no_flags(())} for agent in root}, no_flags(()))

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act with all agents that have not left."""
        present = [agent for agent in self.agents if agent not in self._left]
        actions = {
            agent: self._actions[agent].decode(
                as_array(tensordict.get((agent, "action")).detach().cpu())
            )
            for agent in present
        }
        observations, rewards, terminated, truncated, infos = self._env.step(actions)
        parts = {}
        for agent in self.agents:
            if agent in present:
                over, cut = bool(terminated.get(agent)), bool(truncated.get(agent))
                if over or cut or agent not in self._env.agents:
                    self._left[agent] = {"terminated": over or not cut, "truncated": cut}
            reward = float(rewards.get(agent, 0.0)) if agent in present else 0.0
            parts[agent] = {
                **self._observed(agent, observations, infos),
                **_flags(self._left.get(agent, {})),
                "reward": torch.tensor([reward], dtype=torch.float32),
            }
        ended = len(self._left) == len(self.agents)
        # An episode was cut short if any agent was.
        is_cut = ended and any(left["truncated"] for left in self._left.values())
        whole = _flags({"terminated": ended and not is_cut, "truncated": is_cut})
        following = tensordict.get("next", TensorDict({}, batch_size=[]))
        return tensordict.set("next", following.update(_nested(parts, whole)))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Put a random action of each agent's own stream; `set_seed` seeds these."""
        for agent, space in self._spaces.items():
            mask = self._masks.get(agent)
            drawn = space.sample() if mask is None else space.sample(mask)
            action = np.asarray(self._actions[agent].encode(drawn))
            tensordict.set((agent, "action"), torch.from_numpy(action.copy()))
        return tensordict

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed by ``reset(seed=seed)``, and the random actions of each agent."""
        self._env.reset(seed=seed)
        for i, space in enumerate(self._spaces.values()):
            space.seed(seed + i)
        return seed if static_seed else next_seed(seed)

    def close(self) -> None:
        """Close the environment inside."""
        self.is_closed = True
        close_env(self._env)

    def _observed(
        self, agent: str, observations: Mapping[str, Any], infos: Mapping[str, Any]
    ) -> dict[Any, Any]:
        """Return the entries that an agent observed; zeros of one that has left."""
        codec, reader = self._observations[agent], self._infos[agent]
        specs = {**codec.specs, **reader.specs}
        rows = {key: np.zeros((1, *spec.shape), spec.dtype) for key, spec in specs.items()}
        if agent in observations:
            info = infos.get(agent, {})
            observation = observations[agent]
            put_row(rows, 0, {**codec.encode(observation), **reader.read(info)})
            self._masks[agent] = self._mask(observation, info)
        return {key: torch.from_numpy(row[0, ...]) for key, row in rows.items()}

    def _mask(self, observation: Any, info: Arrays) -> Any:
        if self._options.action_mask is None:
            return None
        from sync_collector.envs.spaces import mask_of

        return mask_of(self._options.action_mask, observation, info)


def _flags(given: Mapping[str, bool]) -> dict[str, torch.Tensor]:
    values = {name: given.get(name, False) for name in FLAGS[1:]}
    values["done"] = any(values.values())
    return {name: torch.tensor([value]) for name, value in values.items()}


def _nested(
    parts: Mapping[str, Mapping[Any, torch.Tensor]], flags: Mapping[str, torch.Tensor]
) -> TensorDictBase:
    made = TensorDict(dict(flags), batch_size=[])
    for agent, part in parts.items():
        made.set(agent, TensorDict(dict(part), batch_size=[]))
    return made
