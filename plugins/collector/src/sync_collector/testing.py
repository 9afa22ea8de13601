"""Conformance of collectors over worker groups: `CollectorConformance`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.episodes import PER_WORKER
from sync_core import ClosedError, ModelError, PendingSend, RemoteCallError, SendReport, WorkerGroup
from sync_plugin_std.workers import choose_group
from sync_testing import Conformance

__all__ = ["CollectorConformance", "FrameList", "Scale", "long_episodes", "values"]


class Scale(nn.Module):
    """A policy that returns its weight as the action.

    Args:
        weight: the initial weight.
    """

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, observation: Tensor) -> Tensor:
        return self.weight.expand(observation.shape)

    def set(self, weight: float) -> None:
        self.weight.data.fill_(weight)


class Failing(CountingEnv):
    """An environment that raises in its fourth step."""

    def __init__(self) -> None:
        super().__init__(100)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        if self._steps.item() == 3:
            raise ValueError("the pole broke")
        return super().step(tensordict)


class Interrupting(CountingEnv):
    """An environment that sends Ctrl-C to a process when it is closed.

    Args:
        process: the id of the process.
    """

    def __init__(self, process: int) -> None:
        super().__init__(100)
        self._process = process

    def close(self) -> None:
        super().close()
        os.kill(self._process, signal.SIGINT)


class FrameList:
    """A replay buffer that keeps everything in a list."""

    def __init__(self) -> None:
        self.batches: list[TensorDictBase] = []

    def extend(self, batch: TensorDictBase) -> None:
        self.batches.append(batch)

    def frames(self) -> int:
        return sum(batch.numel() for batch in self.batches)


def long_episodes() -> CountingEnv:
    """Return an environment whose observation is the number of frames made."""
    return CountingEnv(100_000)


def values(batch: TensorDictBase, *key: str) -> list[Any]:
    """Return the values under a key, without their trailing dimension."""
    return list(batch[key].squeeze(-1).tolist())


class CollectorConformance(Conformance):
    """Conformance tests of a collector: inherit, and name a worker group and a scheme for it.

    Example:
        >>> class TestMyGroup(CollectorConformance):  # doctest: +SKIP
        ...     workers = "my-group"
        ...     scheme = "shm"
    """

    scheme: ClassVar[str]
    workers: ClassVar[str | type[WorkerGroup]]
    worker_options: ClassVar[dict[str, Any]] = {}

    def collector(self, env: Any = long_episodes, policy: Any = None, **options: Any) -> Collector:
        options = {"num_workers": 2, "frames_per_batch": 4, "timeout": 60.0, **options}
        return Collector(
            env,
            policy,
            scheme=self.scheme,
            workers=self.workers,
            worker_options=self.worker_options,
            **options,
        )

    @property
    def works_ahead(self) -> bool:
        """Return whether workers make batches while the trainer learns."""
        group: type[WorkerGroup] = choose_group([], self.workers)
        return "parallel" in group.capabilities

    def test_synchronous(self) -> None:
        policy = Scale(5.0)
        options: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 20, "sync": True}
        with self.collector(
            [lambda: CountingEnv(2), long_episodes], policy, **options
        ) as collector:
            assert collector.worker_ids == (0, 1)
            # The workers act with copies, which only an update changes.
            policy.set(0.0)
            with pytest.warns(UserWarning, match="the policy has changed"):
                batch = next(collector)
            assert batch.batch_size == torch.Size([2, 3])
            assert batch.names == [None, "time"]
            assert values(batch, "action") == [[5.0] * 3] * 2
            assert values(batch, "observation") == [[0, 1, 0], [0, 1, 2]]
            assert values(batch, "next", "observation") == [[1, 2, 1], [1, 2, 3]]
            ids = batch["collector", "traj_ids"]
            assert ids.tolist() == [[0, 0, 1], [PER_WORKER] * 3]
            assert not batch["policy_version"].any()

            policy.set(1.0)
            report = collector.update_policy_weights_()
            assert isinstance(report, SendReport)
            assert report.updated == (0, 1)
            batch = next(collector)
            assert values(batch, "action") == [[1.0] * 3] * 2
            assert batch["policy_version"].tolist() == [[1] * 3] * 2
            assert batch["next", "policy_version"].tolist() == [[1] * 3] * 2
            assert batch["policy_version"].dtype == torch.int64

            policy.set(2.0)
            assert collector.update_policy_weights_(worker_ids=1).updated == (1,)
            batch = next(collector)
            assert values(batch, "action") == [[1.0] * 3, [2.0] * 3]
            assert batch["policy_version"].tolist() == [[1] * 3, [2] * 3]
            stats = collector.stats()
            assert (stats.frames, stats.batches, stats.version, stats.lag) == (18, 3, 2, 1)
            assert 0 < stats.sync_seconds < 30

            assert collector.update_policy_weights_({"weight": torch.tensor([7.0])}).updated == (
                0,
                1,
            )
            policy.set(3.0)
            pending = collector.update_policy_weights_(blocking=False)
            assert isinstance(pending, PendingSend)
            policy.set(9.0)
            assert pending.wait().updated == (0, 1)
            assert values(next(collector), "action") == [[3.0] * 3] * 2
            assert collector.next() is None
            assert list(collector) == []
            with pytest.raises(ClosedError):
                collector.update_policy_weights_()

    def test_first_ready(self) -> None:
        policy = Scale()
        seen: dict[int, list[float]] = {}
        versions: dict[int, list[int]] = {}
        frames = 0
        with self.collector(long_episodes, policy, total_frames=38) as collector:
            # A worker gets the seed that the one before it returned.
            assert collector.set_seed(1000) == 1002
            while frames < 38:
                # Leaving a loop and starting another neither loses nor repeats frames.
                for batch in collector:
                    assert batch.batch_size == torch.Size([4])
                    assert batch.names == ["time"]
                    frames += 4
                    worker = batch["collector", "traj_ids"].unique().item() // PER_WORKER
                    seen.setdefault(int(worker), []).extend(values(batch, "observation"))
                    version = batch["policy_version"].tolist()
                    assert values(batch, "action") == version
                    versions.setdefault(int(worker), []).extend(version)
                    policy.set(collector.stats().version + 1)
                    collector.update_policy_weights_()
                    if frames % 12 == 0:
                        break
            assert collector.next() is None
        assert sum(map(len, seen.values())) == frames == 40
        for worker, observations in seen.items():
            start = 1000 + worker
            assert observations == list(range(start, start + len(observations)))
            assert versions[worker] == sorted(versions[worker])
        assert max(map(max, versions.values())) >= (1 if self.works_ahead else 9)

    def test_refreshed_by_itself(self) -> None:
        for sync in (True, False):
            policy = Scale()
            least: dict[int, float] = {}
            with self.collector(
                policy=policy, sync=sync, update_after_each_batch=True
            ) as collector:
                for step in range(1, 7):
                    batch = next(collector)
                    for part in batch.unbind(0) if sync else [batch]:
                        worker = int(part["collector", "traj_ids"][0].item()) // PER_WORKER
                        (acted,) = part["action"].unique().tolist()
                        # No worker begins a batch with weights older than the last ones sent to it.
                        assert acted >= least.get(worker, 0.0)
                        assert sync is False or acted == step - 1
                        least[worker] = float(step)
                    policy.set(float(step))

    def test_policy_factory(self) -> None:
        options: dict[str, Any] = {
            "policy_factory": [lambda: Scale(1.0), lambda: Scale(2.0)],
            "sync": True,
        }
        with self.collector(long_episodes, **options) as collector:
            assert collector.sender is None
            assert values(next(collector), "action") == [[1.0] * 2, [2.0] * 2]
            with pytest.raises(ModelError, match="type update_policy_weights_"):
                collector.update_policy_weights_()
            weights = TensorDict({"weight": torch.tensor([3.0])}, batch_size=[])
            assert collector.update_policy_weights_(weights=weights).updated == (0, 1)
            batch = next(collector)
            assert values(batch, "action") == [[3.0] * 2] * 2
            assert batch["policy_version"].unique().tolist() == [1]
            collector.update_policy_weights_(policy=Scale(4.0))
            assert values(next(collector), "action") == [[4.0] * 2] * 2

    def test_a_raising_environment(self) -> None:
        with self.collector(Failing, num_workers=1) as collector:
            with pytest.raises(RemoteCallError, match=r"(?s)worker 0: .*in step.*the pole broke"):
                list(collector)
            assert list(collector) == []

    def test_ctrl_c_while_workers_end_leaves_the_last_batch(self) -> None:
        driver = os.getpid()
        frames = 0
        with self.collector(
            lambda: Interrupting(driver), num_workers=1, total_frames=4
        ) as collector:
            while frames < 4:
                try:
                    frames += next(collector).numel()
                except KeyboardInterrupt:
                    assert collector.stats().frames == 0
            assert collector.stats().frames == 4
            assert collector.next() is None

    def test_an_environment_that_cannot_be_made(self) -> None:
        def broken() -> CountingEnv:
            raise ValueError("no pole")

        with pytest.raises(RemoteCallError, match="no pole"):
            self.collector(broken, num_workers=1)

    def test_a_policy_that_does_not_fit(self) -> None:
        def other_names(first: Tensor, second: Tensor) -> Tensor:
            return first + second

        with pytest.raises(TypeError, match=r"worker 0: the policy function takes 'first', 'sec"):
            self.collector(CountingEnv, other_names, num_workers=1)

        def three_outputs(observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return observation, observation, observation

        with self.collector(CountingEnv, three_outputs, num_workers=1) as collector:
            with pytest.raises(TypeError, match=r"the policy returned a tuple, .* several outputs"):
                next(collector)
            assert list(collector) == []

    def test_in_the_background(self) -> None:
        buffer = FrameList()
        with self.collector(long_episodes, Scale(), num_workers=1, replay_buffer=buffer) as made:
            assert next(made) is None
            made.start()
            for version in (1, 2):
                made.update_policy_weights_()
                frames = buffer.frames()
                while buffer.frames() < frames + 12:
                    time.sleep(0.002)
                with made.pause():
                    assert made.stats().frames == buffer.frames()
                    assert buffer.batches[-1]["policy_version"].tolist() == [version] * 4
        seen = [value for batch in buffer.batches for value in values(batch, "observation")]
        assert seen == list(range(len(seen)))
