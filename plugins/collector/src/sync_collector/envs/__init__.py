"""Environments: what a collector asks of one, an adapter for Gymnasium, and one to test with."""

from sync_collector.envs.arrays import ArrayEnv, ArraySpec, ArrayStep
from sync_collector.envs.counting import CountingEnv
from sync_collector.envs.gym import GymEnv
from sync_collector.envs.protocol import Env

__all__ = ["ArrayEnv", "ArraySpec", "ArrayStep", "CountingEnv", "Env", "GymEnv"]
