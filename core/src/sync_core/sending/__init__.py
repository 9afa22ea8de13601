"""The trainer's side: from a model to what became of each worker."""
