"""Results keep the layouts of the arguments that they replace, whatever the structure of the results."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from result_forms import FORMS, make_args, make_step

import eqshard


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def held(trees):
    """Bytes of arrays on the first device."""
    return sum(s.data.nbytes for x in arrays(trees) for s in x.addressable_shards if s.device == jax.devices()[0])


@pytest.fixture(scope="module")
def planned():
    """The plan of a form on an axis type, made once."""
    found = {}

    def plan(name, axis_type):
        if (name, axis_type) not in found:
            form = FORMS[name]
            mesh = eqshard.MeshSpec({"data": 2, "tp": 4}, axis_type=axis_type, chip="v5e")
            step, args = make_step(form), make_args(form)
            found[name, axis_type] = eqshard.step_plan(step, *args, mesh=mesh, objective="memory")
        return found[name, axis_type]

    return plan


@pytest.mark.parametrize("jit", [eqx.filter_jit, eqshard.filter_jit])
@pytest.mark.parametrize("name", FORMS)
def test_layouts_of_results(name, axis_type, jit, planned):
    form, plan = FORMS[name], planned(name, axis_type)
    step = eqshard.constrain(plan, make_step(form))
    model, state, x = (eqshard.apply(p, a) for p, a in zip(plan.args, make_args(form)))
    before = [leaf.sharding for leaf in arrays((model, state))]
    assert any(leaf.sharding.spec != P() for leaf in arrays(model))
    begun = held((model, state))
    train = jit(step, donate="all") if jit is eqx.filter_jit else jit(step, in_plans=plan.args, donate="all")
    batch = lambda: eqshard.apply(plan.args[2], jnp.copy(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            given = arrays((model, state))
            model, state = form.read(train(model, state, batch()))
            assert all(leaf.is_deleted() for leaf in given)
    for leaf, sharding in zip(arrays((model, state)), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert held((model, state)) == begun
    assert not plan.notes


@pytest.mark.parametrize("name", FORMS)
def test_memory_of_results(name, axis_type, planned):
    """Everything that is returned takes the memory of what was given, and the peak is near the predicted one."""
    form, plan = FORMS[name], planned(name, axis_type)
    args = [eqshard.apply(p, a) for p, a in zip(plan.args, make_args(form))]
    leaves, treedef = jax.tree.flatten(eqx.filter(args, eqx.is_array))
    static = eqx.filter(args, eqx.is_array, inverse=True)
    run = lambda *leaves: arrays(
        eqshard.constrain(plan, make_step(form))(*eqx.combine(jax.tree.unflatten(treedef, leaves), static))
    )
    memory = jax.jit(run, donate_argnums=range(len(leaves) - 1)).lower(*leaves).compile().memory_analysis()
    assert memory.alias_size_in_bytes == held(args[:2])
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    used -= memory.alias_size_in_bytes
    print(name, axis_type, used, plan.bytes_per_device, used / plan.bytes_per_device)
    assert used == pytest.approx(plan.bytes_per_device, rel=0.2)
