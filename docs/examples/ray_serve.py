"""Replicas of Ray Serve that come and go, each with the newest version of a model in training.

    python docs/examples/ray_serve.py

The trainer has one address for all replicas, whatever their number. Serve runs two, then four, then
one of them, and replaces them, while the trainer sends versions and clients send requests. Each
answer has its version, and is checked. Needs ``pip install "ray[serve]" sync-plugin-std
sync-plugin-scale``.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray import serve
from torch import nn

import sync_core
from sync_plugin_scale import Pool

#: The number of replicas in each phase.
POOLS = (2, 4, 1)
#: The number of requests at the same time.
CLIENTS = 8
#: The duration of a request, as with a larger model, in seconds.
DURATION = 0.1
PATIENCE = 60.0


def make_policy() -> nn.Module:
    """Return the model, the same in the trainer and in each replica."""
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2)).double()


@serve.deployment(
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_wait_loop_s=0.1,
)
class Policy:
    """A replica. It is ready after its first version, so that it never answers without one.

    Args:
        address: what ``Pool(sender).address()`` returned, the same for all replicas.
    """

    def __init__(self, address: sync_core.Address) -> None:
        self._model = make_policy()
        self._in_use = threading.Lock()
        self._receiver = sync_core.Receiver(address, self._model)
        self._receiver.receive()
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    def _follow(self) -> None:
        """Commit each version while no request uses the model."""
        try:
            while True:
                if self._receiver.stage() is not None:
                    with self._in_use:
                        self._receiver.load()
                        self._receiver.confirm()
        except (sync_core.SenderLostError, sync_core.ClosedError):
            return  # the trainer or this replica ends; the replica serves its current version

    def __call__(self, observation: list[float]) -> tuple[int, int, list[float]]:
        """Return the worker's id, its version, and the action."""
        with self._in_use, torch.no_grad():
            action = self._model(torch.tensor(observation).double()).tolist()
            answer = self._receiver.worker_id, self._receiver.version, action
        time.sleep(DURATION)
        return answer

    def __del__(self) -> None:
        """Close the receiver, so that the sender no longer waits for this replica."""
        self._receiver.close()


class Clients:
    """Threads that send requests, and check each answer.

    Args:
        handle: the handle of the deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._ended = threading.Event()
        self._answered = threading.Condition()
        #: The newest version that all replicas have confirmed.
        self.confirmed = 0
        #: The number of answers, and the replicas that gave them.
        self.answers = 0
        self.replicas: set[int] = set()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._running = [self._pool.submit(self._run) for _ in range(CLIENTS)]

    def wait_for(self, answers: int) -> None:
        """Wait for a number of further answers."""
        with self._answered:
            goal = self.answers + answers
            if not self._answered.wait_for(lambda: self.answers >= goal, PATIENCE):
                raise TimeoutError(f"{goal - self.answers} answers are missing")

    def stop(self) -> None:
        """Stop sending requests; raise an error of any thread."""
        self._ended.set()
        for running in self._running:
            running.result(PATIENCE)
        self._pool.shutdown()

    def _run(self) -> None:
        observation = [1.0, 2.0, 3.0, 4.0]
        while not self._ended.is_set():
            oldest = self.confirmed
            reply = self._handle.remote(observation).result(timeout_s=PATIENCE)
            worker_id, version, action = reply
            check(version, action, oldest)
            with self._answered:
                self.answers += 1
                self.replicas.add(worker_id)
                self._answered.notify_all()


def set_version(policy: nn.Module, version: int) -> None:
    """Stand in for a training step: set all parameters to the version number."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float(version))


def check(version: int, action: list[float], oldest: int) -> None:
    """Raise unless an answer is from one whole version that was not yet replaced."""
    hidden = version * 10.0 + version
    expected = 64 * hidden * version + version
    if action != [expected, expected] or version < oldest:
        raise RuntimeError(f"version {version} gave {action}; replicas had version {oldest}")


class Trainer:
    """Sends versions to all current replicas.

    Args:
        scheme: the scheme.
    """

    def __init__(self, scheme: str) -> None:
        self._policy = make_policy()
        self.sender = sync_core.Sender(scheme, self._policy, num_workers=0, timeout=PATIENCE)
        self._came = threading.Event()
        self.sender.subscribe(self._look)

    def _look(self, event: sync_core.MembershipEvent) -> None:
        if event.before is None:
            self._came.set()

    def send_the_first(self) -> None:
        """Send a version after the first replica has joined; later replicas begin with it."""
        if not self._came.wait(PATIENCE):
            raise TimeoutError("no replica has come")
        self.step()

    def step(self) -> int:
        """Send one version, and return it."""
        set_version(self._policy, self.sender.version + 1)
        return self.sender.send().version


def deploy(address: sync_core.Address, replicas: int) -> Any:
    """Let Serve run this number of new replicas instead of the current ones."""
    policy: Any = Policy
    pool = policy.options(num_replicas=replicas).bind(address)
    return serve.run(pool, name="policy", route_prefix=None)


def main() -> None:
    """Run all phases, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="shm", help="dist, where replicas are on other hosts")
    parser.add_argument("--sends", type=int, default=50, help="at least so many")
    arguments = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    trainer = Trainer(arguments.scheme)
    address = Pool(trainer.sender).address()
    with ThreadPoolExecutor(1) as deploying, trainer.sender:
        deployed = deploying.submit(deploy, address, POOLS[0])
        trainer.send_the_first()
        clients = Clients(deployed.result())
        for replicas in POOLS:
            if replicas != POOLS[0]:
                deployed = deploying.submit(deploy, address, replicas)
            last = trainer.sender.version + arguments.sends // len(POOLS) + 1
            while not deployed.done() or trainer.sender.version < last:
                clients.confirmed = trainer.step()
                clients.wait_for(CLIENTS)
            deployed.result()
            count = len(trainer.sender.all_worker_ids())
            print(f"version {clients.confirmed}: replicas: {count}", flush=True)
        clients.stop()
    print(f"{clients.answers} answers by {len(clients.replicas)} replicas: none wrong, none lost")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
