"""Predicts what a step costs, and searches for the choices that make it fastest. Imports nothing from Lightning."""

from sp_lightning.planning.choose import choose
from sp_lightning.planning.cost import Choice, Machine, UnitWork, Workload
from sp_lightning.planning.estimate import Assumptions
from sp_lightning.planning.planner import AutoPlanner
from sp_lightning.planning.report import plan
from sp_lightning.planning.step import predict

__all__ = ["Assumptions", "AutoPlanner", "Choice", "Machine", "UnitWork", "Workload", "choose", "plan", "predict"]
