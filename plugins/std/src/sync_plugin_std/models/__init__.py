"""Sources of versions: several senders as one, tensors made at each send, and optimizers.

`optimizers` puts the weights to act with into a model while a version is read.
"""
