"""Predicts the costs of a step, and searches for the choices that make it fastest. Imports nothing from Lightning."""

from sp_lightning.planning.assumptions import Assumptions
from sp_lightning.planning.planner import AutoPlanner
from sp_lightning.planning.report import plan

__all__ = ["Assumptions", "AutoPlanner", "plan"]
