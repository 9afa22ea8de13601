"""What is sent as one version: the models of several senders, and tensors made at each send."""
