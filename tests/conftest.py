import jax
from hypothesis import HealthCheck, settings


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_common = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=30, **_common)
settings.register_profile("nightly", max_examples=500, **_common)
settings.load_profile("ci")

import pytest  # noqa: E402


@pytest.fixture(params=["auto", "explicit"])
def axis_type(request):
    return request.param


@pytest.fixture
def make_mesh(axis_type):
    """Makes a MeshSpec of the axis type under test: `make_mesh(dp=2, tp=4)`."""
    import eqshard

    return lambda **sizes: eqshard.MeshSpec(sizes, axis_type=axis_type)


@pytest.fixture
def m24(make_mesh):
    return make_mesh(dp=2, tp=4)


@pytest.fixture
def m222(make_mesh):
    return make_mesh(dp=2, fsdp=2, tp=2)
