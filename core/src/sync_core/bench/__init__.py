"""Measures how fast a scheme moves weights here, beside the limit of this machine."""

from sync_core.bench.measure import Measurement, measure
from sync_core.bench.models import MODELS, make_model

__all__ = ["MODELS", "Measurement", "make_model", "measure"]
