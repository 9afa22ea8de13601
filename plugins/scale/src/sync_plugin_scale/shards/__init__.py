"""Sharded models: each rank of a trainer sends its shards, each worker takes the parts it needs.

Reading begins in `plan`, which knows nothing of transports. `local` finds the shards of a model on
one rank, `scheme` is the wrapping scheme, and `sender` and `receiver` are its transports.
"""
