"""Checkpoints: save from any mesh, restore onto any other. Needs the extra `eqshard[checkpoint]`."""

from ._contents import read_plan as read_plan
from ._index_plan import plan_from_index as plan_from_index
from ._restore import restore as restore
from ._safetensors import load_safetensors as load_safetensors, save_safetensors as save_safetensors
from ._save import save as save, Saving as Saving
from ._shardings import apply_shardings as apply_shardings, Comparison as Comparison, same_structure as same_structure
from ._steps import Checkpoints as Checkpoints, remove as remove, Writer as Writer
from ._stored import StoredLeaf as StoredLeaf
