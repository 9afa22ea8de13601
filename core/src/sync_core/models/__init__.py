"""Models: where their tensors are found, and how weights are read from them and written."""
