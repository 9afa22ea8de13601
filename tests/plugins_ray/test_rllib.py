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
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.tune.registry import register_env

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


def _of_runner(runner: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the version with which a runner samples, and the weights of its modules."""
    runner.receive_weights()
    several = isinstance(runner, MultiAgentEnvRunner)
    modules = dict(runner.module.items()) if several else {"default_policy": runner.module}
    return runner.weights_version, {
        module_id: {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        for module_id, module in modules.items()
    }


def _of_learner(learner: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        module_id: {n: t.clone() for n, t in module.unwrapped().state_dict().items()}
        for module_id, module in learner.module.items()
    }


def _check_runners(algorithm: Any, version: int, *module_ids: str) -> int:
    """Check that runners have a version of the learner's weights, and return how many they are."""
    held = algorithm.env_runner_group.foreach_env_runner(_of_runner)
    (learned,) = [each.get() for each in algorithm.learner_group.foreach_learner(_of_learner)]
    for found, modules in held:
        assert (found, set(modules)) == (version, {*(module_ids or ["default_policy"])})
        for module_id, weights in modules.items():
            assert weights
            for name, array in weights.items():
                np.testing.assert_array_equal(array, learned[module_id][name].numpy(), name)
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


def _for(agent_id: Any, *_: Any, **__: Any) -> str:
    return f"p{agent_id}"


def _for_others(agent_id: Any, *_: Any, **__: Any) -> str:
    return f"p{2 * agent_id}"


@pytest.mark.timeout(480)
def test_modules_come_and_go() -> None:
    environment: Any = MultiAgentCartPole
    register_env("agents", lambda _: environment(config={"num_agents": 2}))
    alone = environment(config={"num_agents": 1})
    spaces: dict[str, Any] = {
        "observation_space": alone.observation_spaces[0],
        "action_space": alone.action_spaces[0],
    }
    config = PPOConfig().training(train_batch_size=200, minibatch_size=100, num_epochs=1)
    config.environment("agents").env_runners(num_env_runners=1)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=_for)
    config.rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={
                "p0": RLModuleSpec(),
                "p1": RLModuleSpec(),
                # Runners have none of it.
                "learned": RLModuleSpec(DefaultPPOTorchRLModule, **spaces, learner_only=True),
            }
        )
    )
    algorithm = sync_env_runners(config, "shm", timeout=30.0).build_algo()
    try:
        assert _check_runners(algorithm, 1, "p0", "p1") == 2
        first = algorithm.get_module("p0")
        assert first is not None
        spec = RLModuleSpec.from_module(first)
        algorithm.add_module("p2", spec, new_agent_to_module_mapping_fn=_for_others)
        assert _check_runners(algorithm, 2, "p0", "p1", "p2") == 2
        algorithm.train()
        assert _check_runners(algorithm, 3, "p0", "p1", "p2") == 2
        algorithm.remove_module("p2", new_agent_to_module_mapping_fn=_for)
        assert _check_runners(algorithm, 4, "p0", "p1") == 2
        algorithm.train()
        assert _check_runners(algorithm, 5, "p0", "p1") == 2
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
