"""Chooses what takes new weights to the workers: one sender, or one for each of several models."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from sync_collector.policy_module import module_of
from sync_collector.requests import Requests
from sync_collector.schemes import POLICY, ModelScheme
from sync_collector.several import SeveralModels
from sync_collector.weights import PolicyWeights
from sync_collector.worker_pool import Crew
from sync_core import Sender
from sync_core.workers import shares_policy


def make_weights(
    crew: Crew,
    requests: Requests,
    schemes: Mapping[str, ModelScheme],
    *,
    collector: weakref.ref[Any],
    policy: Any,
    models: Mapping[str, Any],
    made_by_workers: bool,
    timeout: float,
) -> PolicyWeights | SeveralModels:
    """What takes new weights to the workers of a collector.

    Args:
        crew: the workers.
        requests: the batches that they are asked for.
        schemes: the scheme of each model.
        collector: what senders are to know as their collector.
        policy: the trainer's policy, if there is one.
        models: what the trainer has beside it.
        made_by_workers: whether workers have policies that the trainer has not seen.
        timeout: deadline of blocking calls, in seconds.
    """
    make_senders = {
        name: partial(Sender, chosen.scheme, model_id=name, timeout=timeout, **chosen.arguments)
        for name, chosen in schemes.items()
    }
    if list(schemes) == [POLICY]:
        return PolicyWeights(
            crew,
            requests.busy,
            make_senders[POLICY],
            collector,
            policy,
            shared=shares_policy(schemes[POLICY].scheme),
            made_by_workers=made_by_workers,
            timeout=timeout,
        )
    known = dict(models)
    module = module_of(policy) if POLICY in schemes else None
    if module is not None:
        known[POLICY] = module
    return SeveralModels(crew, make_senders, collector, known, timeout=timeout)
