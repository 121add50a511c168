"""Predicts what a step costs, and searches for the choices that make it fastest. Imports nothing from Lightning."""

from sp_lightning.planning.choose import Plan, choose
from sp_lightning.planning.cost import Choice, Prediction, predict
from sp_lightning.planning.estimate import Assumptions, Estimate, estimate
from sp_lightning.planning.planner import AutoPlanner
from sp_lightning.planning.report import Report, plan
from sp_lightning.planning.workload import Machine, UnitWork, Workload

__all__ = [
    "Assumptions",
    "AutoPlanner",
    "Choice",
    "Estimate",
    "Machine",
    "Plan",
    "Prediction",
    "Report",
    "UnitWork",
    "Workload",
    "choose",
    "estimate",
    "plan",
    "predict",
]
