r"""Compares incremental with whole versions, over links of several rates.

    python docs/benchmarks/increments.py --model DIRECTORY | \
        python docs/benchmarks/page.py --record increments

The model is a language model of transformers, such as SmolLM2-135M. It is trained in float32 for
twelve steps of AdamW. The changes of each step in bfloat16 are kept, and ``--versions FILE`` saves
them for later runs. Then a trainer sends each version to one worker over `dist` with
``shared_memory=False``: whole, and by ``"increments::dist"``. Trainer and worker are processes in a
network namespace whose loopback has the given rate. This needs root; without it, only the unlimited
link is measured. After each send the worker's digest of all its tensors is compared with the
trainer's.

Prints a table: megabytes of a version and medians of seconds from the call of `send` to its end.
The first send is whole in all ways and not counted. Memory is the peak with increments minus the
peak with whole versions, from the first send on, divided by the size of the model. The processor
times go to standard error. The run takes about three minutes, and training one more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
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
_WAYS = {"whole": "dist", "increments": "increments::dist"}
_COLUMNS = (
    "link | whole, MB | increment, MB | share | whole, s | increment, s | ratio "
    "| sender's memory | worker's memory"
)
#: For each tensor, the positions that a step changed, and the new bits at these positions.
Step = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Figures:
    """The medians of one way over one link.

    Args:
        nbytes: of a send.
        seconds: from the call of `send` to its end.
        sender_cpu: the sender's processor time, in seconds.
        worker_cpu: the worker's processor time.
        sender_memory: the sender's peak beyond its memory before the first send, in copies of the
            model.
        worker_memory: the worker's peak.
    """

    nbytes: float
    seconds: float
    sender_cpu: float
    worker_cpu: float
    sender_memory: float
    worker_memory: float


def main() -> None:
    """Train, then measure each way over each link in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory that transformers can load")
    parser.add_argument("--rate", type=float, default=3e-6, help="the learning rate (3e-6)")
    parser.add_argument("--versions", type=Path, help="keep the trained versions in this file")
    parser.add_argument("--links", nargs="+", choices=_RATES, default=list(_RATES))
    parser.add_argument("--measure", choices=_WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        found = measure(torch.load(arguments.versions), _WAYS[arguments.measure])
        sys.stdout.write(json.dumps(asdict(found)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file: Path = arguments.versions or Path(folder) / "versions.pt"
        if not file.exists():
            if arguments.model is None:
                parser.error("--model is required, unless --versions names a file that there is")
            torch.save(train(arguments.model, arguments.rate), file)
        print(f"| {_COLUMNS} |")
        print("|---" + "|--:" * _COLUMNS.count("|") + "|")
        for link in arguments.links:
            found_ways = {way: measured_at(link, way, file) for way in _WAYS}
            if None not in found_ways.values():
                print(row(link, **found_ways), flush=True)


def row(link: str, whole: Figures, increments: Figures) -> str:
    """Return a row of the table."""
    cells = (
        link,
        f"{whole.nbytes / 1e6:.1f}",
        f"{increments.nbytes / 1e6:.2f}",
        f"{increments.nbytes / whole.nbytes:.2%}",
        f"{whole.seconds:.3f}",
        f"{increments.seconds:.3f}",
        f"{whole.seconds / increments.seconds:.1f}",
        f"{increments.sender_memory - whole.sender_memory:+.2f}",
        f"{increments.worker_memory - whole.worker_memory:+.2f}",
    )
    return f"| {' | '.join(cells)} |"


def train(path: str, rate: float) -> tuple[dict[str, Tensor], list[Step]]:
    """Return the weights in bfloat16 before the first step, and the changes of each step."""
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


def measured_at(link: str, way: str, file: Path) -> Figures | None:
    """Return the figures at a rate of the loopback; None if it cannot be limited."""
    command = [sys.executable, __file__, "--versions", str(file), "--measure", way]
    if rate := _RATES[link]:
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 400ms"
        script = f'ip link set lo up && {limit} && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", *command]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        print(f"{link}, {way}: not measured; can this user limit a link?", file=sys.stderr)
        return None
    found = Figures(**json.loads(result.stdout))
    print(
        f"{link}, {way}: {found.seconds:.3f} s; processor time {found.sender_cpu:.3f} s in the "
        f"sender, {found.worker_cpu:.3f} s in the worker",
        file=sys.stderr,
    )
    return found


def measure(versions: tuple[dict[str, Tensor], list[Step]], scheme: str) -> Figures:
    """Return the medians of one way, without the first send."""
    weights, steps = versions
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with Sender(scheme, weights, num_workers=1, shared_memory=False) as sender:
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
        worker.start()
        ours.send((sender.address(0), {k: torch.zeros_like(v) for k, v in weights.items()}))
        assert ours.recv() == "ready"
        memory = Memory()
        sent = []
        for step in [{}, *steps]:
            for name, (positions, values) in step.items():
                weights[name].view(torch.int16).view(-1)[positions] = values
            before = time.process_time()
            report = sender.send()
            cpu = time.process_time() - before
            ours.send("digest")
            found, worker_cpu, worker_peak = ours.recv()
            assert found == digest(weights), "other bits have arrived"
            sent.append((report.nbytes, report.seconds, cpu, worker_cpu))
        peak = memory.peak()
    worker.join()
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return Figures(*map(median, zip(*sent[1:], strict=True)), peak / nbytes, worker_peak / nbytes)


class Memory:
    """Measures this process's peak of memory beyond its current memory; Linux only."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._peak()

    def peak(self) -> int:
        """Return the peak since then, in bytes."""
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def work(connection: Connection) -> None:
    """Receive until the sender is gone; report the digest and the times on request."""
    torch.set_num_threads(1)
    address, weights = connection.recv()
    assert isinstance(address, Address)
    with Receiver(address, weights) as receiver:
        connection.send("ready")
        memory, cpu = Memory(), 0.0
        try:
            while True:
                before = time.process_time()
                version = receiver.receive(0.05)
                if version is not None:
                    cpu = time.process_time() - before
                elif connection.poll():
                    connection.recv()
                    connection.send((digest(weights), cpu, memory.peak()))
        except SenderLostError:
            return


def digest(weights: dict[str, Tensor]) -> str:
    """Return a digest of every bit."""
    state = xxhash.xxh3_128()
    for tensor in weights.values():
        state.update(tensor.view(torch.int16).numpy().data)
    return state.hexdigest()


if __name__ == "__main__":
    main()
