"""Wrong arguments are refused before anything starts, with what to type instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale
from sync_core import ModelError, OptionError, Receiver, Sender, UnknownWorkerError
from sync_plugin_std import from_getter
from sync_plugin_std.workers import ProcessGroup, ThreadGroup

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender("thread", nn.Linear(2, 1), num_workers=2) as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": None}, ValueError, "give num_workers=…, or workers="),
        ({"num_workers": "2"}, TypeError, "num_workers is '2', which is not an integer"),
        ({"num_workers": 1.5}, TypeError, "num_workers is 1.5, which is not an integer"),
        ({"num_workers": "2", "workers": ["a", "b"]}, TypeError, "num_workers is '2', which is no"),
        ({"num_workers": None, "workers": "ab"}, OptionError, "workers is a list"),
        ({"layers": None}, OptionError, "layers is a list"),
        ({"layers": 3}, OptionError, "layers is a list"),
        ({"on_report": "print"}, TypeError, "on_report is 'print', which cannot be called"),
    ],
)
def test_a_sender(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Sender("thread", nn.Linear(2, 1), **{"num_workers": 1, **arguments})


def test_calls_of_a_sender(sender: Sender) -> None:
    nobody: Any = None
    with pytest.raises(UnknownWorkerError, match=r"no worker 2; the workers are \[0, 1\]"):
        sender.address(2)
    with pytest.raises(UnknownWorkerError, match=r"no worker None; the workers are \[0, 1\]"):
        sender.remove_worker(nobody)
    with pytest.raises(TypeError, match="callback is None, which cannot be called"):
        sender.subscribe(nobody)


def test_a_model_that_cannot_be_registered_takes_the_place_of_none(sender: Sender) -> None:
    with pytest.raises(ModelError, match="looked up in a context"):
        sender.register_model("policy")
    sender.send_async().abandon()


def test_a_receiver(sender: Sender) -> None:
    no_function: Any = 3
    with pytest.raises(TypeError, match="on_commit is 3, which cannot be called"):
        Receiver(sender.address(0), on_commit=no_function)
    receiver = Receiver(sender.address(0))
    with pytest.raises(TypeError, match="callback is 3, which cannot be called"):
        receiver.on_arrival(no_function)
    assert not receiver.on_arrival(lambda: None)
    with pytest.raises(TypeError, match="getter is 3, which cannot be called"):
        from_getter(no_function, nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"total_frame": 8}, TypeError, "no argument 'total_frame'; did you mean 'total_frames'"),
        ({"num_collectors": 2}, TypeError, "no argument 'num_collectors'; num_workers=… says how"),
        ({"weight_updater": 3}, TypeError, "no argument 'weight_updater'; scheme='shm' or"),
        ({"collector_class": 3}, TypeError, "'collector_class'; sync=True or .* workers='process'"),
        ({"create_env_kwargs": {}}, TypeError, r"functools\.partial\(make_env, size=3\)"),
        ({"use_env_creator": True}, TypeError, "no argument 'use_env_creator'; leave it out"),
        ({"slots": 8}, TypeError, "no argument 'slots'; options of a scheme.*scheme_options="),
        ({"scheme_options": ["slots"]}, TypeError, r"write it like {'slots': 3}"),
        ({"scheme_options": {3: 4}}, TypeError, "scheme_options has the key 3"),
        ({"scheme_options": {"model_id": "a"}}, OptionError, "has 'model_id'; models are named in"),
        ({"scheme_options": {"timeout": 3.0}}, OptionError, r"Collector\(…, timeout=60\.0\)"),
        ({"scheme_options": {"workers": [3]}}, OptionError, "'workers'; the collector starts its"),
        ({"scheme_options": {"on_failure": "drop"}}, OptionError, "on_worker_failure=…"),
        ({"scheme_options": {"scheme": "mp"}}, OptionError, "the scheme is its own argument"),
        (
            {"scheme": None, "weight_sync_schemes": {"policy": {"scheme": "shm", "timeout": 3.0}}},
            OptionError,
            r"weight_sync_schemes\['policy'\] has 'timeout'; the deadline is the collector's",
        ),
        (
            {"weight_sync_schemes": {"env": {"scheme": "ray", "workers": [3]}}},
            ValueError,
            "'env' is what the collector's own workers have.* 'model_id': 'env'",
        ),
        ({"worker_options": 3}, TypeError, "worker_options is 3, which is not a mapping"),
        ({"worker_options": {"threads": 3}}, OptionError, "no option 'threads'; its options are: "),
        ({"worker_options": {"timeout": 3}}, OptionError, "no option 'timeout'; its options are: "),
        ({"weight_sync_schemes": "shm", "scheme": None}, TypeError, r"like {'policy': 'shm'}"),
        ({"weight_sync_schemes": {3: "shm"}, "scheme": None}, TypeError, "has the key 3"),
        ({"models": [Scale()]}, TypeError, "models is .*, which is not a mapping"),
        ({"weight_recv_schemes": 3}, TypeError, r"like {'policy': sender.address\(0\)}"),
        ({"collector_kwargs": 3}, TypeError, "collector_kwargs is 3, which is not a mapping"),
        ({"postproc": 3}, TypeError, "postproc is 3, which cannot be called"),
        ({"device": "cud"}, ValueError, "'cud' is not a device; write it like 'cpu'"),
    ],
)
def test_a_collector(arguments: Any, error: type[Exception], message: str) -> None:
    arguments = {"scheme": "thread", "workers": "thread", "frames_per_batch": 4, **arguments}
    with pytest.raises(error, match=message):
        Collector(CountingEnv, Scale(), **arguments)


class Slow(ThreadGroup):
    """A worker group whose author has made no argument one for keywords alone."""

    def __init__(
        self, factory: Any, num_workers: int, timeout: float = 60.0, pace: float = 0.0
    ) -> None:
        super().__init__(factory, num_workers, timeout=timeout)
        self.pace = pace


def test_options_of_any_worker_group() -> None:
    def collect(**options: Any) -> Collector:
        return Collector(
            CountingEnv,
            Scale(),
            scheme="thread",
            workers=Slow,
            worker_options=options,
            frames_per_batch=4,
        )

    collect(pace=0.5).shutdown()
    with pytest.raises(OptionError, match=r"Slow has no option 'peace'; its options are: pace$"):
        collect(peace=0.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.update_policy_weights_(Scale(), model_id=["a"]), KeyError, "no model"),
        (lambda c: c.update_policy_weights_(weights_dict=["policy"]), TypeError, "not a mapping"),
        (lambda c: c.update_policy_weights_(weights_dict="policy"), TypeError, "not a mapping"),
        (lambda c: c.register_scheme_receiver(None), TypeError, "addresses is None"),
        (
            lambda c: c.set_seed("x"),
            TypeError,
            "seed is 'x', which is not an integer; give one such",
        ),
        (lambda c: c.set_seed(1.5), TypeError, "seed is 1.5, which is not an integer"),
        (
            lambda c: c.cascade_execute(3),
            TypeError,
            'path is 3, which is not a .* like "env.reset"',
        ),
        (lambda c: c.load_state_dict(None), ValueError, "not a state of a collector"),
    ],
)
def test_calls_of_a_collector(
    call: Callable[[Collector], object], error: type[Exception], message: str
) -> None:
    with (
        Collector(CountingEnv, Scale(), scheme="thread", frames_per_batch=4) as made,
        pytest.raises(error, match=message),
    ):
        call(made)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": "2"}, TypeError, "num_workers is '2', which is not an integer"),
        ({"num_workers": None}, TypeError, "num_workers is None, which is not an integer"),
        ({"timeout": "x"}, OptionError, "timeout is a number of seconds, not 'x'"),
    ],
)
def test_a_worker_group(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ThreadGroup(lambda worker_id: worker_id, **{"num_workers": 1, **arguments})


@pytest.mark.parametrize("threads", ["x", 0])
def test_the_threads_of_worker_processes(threads: Any) -> None:
    with pytest.raises(ValueError, match=r"torch_threads is .*; give 1 or more"):
        ProcessGroup(lambda worker_id: worker_id, 1, torch_threads=threads)


class NeverStarted(ThreadGroup):
    """A worker group that no test may start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a worker was started")


def test_a_policy_without_arguments_is_refused_before_workers_start() -> None:
    options: dict[str, Any] = {
        "scheme": "thread",
        "workers": NeverStarted,
        "frames_per_batch": 4,
    }
    with pytest.raises(TypeError, match="the policy function takes nothing; let it take obs"):
        Collector(CountingEnv, lambda: torch.zeros(1), **options)
    with pytest.raises(AssertionError, match="a worker was started"):
        Collector(CountingEnv, lambda: torch.zeros(1), trust_policy=True, **options)
