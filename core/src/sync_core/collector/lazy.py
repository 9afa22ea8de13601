"""Gives lazy modules their shapes, so that there are weights to send."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy as is_lazy_tensor

from sync_core.collector.policies import TensorDictPolicy, TensorPolicy
from sync_core.envs.protocol import Env


def is_lazy(policy: Any) -> bool:
    """Whether a policy has tensors without a shape."""
    return isinstance(policy, nn.Module) and any(
        map(is_lazy_tensor, itertools.chain(policy.parameters(), policy.buffers()))
    )


def initialise(act: TensorPolicy | TensorDictPolicy, env: Env) -> None:
    """Act once in an environment, which is reset for that."""
    with torch.no_grad():
        act(env.reset().copy())
