"""Times TorchRL's own weight update: from the trainer's call until every worker has applied it.

Written against torchrl 0.14.1, with the fastest settings for it on two cores: one torch thread in
each worker, torch's "file_system" sharing (with "file_descriptor" every tensor handle of the pipe
scheme is a socket connection back to the trainer), and a TensorDict made from the module
beforehand. A background thread in each worker receives, applies and acknowledges; `send` returns
when it has all acknowledgements.

``shared`` is SharedMemWeightSyncScheme with a buffer beside the trainer's model: `send` copies into
the buffer once, and the workers' parameters are that buffer, so nothing moves in the workers (and a
worker in the middle of a forward pass reads a mixture). ``mp`` is MultiProcessWeightSyncScheme with
workers that have their own parameters.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from tensordict import TensorDict
from torch import multiprocessing
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from sync_tools.bench import SETTLE_SECONDS, is_marked, make_model, mark

_WARM_UP = 2
_FIRST_WEIGHTS_SECONDS = 300.0


def measure(
    scheme: str, model: str, *, workers: int, rounds: int, pause: float = SETTLE_SECONDS
) -> list[float]:
    """Return the seconds of each round of a scheme with a model of `sync_tools.bench.MODELS`.

    Args:
        scheme: ``shared`` or ``mp``.
        model: the model's name.
        workers: the number of workers.
        rounds: the number of rounds measured.
        pause: the seconds before each round.
    """
    _prepare_process()
    context = multiprocessing.get_context("spawn")
    trained = make_model(model)
    mark(trained, 0)
    sender = _scheme_on_sender(scheme, trained, workers, context)
    pipes, processes = [], []
    try:
        for index in range(workers):
            mine, theirs = context.Pipe()
            arguments = (index, sender, model, theirs)
            processes.append(context.Process(target=_work, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()
        sender.connect()
        _ask(pipes, "connect")
        weights = TensorDict.from_module(trained).data
        seconds = []
        for version in range(1, _WARM_UP + rounds + 1):
            mark(trained, version)
            time.sleep(pause)
            seconds.append(_round(sender, weights, pipes, version))
        return seconds[_WARM_UP:]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            process.kill()
        sender.shutdown()


def _round(scheme: Any, weights: Any, pipes: list[Any], version: int) -> float:
    begin = time.perf_counter()
    scheme.send(weights)
    seconds = time.perf_counter() - begin
    if not all(_ask(pipes, version)):
        raise RuntimeError(f"a worker has other weights than those of round {version}")
    return seconds


def _scheme_on_sender(name: str, model: Any, workers: int, context: Any) -> Any:
    options = {"model_id": "policy", "ctx": context}
    if name == "shared":
        scheme = SharedMemWeightSyncScheme(sync=True)
        buffer = TensorDict.from_module(model).data.clone()
        scheme.init_on_sender(weights=buffer, devices=[torch.device("cpu")] * workers, **options)
        return scheme
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=model, device_map_fn=_own_copy, num_workers=workers, **options)
    return scheme


def _own_copy(worker_index: int, weights: Any) -> Any:
    del worker_index
    return weights.clone()


def _ask(pipes: list[Any], question: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(question)
    return [pipe.recv() for pipe in pipes]


def _work(index: int, scheme: Any, model_name: str, pipe: Any) -> None:
    _prepare_process()
    torch.set_num_threads(1)
    model = make_model(model_name)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    pipe.send("ready")
    pipe.recv()
    transport = scheme.receiver_transport
    if isinstance(scheme, MultiProcessWeightSyncScheme):
        # TorchRL gives up after 10 s, too soon for the first weights of large models.
        transport.timeout = _FIRST_WEIGHTS_SECONDS
    scheme.connect(worker_idx=index)
    pipe.send("connected")
    try:
        while True:
            pipe.send(is_marked(model, pipe.recv()))
    except EOFError:
        return


def _prepare_process() -> None:
    # A tensor in shared memory may need an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    multiprocessing.set_sharing_strategy("file_system")
