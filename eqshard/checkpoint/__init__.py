"""Checkpoints: save from any mesh, restore onto any other. Needs the extra `eqshard[checkpoint]`."""

from ._contents import read_plan as read_plan
from ._restore import restore as restore
from ._save import save as save, Saving as Saving
