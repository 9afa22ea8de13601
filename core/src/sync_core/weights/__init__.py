"""Weights on their way: named tensors, the layout that says where each lies, and the payload."""
