"""Plans from the program: a step is traced, its values and operations priced, and the cheapest layouts written in."""

from ._best_mesh import best_mesh as best_mesh, BestMesh as BestMesh, Candidate as Candidate
from ._constrain import constrain as constrain
from ._planner import step_plan as step_plan
from ._step import Alternative as Alternative, Cost as Cost, Dim as Dim, StepPlan as StepPlan
