"""`my_model.py:make`: the user's file, run, and what it makes as shapes, so that any size costs nothing."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer

from .._errors import ShardingError
from .._tree import array_leaves, did_you_mean
from ._words import UsageError


_MODULE = "__eqshard__"  # what the user's file is called, as a script is called __main__


class UserError(ShardingError):
    """The user's own code raised."""


@dataclass(frozen=True)
class Step:
    """A step to plan or compile: a function, its arguments, and their plans if the user has some."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    plans: Any = None


def load_shapes(source: str) -> Any:
    """The model that `source` names: an object, or what a function returns, as shapes."""
    made = _made(source)
    if not array_leaves(made):
        raise UsageError(f"{source} gives a {type(made).__name__} without an array: nothing to lay out.")
    return made


def load_step(source: str, *, shapes: bool = True) -> Step:
    """The step that `source` names: (function, arguments), or (function, arguments, plans); with arrays as shapes."""
    made = _made(source, shapes=shapes)
    if not (
        isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], (tuple, list))
    ):
        raise UsageError(
            f"{source} gives a {type(made).__name__}: expected (function, arguments), as in\n"
            f"  def {source.rpartition(':')[2]}():\n      return train_step, (model, batch)"
        )
    if any(map(_is_traced, _held(made[0]))):
        raise UsageError(
            f"the step of {source} uses an array that was made there and is not among its arguments. Return it as one: "
            "return train_step, (model, that_array, batch)."
        )
    return Step(_printing_to_stderr(made[0]), tuple(made[1]), *made[2:])


def _printing_to_stderr(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, with what it prints on standard error: standard output is for the answer, which may be JSON."""

    @functools.wraps(fn)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return fn(*args, **kwargs)

    return quiet


def _held(fn: Any) -> list[Any]:
    """What a function keeps from where it was made."""
    if isinstance(fn, functools.partial):
        return [*fn.args, *fn.keywords.values(), *_held(fn.func)]
    cells = [cell.cell_contents for cell in getattr(inspect.unwrap(fn), "__closure__", None) or ()]
    return [*cells, *(held for cell in cells if inspect.isfunction(cell) for held in _held(cell))]


def _is_traced(x: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


def _made(source: str, *, shapes: bool = True) -> Any:
    found = _named(source)
    if not _is_maker(found):
        return found
    call = _callable(found, source)
    return _run((lambda: eqx.filter_eval_shape(call)) if shapes else call, source)


def _is_maker(x: Any) -> bool:
    return inspect.isroutine(x) or inspect.isclass(x) or isinstance(x, functools.partial) or hasattr(x, "__wrapped__")


def _callable(fn: Any, source: str) -> Callable[[], Any]:
    """`fn` without arguments; one that asks for a `key` alone is given one."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return fn
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if required == ["key"]:
        return functools.partial(fn, key=jax.random.key(0))
    if required:
        name = source.rpartition(":")[2]
        raise UsageError(
            f"{source} must be callable without arguments (or with `key` alone); it asks for {', '.join(required)}. "
            f"Write a function that calls it: def make(): return {name}(...)."
        )
    return fn


def _named(source: str) -> Any:
    file, colon, name = source.rpartition(":")
    if not colon or not file or not name:
        raise UsageError(f"cannot read {source!r}: write a file and a name in it, as my_model.py:make.")
    module = _run(lambda: _module(file), source)
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise UsageError(f"no {name!r} in {file}." + did_you_mean(name, names))
    return getattr(module, name)


def _module(file: str) -> Any:
    if not file.endswith(".py"):
        sys.path.insert(0, str(pathlib.Path.cwd()))
        try:
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            if error.name is None or not (file == error.name or file.startswith(error.name + ".")):
                raise
            raise UsageError(f"no module {file!r}; for a file, write its ending too: {file}.py:NAME.") from None
    path = pathlib.Path(file)
    if not path.is_file():
        raise UsageError(f"no file {file}.")
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _run(call: Callable[[], Any], source: str) -> Any:
    """What the user's code gives; what it raises, with the place in its file and without our frames."""
    try:
        return _printing_to_stderr(call)()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{_place(error, source)}: {type(error).__name__}: {error}") from error


def _place(error: BaseException, source: str) -> str:
    file = source.rpartition(":")[0]
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{file}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if f.filename.endswith(pathlib.Path(file).name)]
    return f"{file}, line {here[-1].lineno}, in {here[-1].name}" if here else file
