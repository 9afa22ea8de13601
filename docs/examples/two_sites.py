"""Train at one site and collect at two others that share only a store.

    pip install sync-plugin-store
    python docs/examples/two_sites.py

The store is a directory here; `--store s3://bucket/run` uses S3. If the user is allowed to, each
site runs in a network namespace without a network, so only the directory connects them. The trainer
publishes its weights as one run, and each site publishes its batches as another. The other side
gets the address of each run once; the address has the public key that verifies the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sync_core import Address, Receiver, Sender, SenderLostError

SITES = ("east", "west")
FRAMES = 256
TIMEOUT = 60.0


def make_policy() -> nn.Module:
    """Return logits of 3 actions from 4 observations."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))


def make_batch() -> dict[str, Tensor]:
    """Return the tensors of a batch."""
    return {
        "observation": torch.zeros(FRAMES, 4),
        "action": torch.zeros(FRAMES, dtype=torch.int64),
        "reward": torch.zeros(FRAMES),
    }


def collect_at(store: str, name: str) -> None:
    """Collect a batch with each version of the weights, until the trainer ends."""
    trainer = Address.from_json(sys.stdin.readline())
    policy, batch = make_policy(), make_batch()
    torch.manual_seed(SITES.index(name) + 1)
    best = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    with (
        Sender("store", batch, url=f"{store}/batches/{name}") as sender,
        Receiver(trainer, policy) as receiver,
    ):
        sys.stdout.write(f"{sender.address().to_json()}\n")
        sys.stdout.flush()
        while True:
            try:
                version = receiver.receive(TIMEOUT)
            except SenderLostError:
                return
            if version is None:
                raise SystemExit(f"{name}: no version in {TIMEOUT:g} s")
            observation = torch.randn(FRAMES, 4)
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(observation)).sample()
            batch["observation"].copy_(observation)
            batch["action"].copy_(action)
            batch["reward"].copy_((action == (observation @ best.T).argmax(1)).float())
            sender.send(extras={"version": torch.tensor(version)})


def train_at(store: str, steps: int) -> None:
    """Publish weights, and learn from the batches of all sites."""
    policy, batches = make_policy(), [make_batch() for _ in SITES]
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    with ExitStack() as opened:
        sender = opened.enter_context(Sender("store", policy, url=f"{store}/weights"))
        sys.stdout.write(f"{sender.address().to_json()}\n")
        sys.stdout.flush()
        receivers = [
            opened.enter_context(Receiver(Address.from_json(sys.stdin.readline()), batch))
            for batch in batches
        ]
        for step in range(1, steps + 1):
            version = sender.send().version
            for name, receiver in zip(SITES, receivers, strict=True):
                if receiver.receive(TIMEOUT) is None:
                    raise SystemExit(f"no batch of {name} in {TIMEOUT:g} s")
                assert receiver.extras["version"] == version
            learn(policy, optimizer, batches)
            if step in (1, steps) or step % 10 == 0:
                reward = sum(float(batch["reward"].mean()) for batch in batches) / len(batches)
                sys.stdout.write(f"version {version}: mean reward {reward:.2f}\n")
                sys.stdout.flush()


def learn(
    policy: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[dict[str, Tensor]]
) -> None:
    """Make a step of REINFORCE."""
    observation, action, reward = (
        torch.cat([batch[name] for batch in batches]) for name in make_batch()
    )
    chosen = torch.distributions.Categorical(logits=policy(observation)).log_prob(action)
    loss = -(chosen * (reward - reward.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    """Start a trainer and two sites, and give each the addresses of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="a directory or a URL; a temporary directory by default")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--role", choices=["trainer", *SITES], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "trainer":
        train_at(arguments.store, arguments.steps)
    elif arguments.role is not None:
        collect_at(arguments.store, arguments.role)
    elif arguments.store is not None:
        run(arguments.store, arguments.steps)
    else:
        with tempfile.TemporaryDirectory() as store:
            run(store, arguments.steps)


def run(store: str, steps: int) -> None:
    """Run all three in processes, without a network if the store is a directory."""
    command = [sys.executable, __file__, "--store", store, "--steps", str(steps), "--role"]
    apart = ["unshare", "--net"]
    if "://" not in store and can_be_apart(apart):
        command = [*apart, *command]
        print("each site is in its own network namespace, without a network")
    with ExitStack() as opened:

        def start(role: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*command, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            opened.callback(process.wait)
            opened.callback(process.kill)
            return process

        trainer = start("trainer")
        sites = [start(name) for name in SITES]
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        address = trainer.stdout.readline()
        for site in sites:
            assert site.stdin is not None
            site.stdin.write(address)
            site.stdin.flush()
        for site in sites:
            assert site.stdout is not None
            trainer.stdin.write(site.stdout.readline())
            trainer.stdin.flush()
        for line in trainer.stdout:
            print(line, end="", flush=True)
        codes = [process.wait(TIMEOUT) for process in (trainer, *sites)]
    if any(codes):
        raise SystemExit(f"trainer and sites have ended with {codes}")


def can_be_apart(apart: list[str]) -> bool:
    """Return whether this user can make network namespaces."""
    try:
        return subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
