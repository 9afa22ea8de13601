"""A collector's batches: rows for trajectories, and replay buffers."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from sync_collector import BatchOptions, Collector
from sync_collector.envs import CountingEnv
from sync_collector.episodes import split_trajectories
from sync_core import ClosedError, RemoteCallError, WorkerTimeoutError
from sync_testing import interrupted

pytestmark = pytest.mark.timeout(60)


class Buffer:
    """Keeps batches in a list; slow, or broken, if asked to."""

    def __init__(self, *, seconds: float = 0.0, fails_after: int | None = None) -> None:
        self.batches: list[TensorDictBase] = []
        self._seconds = seconds
        self._fails_after = fails_after

    def extend(self, batch: TensorDictBase) -> None:
        time.sleep(self._seconds)
        if len(self.batches) == self._fails_after:
            raise ValueError("the disk is full")
        self.batches.append(batch)

    def frames(self) -> int:
        return sum(batch.numel() for batch in list(self.batches))

    def by_worker(self) -> dict[int, list[float]]:
        """Return what each worker has observed, in the order in which it came."""
        seen: dict[int, list[float]] = {}
        for batch in self.batches:
            worker = int(batch["collector", "traj_ids"][0]) >> 32
            seen.setdefault(worker, []).extend(batch["observation"].flatten().tolist())
        return seen


class Scale(nn.Module):
    """Acts with its weight, whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(observation.shape)


def long_episodes() -> CountingEnv:
    return CountingEnv(1_000_000)


def collector(env: Any = long_episodes, **options: Any) -> Collector:
    options = {"scheme": "thread", "num_workers": 2, "frames_per_batch": 4, **options}
    return Collector(env, options.pop("policy", Scale()), timeout=20.0, **options)


def wait_for(buffer: Buffer, frames: int) -> None:
    while buffer.frames() < frames:
        time.sleep(0.002)


def collecting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sync-core-collect"]


@pytest.fixture(params=[False, True], ids=["driver", "workers"])
def writers(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"batch": BatchOptions(extend_in_workers=request.param)}


def test_each_trajectory_in_a_row() -> None:
    frames = {
        "x": torch.arange(12.0).reshape(2, 3, 2),
        "collector": {"traj_ids": torch.tensor([[7, 7, 8], [3, 3, 3]])},
        "next": {"done": torch.ones(2, 3, 1, dtype=torch.bool)},
    }
    batch = TensorDict(frames, batch_size=[2, 3])
    batch.names = [None, "time"]
    rows = split_trajectories(batch)
    assert rows.batch_size == torch.Size([3, 3])
    assert rows.names == [None, None]
    assert rows["collector", "mask"].sum(1).tolist() == [2, 1, 3]
    assert rows["collector", "traj_ids"].tolist() == [[7, 7, 0], [8, 0, 0], [3, 3, 3]]
    assert rows["x"][1].tolist() == [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows["next", "done"].squeeze(-1).tolist() == rows["collector", "mask"].tolist()
    assert torch.equal(rows["x"][rows["collector", "mask"]], frames["x"].reshape(6, 2))  # type: ignore[attr-defined]


def test_trajectories_are_split_before_postproc() -> None:
    seen: list[torch.Size] = []

    def postproc(batch: TensorDictBase) -> torch.Tensor:
        seen.append(batch.batch_size)
        sums: torch.Tensor = batch["observation"].squeeze(-1).sum(1)
        return sums

    options: dict[str, Any] = {"split_trajs": True, "postproc": postproc, "sync": True}
    envs = [lambda: CountingEnv(2), long_episodes]
    with collector(envs, frames_per_batch=6, total_frames=12, **options) as made:
        assert next(made).tolist() == [1.0, 0.0, 3.0]
        assert next(made).tolist() == [1.0, 1.0, 12.0]
        # Frames count as they were made, without the padding.
        assert made.stats().frames == 12
        assert made.next() is None
    assert seen == [torch.Size([3, 3])] * 2


@pytest.mark.parametrize("sync", [False, True])
def test_a_replay_buffer_takes_what_each_worker_makes(sync: bool, writers: dict[str, Any]) -> None:
    buffer = Buffer()
    frames_per_batch = 8 if sync else 4
    with collector(
        replay_buffer=buffer,
        frames_per_batch=frames_per_batch,
        total_frames=32,
        sync=sync,
        **writers,
    ) as made:
        assert list(made) == [None] * (32 // frames_per_batch)
        assert made.stats().frames == 32
        assert made.stats().lag == 0
    assert buffer.frames() == 32
    for batch in buffer.batches:
        assert batch.batch_size == torch.Size([4])
        assert batch.names == ["time"]
        assert {"observation", "next", "collector", "policy_version"} <= set(batch.keys())
    for seen in buffer.by_worker().values():
        assert seen == [float(i) for i in range(len(seen))]


def test_trajectories_in_a_replay_buffer(writers: dict[str, Any]) -> None:
    buffer = Buffer()
    env = lambda: CountingEnv(3)  # noqa: E731
    with collector(env, replay_buffer=buffer, total_frames=8, split_trajs=True, **writers) as made:
        assert list(made) == [None] * 2
    assert [batch.batch_size for batch in buffer.batches] == [torch.Size([2, 3])] * 2


@pytest.mark.parametrize("sync", [False, True])
def test_in_the_background(sync: bool, writers: dict[str, Any]) -> None:
    buffer = Buffer(seconds=0.002)
    policy = Scale()
    with collector(policy=policy, replay_buffer=buffer, sync=sync, **writers) as made:
        with made.pause():
            assert not buffer.batches
        made.start()
        made.start()
        wait_for(buffer, 40)
        assert len(collecting()) == 1
        with pytest.raises(RuntimeError, match=r"iterate within `with collector\.pause\(\):`"):
            next(made)
        for _ in range(3):
            made.update_policy_weights_()
            with made.pause(), made.pause(timeout=1.0):
                frames = buffer.frames()
                # Nothing is lost or under way: all that was counted is here, and stays all.
                assert made.stats().frames == frames
                time.sleep(0.02)
                assert buffer.frames() == frames
            wait_for(buffer, frames + 20)
        with made.pause():
            assert next(made) is None
        assert buffer.batches[-1]["policy_version"].tolist()[0] == 3
        with made.pause():
            frames = made.stats().frames
    assert not collecting()
    for seen in buffer.by_worker().values():
        assert seen == [float(i) for i in range(len(seen))]
    assert sum(map(len, buffer.by_worker().values())) >= frames


def test_the_background_rests_until_all_have_left_their_pauses() -> None:
    def pause() -> None:
        with made.pause():
            paused.set()
            assert left.wait(10)
            frames = buffer.frames()
            time.sleep(0.05)
            assert buffer.frames() == frames

    buffer, paused, left = Buffer(), threading.Event(), threading.Event()
    with collector(replay_buffer=buffer) as made, ThreadPoolExecutor(1) as pool:
        made.start()
        with made.pause():
            other = pool.submit(pause)
            assert paused.wait(10)
        left.set()
        other.result(10)
        wait_for(buffer, buffer.frames() + 20)


def test_the_background_comes_to_rest_at_the_end() -> None:
    buffer = Buffer()
    with collector(replay_buffer=buffer, total_frames=40) as made:
        made.start()
        wait_for(buffer, 40)
        # The workers are still there.
        assert made.update_policy_weights_().updated == (0, 1)
        with made.pause():
            assert buffer.frames() == made.stats().frames == 40
        assert list(made) == []


def test_a_worker_that_fails_in_the_background(writers: dict[str, Any]) -> None:
    class Failing(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if self._steps.item() == 3:
                raise ValueError("the pole broke")
            return super().step(tensordict)

    with collector(Failing, replay_buffer=Buffer(), num_workers=1, **writers) as made:
        made.start()
        while collecting():
            time.sleep(0.005)
        with pytest.raises(RemoteCallError, match="the pole broke"):
            made.stats()
        with pytest.raises(ClosedError):
            made.start()


@pytest.mark.parametrize("shut_down", [Collector.shutdown, Collector.update_policy_weights_])
def test_a_buffer_that_fails_in_the_background(shut_down: Any) -> None:
    buffer = Buffer(fails_after=2)
    with collector(replay_buffer=buffer) as made:
        made.start()
        while collecting():
            time.sleep(0.005)
        with pytest.raises(ValueError, match="the disk is full"):
            shut_down(made)
        made.shutdown()


class Moody(Buffer):
    """Raises once, instead of taking its third batch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error: type[BaseException] | None = error

    def extend(self, batch: TensorDictBase) -> None:
        if self._error is not None and len(self.batches) == 2:
            error, self._error = self._error, None
            raise error("not now")
        super().extend(batch)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_a_buffer_raised_at_is_given_to_it_again(
    sync: bool, error: type[BaseException]
) -> None:
    buffer = Moody(error)
    with collector(replay_buffer=buffer, sync=sync, total_frames=40) as made:
        with pytest.raises(error):
            list(made)
        assert made.stats().frames == (4 if sync else 8)
        assert list(made)
        assert made.stats().frames == buffer.frames() == 40
    for seen in buffer.by_worker().values():
        assert seen == [float(i) for i in range(len(seen))]


class AllOrNothing(CountingEnv):
    """Takes a step back that was interrupted."""

    def __init__(self) -> None:
        super().__init__(1_000_000)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        before = self._steps.clone()
        try:
            return super().step(tensordict)
        except KeyboardInterrupt:
            self._steps = before
            raise


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_ctrl_c_at_any_moment_loses_no_frame(workers: str, sync: bool) -> None:
    options: dict[str, Any] = {"workers": workers, "num_workers": 1, "sync": sync}
    options |= {"postproc": lambda batch: batch["observation"].flatten().tolist()}
    seen: list[float] = []
    with collector(AllOrNothing, frames_per_batch=2, **options) as made:
        for moment in itertools.count(step=3):
            with interrupted(moment) as moments:
                seen += next(made)
            assert made.stats().frames == len(seen)
            seen += next(made)
            assert seen == list(range(len(seen)))
            if not moments.came:
                break


@pytest.mark.parametrize("sync", [False, True])
def test_ctrl_c_at_any_moment_of_the_last_batch(sync: bool) -> None:
    options: dict[str, Any] = {"total_frames": 2, "frames_per_batch": 2, "sync": sync}
    for moment in itertools.count(step=9):
        with collector(workers="thread", num_workers=1, **options) as made:
            batches: list[TensorDictBase] = []
            with interrupted(moment) as moments:
                batches.append(next(made))
            batches += made
            assert sum(batch.numel() for batch in batches) == made.stats().frames == 2
        if not moments.came:
            break


def test_a_batch_is_saved_as_it_was_about_to_be_handed_over() -> None:
    def double(batch: TensorDictBase) -> TensorDictBase:
        batch["observation"] *= 2
        return batch

    options: dict[str, Any] = {"num_workers": 1, "postproc": double, "total_frames": 4}
    with collector(**options) as made:
        with mock.patch.object(made._pool, "dismiss", side_effect=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                next(made)
            state = made.state_dict()
        assert next(made)["observation"].flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
    with collector(**options) as made:
        made.load_state_dict(state)
        assert next(made)["observation"].flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
        assert made.next() is None


def test_an_iterator_that_has_ended_is_not_the_end_of_the_collector() -> None:
    with (
        collector(postproc=lambda batch: (batch, next(iter(())))) as made,
        pytest.raises(RuntimeError, match="postproc raised StopIteration") as raised,
    ):
        list(made)
    assert isinstance(raised.value.__cause__, StopIteration)
    with collector(replay_buffer=Moody(StopIteration)) as made:
        made.start()
        while collecting():
            time.sleep(0.005)
        with pytest.raises(RuntimeError, match="the replay buffer raised StopIteration"):
            made.stats()


def test_what_was_not_handed_on_is_saved_and_dropped_with_the_rest() -> None:
    buffer = Moody(OSError)
    with collector(replay_buffer=buffer, num_workers=1) as made:
        with pytest.raises(OSError, match="not now"):
            list(made)
        state = made.state_dict()
        made.set_seed(0)
        next(made)
        assert buffer.by_worker()[0][-4:] == [0.0, 1.0, 2.0, 3.0]
        made.load_state_dict(state)
        next(made)
        next(made)
        assert buffer.by_worker()[0][-8:] == [float(i) for i in range(8, 16)]


def test_what_postproc_raised_at_is_given_to_it_again() -> None:
    moods = [True, False, True]

    def postproc(batch: TensorDictBase) -> list[float]:
        if not moods.pop(0):
            raise OSError("not now")
        observations: list[float] = batch["observation"].flatten().tolist()
        return observations

    with collector(postproc=postproc, num_workers=1) as made:
        assert next(made) == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(OSError, match="not now"):
            next(made)
        assert next(made) == [4.0, 5.0, 6.0, 7.0]


def test_what_postproc_takes_out_of_a_batch_is_counted_and_given_to_it_again() -> None:
    moods = [True, False, True]

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        batch.pop("policy_version")
        batch.pop("next")
        if not moods.pop(0):
            raise OSError("not now")
        return batch

    options: dict[str, Any] = {"batch": BatchOptions(postproc=postproc, episode_stats=True)}
    with collector(lambda: CountingEnv(4), policy=Scale(), num_workers=1, **options) as made:
        assert next(made).get("next", None) is None
        with pytest.raises(OSError, match="not now"):
            next(made)
        next(made)
        assert made.stats().episodes == 2
        assert made.stats().episode_length == 4


def test_the_background_goes_on_after_a_pause_that_was_too_short() -> None:
    buffer = Buffer(seconds=0.2)
    with collector(replay_buffer=buffer, num_workers=1) as made:
        made.start()
        for _ in range(2):
            with pytest.raises(TimeoutError), made.pause(timeout=0.01):
                pass
            wait_for(buffer, buffer.frames() + 8)
        with pytest.raises(TimeoutError), made.pause(timeout=0.01):
            pass
        made.start()
        wait_for(buffer, buffer.frames() + 8)


def test_the_background_waits_for_a_batch_that_is_late() -> None:
    class Late(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if self._steps.item() == 6:
                time.sleep(1.0)
            return super().step(tensordict)

    buffer = Buffer()
    with Collector(
        lambda: Late(1_000_000),
        Scale(),
        scheme="thread",
        workers="thread",
        frames_per_batch=4,
        replay_buffer=buffer,
        timeout=0.3,
    ) as made:
        made.start()
        wait_for(buffer, 12)
        with pytest.raises(WorkerTimeoutError, match="as a collector in the background does"):
            made.stats()
        wait_for(buffer, buffer.frames() + 8)
        assert buffer.by_worker()[0] == [float(i) for i in range(buffer.frames())]


def test_the_background_does_not_read_the_policy_by_itself() -> None:
    # The trainer may be in the middle of a step.
    with collector(replay_buffer=Buffer(), update_after_each_batch=True) as made:
        with pytest.raises(RuntimeError, match=r"type update_policy_weights_\(\) after each step"):
            made.start()
        assert not collecting()


def test_shutting_down_does_not_wait_for_a_buffer_that_hangs() -> None:
    extends, may_end = threading.Event(), threading.Event()

    class Hanging(Buffer):
        def extend(self, batch: Any) -> None:
            extends.set()
            assert may_end.wait(30)
            super().extend(batch)

    made = collector(replay_buffer=Hanging(), num_workers=1)
    made.start()
    assert extends.wait(30)
    with pytest.raises(TimeoutError, match=r"type pause\(timeout=…\)"), made.pause(timeout=0.1):
        pass
    made.shutdown(timeout=0.2)
    (thread,) = collecting()
    may_end.set()
    thread.join()


def test_a_collector_that_nobody_holds_ends_with_its_thread() -> None:
    made = collector(replay_buffer=Buffer())
    made.start()
    (thread,) = collecting()
    del made
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_with_workers_inline() -> None:
    buffer = Buffer()
    with collector(replay_buffer=buffer, workers="inline", scheme="thread") as made:
        made.start()
        for _ in range(20):
            made.update_policy_weights_()
        wait_for(buffer, 40)
        with made.pause():
            assert made.stats().frames == buffer.frames()
    for seen in buffer.by_worker().values():
        assert seen == [float(i) for i in range(len(seen))]


def test_what_is_missing_is_said_at_once() -> None:
    with collector() as made, pytest.raises(RuntimeError, match="replay_buffer=…"):
        made.start()
    with pytest.raises(ValueError, match="extend_in_workers needs the replay_buffer"):
        collector(batch=BatchOptions(extend_in_workers=True))
    with pytest.raises(TypeError, match=r"a set without extend\(\)"):
        collector(replay_buffer=set())
