"""The checkpoint engine ``"sync_core"`` of verl."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from torch import Tensor

from sync_core import OptionError, Sender
from sync_core.checks import check_seconds
from sync_plugin_verl.rollout import RolloutEnd
from sync_plugin_verl.trainer import TrainerEnd


class SyncCoreEngine:
    """Delivers weights from verl's trainer to its rollout workers by a scheme of sync-core.

    verl makes an engine in each of its processes, and builds and finalises a group for each step.
    The engine keeps the sender and its receivers, so a group costs only two calls to the workers.
    New rollout workers get an address, and workers that left the group are removed.

    Args:
        bucket_size: required by verl and not used: schemes have their own buffers.
        is_master: whether this rank of the trainer sends.
        scheme: the name of the scheme, such as ``"dist"``.
        timeout: the deadline of a step, in seconds.
        device: the device of the tensors in a rollout worker, such as ``"cuda"``; None for the
            device to which the scheme delivers them, usually the CPU.
        **options: other arguments of `sync_core.Sender`, such as ``layers`` and ``on_failure``, and
            options of the scheme. ``host="auto"`` is the trainer's address in the Ray cluster.

    Raises:
        OptionError: no scheme is given.

    Example:
        >>> engine = SyncCoreEngine(bucket_size=2 << 30, is_master=True, scheme="shm")
        >>> engine
        <SyncCoreEngine 'shm': trainer, version=0>
    """

    #: Read by verl: the format of the weights that `receive_weights` yields.
    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        scheme: str | None = None,
        timeout: float = 300.0,
        device: str | None = None,
        **options: Any,
    ) -> None:
        del bucket_size
        if scheme is None:
            raise OptionError(
                "the checkpoint engine 'sync_core' needs a scheme; type rollout.checkpoint_engine."
                "engine_kwargs.sync_core.scheme=dist, or another that sync-core list shows"
            )
        self._scheme = scheme
        timeout = check_seconds(timeout)
        self._trainer: TrainerEnd | None = None
        self._rollout: RolloutEnd | None = None
        if is_master:
            self._trainer = TrainerEnd(scheme, {"timeout": timeout} | _with_host(options))
        else:
            self._rollout = RolloutEnd(timeout, device)

    @property
    def sender(self) -> Sender | None:
        """The sender, for example for `sync_tools.StatusServer`; None before the first step."""
        return None if self._trainer is None else self._trainer.sender

    def prepare(self) -> dict[str, Any]:
        """Return the data that the other processes need about this process."""
        if self._trainer is not None:
            return {"trainer": self._trainer.name, "newest": self._trainer.newest}
        assert self._rollout is not None
        return {"worker": self._rollout.prepare(), "actor": _actor()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for trainers and for rollouts.

        Args:
            actor_wg_world_size: the number of trainers.
            rollout_world_size: the number of rollout workers.
            metadata: the results of `prepare`, of trainers first, then of rollouts.

        Raises:
            OptionError: none of the trainers has ``is_master``.
        """
        masters = [given for given in metadata[:actor_wg_world_size] if "trainer" in given]
        if len(masters) != 1:
            raise OptionError(
                f"one rank of the trainer must be made with is_master=True, got {len(masters)} of "
                f"{actor_wg_world_size}"
            )
        rollouts = {given["worker"]: given["actor"] for given in metadata[actor_wg_world_size:]}
        return (
            {"rollouts": [rollouts] * actor_wg_world_size},
            {name: [value] * rollout_world_size for name, value in masters[0].items()},
        )

    def init_process_group(
        self, rollouts: Mapping[str, Any] | None = None, trainer: str = "", newest: int = 0
    ) -> None:
        """Begin a step.

        Args:
            rollouts: for trainers, the actors of the participating rollouts, by name.
            trainer: for rollouts, the trainer's name.
            newest: for rollouts, the trainer's newest version.
        """
        if rollouts is None:
            assert self._rollout is not None
            self._rollout.join(trainer, newest)
        elif self._trainer is not None:
            self._trainer.admit(rollouts)

    def finalize(self) -> None:
        """End a step. The sender and the receivers stay."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send the weights to the rollouts of this step, and wait until they have them.

        Args:
            weights: names and tensors. Ranks that do not send must read them too, since gathering
                them takes all ranks.
            global_steps: the trainer's step.

        Returns:
            Values for verl's metrics; empty if this rank does not send.

        Raises:
            SendError: some rollouts failed; the others have the weights.
            ModelError: names, dtypes or shapes differ from the first step.
        """
        if self._trainer is None:
            for _ in weights:
                pass
            return {}
        report = await self._trainer.send(weights, global_steps)
        return {
            "sync_core/version": report.version,
            "sync_core/seconds": report.seconds,
            "sync_core/pack_seconds": report.pack_seconds,
            "sync_core/megabytes": report.nbytes / 1e6,
            "sync_core/workers": len(report.updated),
        }

    def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Tensor]]:
        """Return an iterator of names and tensors; a tensor is valid until the step ends.

        Args:
            global_steps: the trainer's step.

        Raises:
            StepError: from the iterator: the weights of another step arrived.
            TimeoutError: from the iterator: no weights arrived in time.
            SyncError: from the iterator: the weights could not be received.
        """
        assert self._rollout is not None
        return self._rollout.receive(global_steps)

    def close(self) -> None:
        """Close the sender or the receiver; they also close when the process ends."""
        for end in (self._trainer, self._rollout):
            if end is not None:
                end.close()

    def __repr__(self) -> str:
        if self._trainer is None:
            return f"<SyncCoreEngine {self._scheme!r}: not the rank that sends>"
        return f"<SyncCoreEngine {self._scheme!r}: trainer, version={self._trainer.newest}>"


def _actor() -> Any:
    """Return the handle of the current actor."""
    import ray

    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError as error:
        raise OptionError(
            "the rollout workers of the checkpoint engine 'sync_core' must be Ray actors, as "
            "those of verl are"
        ) from error


def _with_host(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with this machine's address instead of ``"auto"``."""
    if options.get("host") != "auto":
        return dict(options)
    import ray

    return {**options, "host": ray.util.get_node_ip_address()}
