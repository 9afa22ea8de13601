"""The trainer's side: from a model to the result for each worker."""
