"""Multi-agent environments whose agents act at once: PettingZoo's parallel environments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from sync_collector.envs.arrays import Arrays, as_array, put_row
from sync_collector.envs.gym import (
    EnvOptions,
    InfoReader,
    check_takes_seed,
    flag_of,
    next_seed,
    number_of,
)
from sync_collector.envs.normal import no_flags
from sync_collector.envs.protocol import FLAGS, RESERVED, close_env

__all__ = ["AgentsEnv"]


class AgentsEnv:
    """Adapts a PettingZoo parallel environment: each agent's entries are under its own name.

    An agent has ``(agent, "observation")``, or the entries of its Dict space, and ``(agent,
    "action")``; under ``"next"`` also ``(agent, "reward")`` and the flags ``(agent, "done")``,
    ``(agent, "terminated")`` and ``(agent, "truncated")``. The episode ends when all agents have
    left; then the flags ``"done"``, ``"terminated"`` and ``"truncated"`` at the top level are set.
    An agent that left earlier, or is not in ``agents`` after `reset`, observes zeros, has the
    reward 0, and has ``(agent, "done")`` set at the root. A policy takes the TensorDict and sets
    the action of each agent.

    Args:
        env: has ``possible_agents``; ``reset()`` and ``step(actions)``, which return dicts; and
            ``agents``, the list of agents that have not left, as PettingZoo requires.
        options: see `sync_collector.envs.GymEnv`; a mask is looked for in each agent's observation
            and info.

    Raises:
        TypeError: agents take turns in the environment (AEC), a space cannot be expressed with
            arrays, or an agent's name cannot be used for entries.

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
        # Imported here: its spaces need gymnasium, which may not be installed.
        from sync_collector.envs.spaces import ObservationCodec, action_codec, check_maskable

        if hasattr(env, "agent_iter"):
            raise TypeError(
                f"the agents of {env} take turns (AEC), and a collector steps all agents at once; "
                "type pettingzoo.utils.aec_to_parallel(env), or make it by parallel_env()"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(
                f"{type(env).__name__} has no 'possible_agents', the list of all agents that it "
                "may ever have, for each of which a batch has entries; let it have one"
            )
        for name in ("observation_space", "action_space"):
            if not callable(getattr(env, name, None)):
                raise TypeError(
                    f"{type(env).__name__} has no method {name}(agent), as PettingZoo's parallel "
                    "environments have; let it return the space of the agent"
                )
        self._env = env
        self._options = given = EnvOptions() if options is None else options
        self.is_closed = False
        self.agents = _checked_names(env.possible_agents)
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
        observations, infos = self._returned("reset", self._env.reset(), _RESET)
        self._left = {}
        live = self._live()
        if not live:
            raise TypeError(f"{self._name} has no agents after reset(); let it set agents")
        self._left = {agent: {"terminated": True} for agent in self.agents if agent not in live}
        parts = {}
        for agent in self.agents:
            given = observations if agent in live else {}
            seen = self._observed(agent, given, infos, required=agent in live)
            parts[agent] = {**seen, **_flags(self._left.get(agent, {}))}
        return _nested(parts, no_flags(()))

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Act with all agents that have not left."""
        present = [agent for agent in self.agents if agent not in self._left]
        actions = {agent: self._action(agent, tensordict) for agent in present}
        returned = self._returned("step", self._env.step(actions), _STEP)
        observations, rewards, terminated, truncated, infos = returned
        live = self._live()
        parts = {}
        for agent in self.agents:
            reward, stays = 0.0, agent in live
            if agent in present:
                over = self._flag("terminated", terminated, agent, required=stays)
                cut = self._flag("truncated", truncated, agent, required=stays)
                if stays or agent in rewards:
                    reward = number_of(self._entry("reward", rewards, agent), self._env)
                if over or cut or not stays:
                    self._left[agent] = {"terminated": over or not cut, "truncated": cut}
            left = self._left.get(agent, {})
            # After a truncated agent the next state has a value; after a terminated one it has
            # none.
            required = agent in present and not left.get("terminated")
            given = observations if agent in present else {}
            parts[agent] = {
                **self._observed(agent, given, infos, required=required),
                **_flags(left),
                "reward": torch.tensor([reward], dtype=torch.float32, device="cpu"),
            }
        ended = len(self._left) == len(self.agents)
        # The episode was truncated if any agent was.
        is_cut = ended and any(left.get("truncated") for left in self._left.values())
        whole = _flags({"terminated": ended and not is_cut, "truncated": is_cut})
        following = tensordict.get("next", TensorDict({}, batch_size=[]))
        return tensordict.set("next", following.update(_nested(parts, whole)))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Add a random action of each agent's action space, seeded by `set_seed`."""
        for agent, space in self._spaces.items():
            mask = self._masks.get(agent)
            drawn = space.sample() if mask is None else space.sample(mask)
            action = np.asarray(self._actions[agent].encode(drawn))
            tensordict.set((agent, "action"), torch.from_numpy(action.copy()))
        return tensordict

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed by ``reset(seed=seed)``, and seed the random actions of each agent."""
        check_takes_seed(self._env)
        self._env.reset(seed=seed)
        for i, space in enumerate(self._spaces.values()):
            space.seed(seed + i)
        return seed if static_seed else next_seed(seed)

    def close(self) -> None:
        """Close the PettingZoo environment."""
        self.is_closed = True
        close_env(self._env)

    @property
    def _name(self) -> str:
        return type(self._env).__name__

    def _live(self) -> Collection[str]:
        """Return the agents that have not left, according to the environment."""
        live: Collection[str] | None = getattr(self._env, "agents", None)
        if live is None:
            raise TypeError(
                f"{self._name} has no 'agents', the list of the agents that have not left; let "
                "reset() and step() set it, as PettingZoo's parallel environments do"
            )
        for agent in live:
            self._check_listed(agent)
            if agent in self._left:
                raise TypeError(
                    f"{self._name} has the agent {agent!r} in agents again, or later than from "
                    "reset() on; list it from the start, or leave it out until the next reset()"
                )
        return live

    def _returned(self, method: str, made: Any, wanted: tuple[str, ...]) -> Any:
        fits = isinstance(made, tuple) and len(made) == len(wanted)
        if not fits or not all(isinstance(each, Mapping) for each in made):
            raise TypeError(
                f"{self._name}.{method}() must return {', '.join(wanted)}, each a dict with an "
                "entry for each agent, as PettingZoo's parallel environments do"
            )
        for agent in made[0]:
            self._check_listed(agent)
        return made

    def _check_listed(self, agent: Any) -> None:
        if agent not in self.agents:
            raise TypeError(
                f"{self._name} has the agent {agent!r}, and possible_agents lists "
                f"{list(self.agents)}; add it there"
            )

    def _entry(self, what: str, given: Mapping[str, Any], agent: str) -> Any:
        if agent not in given:
            raise TypeError(
                f"{self._name} gave no {what} of the agent {agent!r}, only of {sorted(given)}; let "
                "it give one for each agent that is in agents, or take the agent out of agents"
            )
        return given[agent]

    def _flag(self, name: str, given: Mapping[str, Any], agent: str, *, required: bool) -> bool:
        if agent not in given and not required:
            return False
        return flag_of(self._entry(f"flag {name!r}", given, agent), self._env, name)

    def _action(self, agent: str, tensordict: TensorDictBase) -> Any:
        action = tensordict.get((agent, "action"), None)
        if action is None:
            raise TypeError(
                f"the policy gave no action for the agent {agent!r}; let it set "
                f"tensordict[{agent!r}, 'action'], as it does for each agent"
            )
        return self._actions[agent].decode(as_array(action.detach().cpu()))

    def _observed(
        self,
        agent: str,
        observations: Mapping[str, Any],
        infos: Mapping[str, Any],
        *,
        required: bool,
    ) -> dict[Any, Any]:
        """Return the observations of an agent, zeros if it has left."""
        codec, reader = self._observations[agent], self._infos[agent]
        specs = {**codec.specs, **reader.specs}
        rows = {key: np.zeros((1, *spec.shape), spec.dtype) for key, spec in specs.items()}
        if required or agent in observations:
            observation = self._entry("observation", observations, agent)
            info = infos.get(agent, {})
            try:
                put_row(rows, 0, {**codec.encode(observation), **reader.read(info)})
            except TypeError as error:
                raise TypeError(f"of the agent {agent!r}: {error}") from error
            self._masks[agent] = self._mask(observation, info)
        return {key: torch.from_numpy(row[0, ...]) for key, row in rows.items()}

    def _mask(self, observation: Any, info: Arrays) -> Any:
        if self._options.action_mask is None:
            return None
        from sync_collector.envs.spaces import mask_of

        return mask_of(self._options.action_mask, observation, info)


_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


def _checked_names(names: Any) -> tuple[str, ...]:
    agents = tuple(names)
    if not agents or len(set(agents)) < len(agents):
        raise TypeError(f"possible_agents must list agents, each once, got {list(agents)}")
    for agent in agents:
        if not isinstance(agent, str) or agent in RESERVED:
            raise TypeError(
                f"possible_agents lists {agent!r}, which cannot be the name of an agent's entries "
                "in a batch; give each agent a str, and none of " + ", ".join(sorted(RESERVED))
            )
    return agents


def _flags(given: Mapping[str, bool]) -> dict[str, torch.Tensor]:
    values = {name: given.get(name, False) for name in FLAGS[1:]}
    values["done"] = any(values.values())
    return {name: torch.tensor([value], device="cpu") for name, value in values.items()}


def _nested(
    parts: Mapping[str, Mapping[Any, torch.Tensor]], flags: Mapping[str, torch.Tensor]
) -> TensorDictBase:
    made = TensorDict(dict(flags), batch_size=[])
    for agent, part in parts.items():
        made.set(agent, TensorDict(dict(part), batch_size=[]))
    return made
