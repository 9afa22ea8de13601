"""RLlib's env runners, whose weights a scheme brings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tree", reason="RLlib needs dm_tree, lz4, ormsgpack and scipy")

from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from sync_core import OptionError
from sync_plugin_ray.rllib import EnvRunnerWeights, sync_env_runners

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    # Those of RLlib and its environments.
    pytest.mark.filterwarnings("ignore"),
]


def _configured(config: Any, scheme: str) -> Any:
    config.environment("CartPole-v1").env_runners(num_env_runners=2)
    config.fault_tolerance(restart_failed_env_runners=True)
    return sync_env_runners(config, scheme, timeout=30.0)


@pytest.fixture(params=["shm", "dist", "increments::shm"])
def ppo(request: pytest.FixtureRequest) -> Iterator[Any]:
    config = PPOConfig().training(train_batch_size=200, minibatch_size=100, num_epochs=1)
    algorithm = _configured(config, request.param).build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()


def _of_runner(runner: Any) -> tuple[int, dict[str, Any]]:
    """Return the version with which a runner samples, and its weights."""
    runner.receive_weights()
    return runner.weights_version, {n: t.numpy() for n, t in runner.module.state_dict().items()}


def _of_learner(learner: Any) -> dict[str, torch.Tensor]:
    states = learner.module["default_policy"].unwrapped().state_dict()
    return {name: tensor.clone() for name, tensor in states.items()}


def _check_runners(algorithm: Any, version: int) -> int:
    """Check that runners have a version of the learner's weights, and return how many they are."""
    held = algorithm.env_runner_group.foreach_env_runner(_of_runner)
    (learned,) = [each.get() for each in algorithm.learner_group.foreach_learner(_of_learner)]
    for found, weights in held:
        assert found == version
        assert weights
        for name, array in weights.items():
            np.testing.assert_array_equal(array, learned[name].numpy(), err_msg=name)
    return len(held)


def test_runners_sample_with_what_the_learner_has(ppo: Any) -> None:
    assert _check_runners(ppo, 1) == 3
    for version in (2, 3):
        ppo.train()
        assert _check_runners(ppo, version) == 3
    group = ppo.env_runner_group
    (killed, _) = group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
    os.kill(killed, signal.SIGKILL)
    for version in range(4, 40):
        ppo.train()
        if _check_runners(ppo, version) == 3:
            break
    else:
        pytest.fail("the killed runner did not come back")


def test_impala_refreshes_runners_that_sample_meanwhile() -> None:
    config = IMPALAConfig().training(train_batch_size_per_learner=100)
    config.reporting(min_time_s_per_iteration=1)
    algorithm = _configured(config, "shm").build_algo()
    try:
        for _ in range(20):
            algorithm.train()
            versions = algorithm.env_runner_group.foreach_env_runner(
                lambda runner: runner.weights_version, local_env_runner=False
            )
            if len(versions) == 2 and min(versions) > 3:
                break
        else:
            pytest.fail(f"runners have versions {versions}")
    finally:
        algorithm.stop()


def test_a_class_that_cannot_receive_is_refused() -> None:
    class Own(SingleAgentEnvRunner):
        pass

    class Receives(EnvRunnerWeights, SingleAgentEnvRunner):
        pass

    with pytest.raises(OptionError, match=r"type class Own\(EnvRunnerWeights"):
        sync_env_runners(PPOConfig().env_runners(env_runner_cls=Own))
    config = sync_env_runners(PPOConfig().env_runners(env_runner_cls=Receives))
    assert config.env_runner_cls is Receives
