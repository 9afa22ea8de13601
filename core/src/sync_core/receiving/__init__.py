"""The worker's side: from what arrives to a model that holds it."""
