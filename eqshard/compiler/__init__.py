"""The compiler's view: what a plan costs, on devices that need not be there."""

from ._collectives import Collective as Collective, collectives as collectives
from ._compare import Change as Change, Comparison as Comparison
from ._compile import compile_report as compile_report, compile_reports as compile_reports
from ._memory import Memory as Memory
from ._program import Program as Program
from ._report import CompileReport as CompileReport
from ._schedule import Segment as Segment
from ._targets import as_target as as_target, Target as Target, TargetError as TargetError
