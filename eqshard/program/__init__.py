"""Plans from the program: a step is traced, its values and operations priced, and the cheapest layouts written in."""

from ._constrain import constrain as constrain
from ._planner import step_plan as step_plan
from ._step import StepPlan as StepPlan
