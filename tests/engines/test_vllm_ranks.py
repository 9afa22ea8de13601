"""An engine of two ranks, each in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.engines import OPTIONS, change, generated, greedy, make_llama

from sync_core import Sender, SyncError
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)


def test_two_ranks_have_one_version(checkpoint: Path) -> None:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    llm = LLM(
        str(checkpoint),
        tensor_parallel_size=2,
        weight_transfer_config=WeightTransferConfig(backend="sync_core"),
        **OPTIONS,
    )
    model = make_llama(1)
    target = VllmTarget(llm)
    assert generated(llm) == (greedy(make_llama(0)), ["default"])
    with Sender("dist", model, num_workers=2, strategy="checkpoint", timeout=60) as sender:
        target.connect(sender)
        for version in (1, 2):
            assert target.send().updated == (0, 1)
            assert generated(llm) == (greedy(model), [str(version)])
            change(model)

    # No rank is left connected where the weights do not fit, and vLLM's next call is answered.
    wrong = {name: value for name, value in model.state_dict().items() if "k_proj" not in name}
    with Sender("dist", wrong, num_workers=2, timeout=60) as sender:
        with pytest.raises(SyncError, match="rank 1: LayoutMismatchError"):
            target.connect(sender)
        assert {status.state for status in sender.workers.values()} == {"connecting"}
    with Sender("shm", model, num_workers=2, strategy="checkpoint", timeout=60) as sender:
        target.connect(sender)
        target.send()
        assert generated(llm) == (greedy(model), ["1"])
