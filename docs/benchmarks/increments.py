"""Incremental versions beside whole ones, over links of several rates.

    python docs/benchmarks/increments.py --model DIRECTORY

The model is a language model of transformers, such as SmolLM2-135M. It is trained in float32 for
twelve steps of AdamW, and what each step changes of it in bfloat16 is kept. Then a trainer goes
through these versions, and sends each to one worker over `dist` with ``shared_memory=False``,
whole and as increments. The two ends are processes of a network namespace whose loopback has the
given rate; root is needed for that, and without it only the unlimited link is measured. After each
send the worker's digest of all its tensors is compared with the trainer's.

Prints a table: megabytes of a version and medians of seconds from the call of `send` to its end.
The first send, which is whole in both, is left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash
from torch import Tensor

from sync_core import Address, Receiver, Sender, SenderLostError

_STEPS = 12
_RATES = {"1 Gb/s": "1gbit", "5 Gb/s": "5gbit", "unlimited": ""}
#: For each tensor, the positions that a step changed, and the bits that are there now.
Step = dict[str, tuple[Tensor, Tensor]]


def main() -> None:
    """Train, then measure each link in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a directory that transformers can load")
    parser.add_argument("--rate", type=float, default=3e-6, help="the learning rate (3e-6)")
    parser.add_argument("--versions", type=Path, help="keep the trained versions in this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        sys.stdout.write(json.dumps(measure(torch.load(arguments.measure))))
        return
    with tempfile.TemporaryDirectory() as folder:
        file: Path = arguments.versions or Path(folder) / "versions.pt"
        if not file.exists():
            torch.save(train(arguments.model, arguments.rate), file)
        print("| link | whole, MB | increment, MB | share | whole, s | increment, s | ratio |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for link, rate in _RATES.items():
            found = measured_at(rate, file)
            if found is None:
                continue
            (whole, whole_s), (some, some_s) = found["whole"], found["increments"]
            print(
                f"| {link} | {whole / 1e6:.1f} | {some / 1e6:.2f} | {some / whole:.2%} | "
                f"{whole_s:.3f} | {some_s:.3f} | {whole_s / some_s:.1f} |",
                flush=True,
            )


def train(path: str, rate: float) -> tuple[dict[str, Tensor], list[Step]]:
    """The weights in bfloat16 before the first step, and what each step changed of them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    first = {name: tensor.clone() for name, tensor in weights.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    steps = []
    for _ in range(_STEPS):
        tokens = torch.randint(0, model.config.vocab_size, (2, 32))
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step: Step = {}
        for name, parameter in model.named_parameters():
            now = parameter.detach().to(torch.bfloat16).view(torch.int16).view(-1)
            before = weights[name].view(torch.int16).view(-1)
            positions = (now != before).nonzero().view(-1)
            step[name] = positions, now[positions]
            before[positions] = now[positions]
        steps.append(step)
    return first, steps


def measured_at(rate: str, file: Path) -> dict[str, tuple[float, float]] | None:
    """The figures of a process whose loopback has this rate; None where it cannot be limited."""
    command = [sys.executable, __file__, "--model", "", "--measure", str(file)]
    if rate:
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 400ms"
        script = f'ip link set lo up && {limit} && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", *command]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        print(f"no link of {rate} can be made here", file=sys.stderr)
        return None
    found: dict[str, tuple[float, float]] = json.loads(result.stdout)
    return found


def measure(versions: tuple[dict[str, Tensor], list[Step]]) -> dict[str, tuple[float, float]]:
    """Median bytes and seconds of the sends after the first, whole and as increments."""
    first, steps = versions
    found = {}
    for way, increments in {"whole": False, "increments": True}.items():
        weights = {name: tensor.clone() for name, tensor in first.items()}
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        with Sender(
            "dist", weights, num_workers=1, increments=increments, shared_memory=False
        ) as sender:
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
            worker.start()
            ours.send((sender.address(0), {k: torch.zeros_like(v) for k, v in weights.items()}))
            assert ours.recv() == "ready"
            reports = [sender.send()]
            for step in steps:
                for name, (positions, values) in step.items():
                    weights[name].view(torch.int16).view(-1)[positions] = values
                reports.append(sender.send())
                ours.send("digest")
                assert ours.recv() == digest(weights), "other bits have arrived"
        worker.join()
        found[way] = (
            median(report.nbytes for report in reports[1:]),
            median(report.seconds for report in reports[1:]),
        )
    return found


def work(connection: Connection) -> None:
    """Receive until the sender has gone, and say the digest when asked."""
    torch.set_num_threads(1)
    address, weights = connection.recv()
    assert isinstance(address, Address)
    with Receiver(address, weights) as receiver:
        connection.send("ready")
        try:
            while True:
                if receiver.receive(0.05) is None and connection.poll():
                    connection.recv()
                    connection.send(digest(weights))
        except SenderLostError:
            return


def digest(weights: dict[str, Tensor]) -> str:
    """A digest of every bit."""
    state = xxhash.xxh3_128()
    for tensor in weights.values():
        state.update(tensor.view(torch.int16).numpy().data)
    return state.hexdigest()


if __name__ == "__main__":
    main()
