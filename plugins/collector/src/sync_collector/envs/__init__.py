"""Environments: their interface, adapters for other libraries, and one for tests."""

from sync_collector.envs.adapt import EnvironmentAdapter
from sync_collector.envs.arrays import ArrayEnv, ArraySpec, ArrayStep
from sync_collector.envs.counting import CountingEnv
from sync_collector.envs.gym import EnvOptions, GymEnv
from sync_collector.envs.protocol import Env

__all__ = [
    "ArrayEnv",
    "ArraySpec",
    "ArrayStep",
    "CountingEnv",
    "Env",
    "EnvOptions",
    "EnvironmentAdapter",
    "GymEnv",
]
