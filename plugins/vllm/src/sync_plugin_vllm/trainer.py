"""Use any scheme in vLLM's own trainer interface, ``WeightTransferTrainerFactory``.

A trainer that is written to vLLM's interface selects a scheme of sync-core in its ``init_info``.
Importing this module registers the backend ``"sync_core"``. The interface has only the four calls
of an update. It cannot pause an engine, label it as bad, or update several engines with one
deadline; `sync_plugin_vllm.VllmTarget` can.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from sync_core import OptionError, Sender, SendReport, SyncError
from sync_plugin_vllm import register
from sync_plugin_vllm.sources import SourceWeights, pairs

__all__ = ["SyncCoreTrainerEngine", "SyncCoreTrainerInitInfo"]


@dataclass
class SyncCoreTrainerInitInfo(TrainerInitInfo):
    """The ``init_info`` of a trainer.

    Args:
        scheme: see `sync_core.Sender`; it can be a chain such as ``"increments::dist"``.
        num_workers: the number of ranks of the engine, from its ``get_world_size``.
        options: other arguments of `sync_core.Sender`, such as ``{"host": "10.0.0.5"}``.
        timeout: the deadline of each send, in seconds.
        verify: whether the engine verifies each version; see `sync_plugin_vllm.VllmTarget`.
        rank: this process's rank in the trainer, as a keyword argument; rank 0 sends.
    """

    backend: ClassVar[str] = "sync_core"

    scheme: Any
    num_workers: int
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    verify: bool = False


class SyncCoreTrainerEngine(TrainerWeightTransferEngine[SyncCoreTrainerInitInfo]):
    """Sends the weights of a ``WeightSource`` to one engine of vLLM.

    Example:
        On every rank of a trainer::

            info = SyncCoreTrainerInitInfo("dist", num_workers=1, rank=rank)
            client = HTTPVLLMWeightSyncClient("http://10.0.0.7:8000")
            source = ModuleSource(model)
            engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            engine.send_weights()
    """

    init_info_cls = SyncCoreTrainerInitInfo

    #: The sender; None on the ranks that do not send.
    sender: Sender | None = None
    _timeout = 60.0

    @classmethod
    def trainer_init(
        cls, init_info: SyncCoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Make the sender on rank 0, and connect the engine to it.

        Raises:
            OptionError: there is no source, or rank 0 does not have all its tensors.
            Exception: the client's error, for example if the names do not fit the engine.
        """
        if source is None:
            raise OptionError(
                "the backend 'sync_core' needs the trainer's weights; type "
                "trainer_init(info, client=client, source=ModuleSource(model))"
            )
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not init_info.is_sender:
            return engine
        engine._timeout = init_info.timeout
        sender = Sender(
            init_info.scheme,
            SourceWeights(source),
            num_workers=init_info.num_workers,
            timeout=init_info.timeout,
            **{"strategy": "checkpoint", **init_info.options},
        )
        engine.sender = sender
        try:
            addresses = [sender.address(i).to_json() for i in sender.all_worker_ids()]
            client.init_weight_transfer_engine({"addresses": addresses, "verify": init_info.verify})
        except BaseException:
            sender.close()
            raise
        return engine

    def send_weights(self) -> SendReport | None:
        """Send a version, and label all later outputs with it; call this on every rank.

        Returns:
            The result for each rank of the engine; None on ranks that do not send.

        Raises:
            SendError: ranks of the engine have failed. The next send repairs the engine.
            Exception: the client's error.
        """
        if not self.is_sender:
            for _ in pairs(self.source):
                continue  # gathering is a collective of all ranks
            return None
        if self.sender is None:
            raise SyncError("the engine has no sender; make it by trainer_init")
        pending = self.sender.send_async(timeout=self._timeout)
        try:
            self.client.start_weight_update()
            self.client.update_weights({"version": pending.version})
            report = pending.wait()
        except BaseException as error:
            pending.interrupt(error)
            # So that the next send can start; only the first error is reported.
            with suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(report.version))
        return report

    def shutdown(self) -> None:
        """Close the sender; the engine keeps its weights."""
        if self.sender is not None:
            self.sender.close()


register()
