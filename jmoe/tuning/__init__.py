"""Measuring tiles on a device: ``tune``, and the shapes of published models to tune for."""

from jmoe.tuning.catalogue import MODELS, operations
from jmoe.tuning.search import CANDIDATES, Trial, plan_of, tune

__all__ = ["CANDIDATES", "MODELS", "Trial", "operations", "plan_of", "tune"]
