"""A model of what a send costs: over shards, over relays, and of a part of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log

from sync_core.checks import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCost:
    """The seconds of a send, which follow each other.

    Args:
        pack: each source copies what it sends.
        compare: each source compares what it holds with the version before, and each worker makes
            the version; 0 where versions travel whole.
        wire: the bytes travel.
        copy: each worker copies what it got into its model.
        start: messages, whatever the size.
    """

    pack: float
    compare: float
    wire: float
    copy: float
    start: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.pack + self.compare + self.wire + self.copy + self.start


def predict(
    nbytes: float,
    *,
    sources: int = 1,
    shards: int = 1,
    replicas: int = 1,
    fanout: int = 0,
    chunks: int = 64,
    changed: float = 1.0,
    link: float,
    memory: float = 5e9,
    compare: float = 2.5e9,
    start: float = 0.02,
) -> SendCost:
    """Predict what a send costs, from what each link and each rank has to carry.

    Each rank has its own link; sources send at the same time, and so do destinations receive.
    With relays, the replicas of a shard pass it on to each other; else the sources send it to each.

    Args:
        nbytes: of the model.
        sources: on how many ranks the trainer holds it.
        shards: on how many ranks each replica of the workers holds it.
        replicas: how many replicas of the workers there are.
        fanout: to how many replicas each passes a version on; 1 for a chain; 0 for no relays.
        chunks: in how many chunks a version is relayed.
        changed: the part of the bytes that travels: below 1 for increments, which take the time
            of comparing, and are copied into the model whole.
        link: bytes per second of the link of a rank.
        memory: bytes per second that a rank copies.
        compare: bytes per second that an increment is made of, and applied to.
        start: seconds of what does not depend on bytes.

    Returns:
        The seconds.

    Example:
        >>> whole = predict(140e9, link=50e9, replicas=16)
        >>> sharded = predict(140e9, sources=64, shards=16, link=50e9)
        >>> round(whole.wire, 2), round(sharded.wire, 3)
        (44.8, 0.175)
    """
    for name, value in (("sources", sources), ("shards", shards), ("replicas", replicas)):
        check_count(value, name)
    travelling = nbytes * changed
    share, part = travelling / sources, travelling / shards
    compared = nbytes / sources / compare if changed < 1 else 0.0
    sent_to = min(fanout, replicas) if fanout else replicas
    wire = max(share * sent_to, part) / link
    if fanout and replicas > 1:
        depth = replicas if fanout == 1 else ceil(log(replicas * (fanout - 1) + 1, fanout))
        # A relay sends each chunk of its part to ``fanout`` others, while the next one comes.
        wire = max(wire, part * fanout / link) * (1 + (depth - 1) / chunks)
    return SendCost(
        pack=share / memory,
        compare=compared,
        wire=wire,
        copy=nbytes / shards / memory,
        start=start,
    )


def break_even(*, changed: float, memory: float = 5e9, compare: float = 2.5e9) -> float:
    """Return the rate of a link below which increments take less time than whole versions.

    Args:
        changed: the part of the bytes that travels as an increment.
        memory: see `predict`.
        compare: see `predict`.

    Returns:
        Bytes per second.

    Example:
        >>> link = break_even(changed=0.02)
        >>> whole, some = predict(1e9, link=link), predict(1e9, link=link, changed=0.02)
        >>> round(link / 1e9, 1), round(whole.total - some.total, 6)
        (4.8, 0.0)
    """
    # pack + wire = changed x pack + compare + changed x wire
    spared = 1 / compare - (1 - changed) / memory
    return (1 - changed) / spared if spared > 0 else inf
