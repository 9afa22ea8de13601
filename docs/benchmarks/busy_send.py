"""Measures updates of workers that step an environment, compared to TorchRL's and to pipes.

    python docs/benchmarks/busy_send.py | python docs/benchmarks/page.py --record busy

Each worker acts once with its policy and then steps an environment in Python, 0.2 ms of processor
time together, and looks for a new version after that; it never waits. ``floor`` looks for a byte
and answers with one, the least work for a worker that looks between its steps. ``by hand``: the
worker receives a pickled state_dict from a `multiprocessing` pipe and loads it. TorchRL's workers
do not look: a thread in each of them writes the weights, or is notified that they were written.

Only the workers of the measured way run; the others sleep. Prints medians and 95th percentiles in
milliseconds from the call of `send` until the last worker has answered, the trainer's processor
time of an update, and one worker's: the time outside of its steps, including its looks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
import torchrl_send
from tensordict import TensorDict

from sync_core import Receiver, Sender
from sync_tools.bench import is_marked, make_model, mark

_WORK_SECONDS = 2e-4
_TRAINER_SECONDS = 0.005
_THEIRS = "TorchRL (shared)"

Look = Callable[[], object]


@dataclass(kw_only=True)
class Way:
    """One way to send, and its results.

    Args:
        model: the trainer's model.
        send: sends the model, and returns when all workers have it.
        arguments: the arguments with which each worker connects.
        connect: called when all workers have begun to connect; then each reports again that it is
            ready.
        checks: whether to check that the workers' models have the sent weights.
    """

    model: Any
    send: Callable[[], object]
    arguments: list[Any]
    connect: Callable[[], object] | None = None
    checks: bool = True
    version: int = 0
    seconds: list[float] = field(default_factory=list)
    trainer: list[float] = field(default_factory=list)
    worker: list[float] = field(default_factory=list)

    def measure(self, name: str, pipes: list[Any], rounds: int, warm_up: int) -> None:
        """Let the workers step, and send meanwhile."""
        _ask(pipes, name)
        for number in range(-warm_up, rounds):
            if number == 0:
                before = _ask(pipes, _USED)
            self.version += 1
            mark(self.model, self.version)
            time.sleep(_TRAINER_SECONDS)
            used, began = time.process_time(), time.perf_counter()
            self.send()
            ended = time.perf_counter()
            if number >= 0:
                self.seconds.append(ended - began)
                self.trainer.append(time.process_time() - used)
            if self.checks and not all(_ask(pipes, self.version)):
                raise RuntimeError(f"a worker has other weights than those of {self.version}")
        after = _ask(pipes, _USED)
        self.worker += [(end - begin) / rounds for begin, end in zip(before, after, strict=True)]
        _ask(pipes, _SLEEP)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--rounds", type=int, default=20, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    # This makes TorchRL's copy faster: on cores that workers use, torch's threads wait for each
    # other.
    torch.set_num_threads(1)
    print("| model | workers | way | ms | 95 % | trainer | worker | of TorchRL |")
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for model in arguments.models:
        for workers in arguments.workers:
            with ExitStack() as stack:
                ways = {
                    name: stack.enter_context(_WAYS[name][0](model, workers))
                    for name in arguments.ways
                }
                pipes = stack.enter_context(_started(model, workers, ways))
                # Alternately, since other programs also use the machine.
                for _ in range(arguments.turns):
                    for name, way in ways.items():
                        way.measure(name, pipes, arguments.rounds, warm_up=5)
            _show(model, workers, ways)


def _show(model: str, workers: int, ways: dict[str, Way]) -> None:
    theirs = median(ways[_THEIRS].seconds) if _THEIRS in ways else 0.0
    for name, way in ways.items():
        late = quantiles(way.seconds, n=20)[-1]
        figures = (median(way.seconds), late, median(way.trainer), median(way.worker))
        cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in figures)
        share = f"{median(way.seconds) / theirs:.2f}" if theirs else ""
        print(f"| {model} | {workers} | {name} | {cells} | {share} |", flush=True)


_USED, _SLEEP = "used", "sleep"


def _ask(pipes: list[Any], question: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(question)
    return [pipe.recv() for pipe in pipes]


@contextmanager
def _started(model: str, workers: int, ways: dict[str, Way]) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for worker_id in range(workers):
            mine, theirs = context.Pipe()
            arguments = {name: way.arguments[worker_id] for name, way in ways.items()}
            process = context.Process(target=_work, args=(model, theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for way in ways.values():
            for pipe in pipes:
                pipe.recv()
            if way.connect is not None:
                way.connect()
                for pipe in pipes:
                    pipe.recv()
        yield pipes
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()


def _work(name: str, pipe: Any, arguments: dict[str, Any]) -> None:
    torchrl_send._prepare_process()
    torch.set_num_threads(1)
    models = {way: make_model(name) for way in arguments}
    looks = {
        way: _WAYS[way][1](models[way], argument, lambda: pipe.send("ready"))
        for way, argument in arguments.items()
    }
    environments = {way: Environment(model) for way, model in models.items()}
    asked = select.poll()
    asked.register(pipe, select.POLLIN)
    way, steps, answering = "", False, 0.0
    try:
        while True:
            if steps:
                environments[way].work()
                looks[way]()
            while not steps or asked.poll(0):
                question, began = pipe.recv(), time.thread_time()
                answer: Any = question
                if question in looks:
                    way, steps = question, True
                elif question == _SLEEP:
                    steps = False
                elif question == _USED:
                    answer = time.process_time() - environments[way].used - answering
                else:
                    answer = is_marked(models[way], question)
                pipe.send(answer)
                answering += time.thread_time() - began
    except EOFError:
        return


class Environment:
    """A cart with a pole, and a policy of two layers.

    Args:
        model: the policy, if it can act.
    """

    def __init__(self, model: Any) -> None:
        acts = isinstance(model, torch.nn.Sequential)
        self._policy = model if acts else make_model("small")
        self._state = [0.0, 0.0, 0.05, 0.0]
        #: The processor time of all steps, in seconds.
        self.used = 0.0

    def work(self) -> None:
        """Act once, and step until 0.2 ms of processor time are used."""
        began = time.thread_time()
        with torch.no_grad():
            force = float(self._policy(torch.tensor(self._state)).argmax()) * 20.0 - 10.0
        place, speed, angle, turn = self._state
        while time.thread_time() - began < _WORK_SECONDS:
            # https://github.com/Farama-Foundation/Gymnasium, cartpole.py, for small angles
            pull = (force + 0.05 * turn * turn * angle) / 1.1
            twist = (9.8 * angle - pull) / (0.5 * (4.0 / 3.0 - 0.1 / 1.1))
            place, speed = place + 0.02 * speed, speed + 0.02 * (pull - 0.05 * twist / 1.1)
            angle, turn = angle + 0.02 * turn, turn + 0.02 * twist
            if abs(angle) > 0.2:
                place, speed, angle, turn = 0.0, 0.0, 0.05, 0.0
        self._state = [place, speed, angle, turn]
        self.used += time.thread_time() - began


def _ours(scheme: str, *, zero_copy: bool = False) -> Callable[..., Any]:
    @contextmanager
    def way(name: str, workers: int) -> Iterator[Way]:
        model = make_model(name)
        mark(model, 0)
        with Sender(scheme, model, num_workers=workers, zero_copy=zero_copy) as sender:
            addresses = [sender.address(worker_id) for worker_id in range(workers)]
            yield Way(model=model, send=sender.send, arguments=addresses)

    return way


def _receiver(model: Any, address: Any, ready: Callable[[], None]) -> Look:
    receiver = Receiver(address, model)
    ready()
    return lambda: receiver.receive(0)


@contextmanager
def _torchrl(name: str, workers: int) -> Iterator[Way]:
    torchrl_send._prepare_process()
    context = multiprocessing.get_context("spawn")
    model = make_model(name)
    mark(model, 0)
    scheme = torchrl_send._scheme_on_sender("shared", model, workers, context)
    weights = TensorDict.from_module(model).data
    try:
        yield Way(
            model=model,
            send=lambda: scheme.send(weights),
            arguments=[(index, scheme) for index in range(workers)],
            connect=scheme.connect,
        )
    finally:
        scheme.shutdown()


def _their_receiver(model: Any, argument: Any, ready: Callable[[], None]) -> Look:
    index, scheme = argument
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    ready()
    scheme.connect(worker_idx=index)
    ready()
    return lambda: None


@contextmanager
def _by_hand(name: str, workers: int) -> Iterator[Way]:
    context = multiprocessing.get_context("spawn")
    model = make_model(name)
    mark(model, 0)
    ends = [context.Pipe() for _ in range(workers)]

    def send() -> None:
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        for mine, _ in ends:
            mine.send(state)
        for mine, _ in ends:
            mine.recv_bytes()

    yield Way(model=model, send=send, arguments=[theirs for _, theirs in ends])


def _state_dicts(model: Any, pipe: Any, ready: Callable[[], None]) -> Look:
    ready()

    def look() -> None:
        if pipe.poll():
            state = pipe.recv()
            model.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
            pipe.send_bytes(b"x")

    return look


@contextmanager
def _floor(name: str, workers: int) -> Iterator[Way]:
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(workers)]

    def send() -> None:
        for mine, _ in ends:
            os.write(mine.fileno(), b"x")
        for mine, _ in ends:
            os.read(mine.fileno(), 1)

    ways = [theirs for _, theirs in ends]
    yield Way(model=make_model(name), send=send, arguments=ways, checks=False)


def _bytes(model: Any, pipe: Any, ready: Callable[[], None]) -> Look:
    del model
    news = select.poll()
    news.register(pipe, select.POLLIN)
    ready()

    def look() -> None:
        if news.poll(0):
            os.read(pipe.fileno(), 1)
            os.write(pipe.fileno(), b"x")

    return look


# The trainer's side of each way, and the function that connects a worker and returns its look.
_WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Look]]] = {
    "floor": (_floor, _bytes),
    "by hand": (_by_hand, _state_dicts),
    "shm": (_ours("shm"), _receiver),
    "shm, zero-copy": (_ours("shm", zero_copy=True), _receiver),
    "mp": (_ours("mp"), _receiver),
    _THEIRS: (_torchrl, _their_receiver),
}


if __name__ == "__main__":
    main()
