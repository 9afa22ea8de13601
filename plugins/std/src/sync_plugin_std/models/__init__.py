"""What is sent as one version: the models of several senders, and tensors made at each send.

`optimizers` has the weights to act with in the model while a version is read.
"""
