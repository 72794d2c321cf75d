"""Plans for people: text, rich tables, notebooks, one HTML page, pictures of a leaf."""

from ._leaf import visualize_leaf as visualize_leaf
from ._report import report as report
