"""The optional libraries, imported when they are first needed."""

import importlib
import importlib.util
from typing import Any

from .._errors import ShardingError


_INSTALL = {"orbax.checkpoint": "orbax-checkpoint", "tensorstore": "tensorstore", "safetensors": "safetensors"}


def library(name: str) -> Any:
    """The module `name`; where it is not installed, an error that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if not (name == missing or name.startswith(missing + ".")):
            raise  # it is there, and broken
        package = _INSTALL.get(name, _INSTALL.get(name.split(".")[0], name))
        raise ShardingError(
            f"this needs the package {package}, which is not installed: `pip install 'eqshard[checkpoint]'` brings "
            "all that `eqshard.checkpoint` uses."
        ) from None


def has_library(name: str) -> bool:
    """Whether `name` can be imported."""
    return importlib.util.find_spec(name) is not None
