"""Predicts what a step costs, and searches for the choices that make it fastest. Imports nothing from Lightning."""

from sp_lightning.planning.choose import choose
from sp_lightning.planning.clock import predict
from sp_lightning.planning.estimate import Assumptions
from sp_lightning.planning.planner import AutoPlanner
from sp_lightning.planning.report import plan
from sp_lightning.planning.work import Choice, Machine, UnitWork, Workload

__all__ = ["Assumptions", "AutoPlanner", "Choice", "Machine", "UnitWork", "Workload", "choose", "plan", "predict"]
