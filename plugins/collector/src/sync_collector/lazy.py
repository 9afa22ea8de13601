"""Gives lazy modules their shapes, so that there are weights to send."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.parameter import is_lazy as is_lazy_tensor

from sync_collector.envs.protocol import Env
from sync_collector.policies import TensorDictPolicy, TensorPolicy
from sync_collector.policy_module import called_module
from sync_core import ModelError


def is_lazy(policy: Any) -> bool:
    """Return whether a policy, or the module that it calls, has tensors without a shape."""
    module = called_module(policy)
    return module is not None and any(
        map(is_lazy_tensor, itertools.chain(module.parameters(), module.buffers()))
    )


def initialise(act: TensorPolicy | TensorDictPolicy, env: Env) -> None:
    """Act once in an environment, which is reset for that.

    Raises:
        ModelError: the policy calls the ``forward()`` of a lazy module directly.
    """
    try:
        with torch.no_grad():
            act(env.reset().copy())
    except ValueError as error:
        # torch has no class for this.
        if "uninitialized parameter" not in str(error):
            raise
        raise ModelError(
            "the policy calls forward() of a lazy module by itself, which gives no shapes; let it "
            "call the module, or run that once before"
        ) from error
