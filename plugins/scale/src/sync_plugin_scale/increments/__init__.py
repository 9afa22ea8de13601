"""Incremental versions: workers are sent only the parts that they lack.

One rule: the sender knows in which version each part last changed, and for each worker the version
that it holds completely; a worker needs the parts that changed after that. Parts are units of the
packed bytes. Reading begins in `sender`: `history` keeps the newest version and what changed,
`patch` is what travels, and `receiver` applies it.
"""
