"""Partial and incremental versions: workers are sent only the parts that they lack.

One rule: the sender knows in which version each part last changed, and for each worker the version
that it holds completely; a worker needs the parts that changed after that. In `partial` the parts
are tensors that a user gave by hand. In `sender`, where to begin reading, they are units of the
packed bytes: `history` keeps the newest version and what changed, and `receiver` applies patches.
"""

from sync_core.increments.options import Increments

__all__ = ["Increments"]
