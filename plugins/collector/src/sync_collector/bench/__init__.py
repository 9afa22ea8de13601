"""The benchmark of collectors: ``sync-core bench collector``."""
