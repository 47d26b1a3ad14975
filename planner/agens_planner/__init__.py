"""Shapes to bytes: the memory plan and its report. Standard library and numpy only.

    plan(shapes, profile, device, host, options)      MemoryPlan, or PlanRefused with the numbers

Line names: lines.py. Numbers that are not shapes: constants.py. Search and the order of policies: solve.py.
"""

from agens_planner.checkpoint import read_checkpoint, read_drafter, read_mtp
from agens_planner.errors import PlannerError, PlannerInputError
from agens_planner.facts import DeviceFacts, HostFacts
from agens_planner.fit import Question, Suggestion, suggest
from agens_planner.lines import describe, weight_line
from agens_planner.plan import MemoryLine, MemoryPlan, PlanRefused
from agens_planner.profile import Profile, choose_profile, environment_overrides, load_profile
from agens_planner.shapes import ModelShapes, TensorSpec, classify, normalise, with_packed
from agens_planner.solve import PlanOptions, plan
from agens_planner.units import format_size, parse_size

__all__ = [
    "plan", "PlanOptions", "MemoryPlan", "MemoryLine", "Question", "Suggestion", "suggest",
    "Profile", "load_profile", "choose_profile", "environment_overrides",
    "DeviceFacts", "HostFacts", "read_checkpoint", "read_drafter", "read_mtp",
    "ModelShapes", "TensorSpec", "with_packed", "classify", "normalise", "weight_line", "describe",
    "parse_size", "format_size", "PlannerError", "PlannerInputError", "PlanRefused",
]  # fmt: skip
