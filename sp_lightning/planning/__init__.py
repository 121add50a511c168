"""What a step costs, and which choices make it cheapest. Knows the engine, and nothing of Lightning."""

from sp_lightning.planning.choose import Plan, choose
from sp_lightning.planning.cost import Choice, Prediction, predict
from sp_lightning.planning.workload import Machine, UnitWork, Workload

__all__ = ["Choice", "Machine", "Plan", "Prediction", "UnitWork", "Workload", "choose", "predict"]
