"""What a scheme or a worker group can declare that it can do, and what is meant by it."""

from __future__ import annotations

from types import MappingProxyType

#: Of schemes. A scheme may declare others, which its own documentation explains.
SCHEME_CAPABILITIES = MappingProxyType(
    {
        "background": "weights take time to come: Receiver(…, background=True) stages them",
        "broadcast": "a version is packed or put once, however many workers get it",
        "cross_host": "workers may be on other machines",
        "cross_process": "workers may be in other processes",
        "cuda": "tensors on a GPU travel without a copy in the memory of the host",
        "descriptors": "each worker has to be given an open file, such as the end of a pipe",
        "findings": "its ``findings()`` tell ``sync-core doctor`` what is amiss around it",
        "late_join": "workers may be added while the sender runs",
        "pull": "workers fetch what they want; the sender need not be able to reach them",
        "same_object": "workers act with the trainer's own object, so nothing travels",
        "worker_paths": "handles of workers may be paths, looked up in the sender's context",
        "zero_copy": "parameters of workers may become views of what arrived",
    }
)

#: Of worker groups.
WORKER_CAPABILITIES = MappingProxyType(
    {
        "add": "workers can be added later",
        "cross_host": "workers may be on other machines",
        "cross_process": "workers are in other processes",
        "descriptors": "open files that multiprocessing can pass on may be arguments of calls",
        "parallel": "workers run at the same time",
        "restart": "the place of a worker that was lost can be taken by a new one",
    }
)
