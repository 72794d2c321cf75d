"""What can go wrong, each with its own name."""


class ShardingError(ValueError):
    """Every error that eqshard raises on purpose.

    ```python
    import eqshard
    try:
        eqshard.MeshSpec(data=0)
    except eqshard.ShardingError as error:
        print(error)
    ```
    """


class MeshError(ShardingError):
    """A mesh that cannot be described or built."""


class UnknownAxisError(ShardingError):
    """A spec or a call names an axis that the mesh, or the logical names, lack."""


class DuplicateAxisError(ShardingError):
    """A spec uses one mesh axis more than once."""


class RankError(ShardingError):
    """A spec has more entries than the array has dimensions."""


class IndivisibleError(ShardingError):
    """A dimension does not divide evenly over its mesh axes."""


class MismatchError(ShardingError):
    """A tree does not match its plan."""


class FormatError(ShardingError):
    """A file or dictionary is not what it says it is."""


class DonatedError(ShardingError):
    """An argument was donated to an earlier call, so its buffers are gone."""


class ProcessError(ShardingError):
    """Processes that should agree do not, or one of them does not answer."""
