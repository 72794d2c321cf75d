"""One of the processes that `processes.run_processes` starts: `python process_main.py FOLDER INDEX`."""

import importlib.util
import os
import pathlib
import pickle
import sys
import traceback
import warnings

import jax


def main(folder: str, index: str) -> None:
    where, i = pathlib.Path(folder), int(index)
    source, name, args, n, devices, port, heartbeat, checked = pickle.loads((where / "job").read_bytes())
    jax.config.update("jax_num_cpu_devices", devices)
    if n > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address,
            n,
            i,
            coordinator_bind_address=address,
            initialization_timeout=60,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=60,
        )
    if checked:
        be_strict()
    spec = importlib.util.spec_from_file_location(pathlib.Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    value = getattr(module, name)(*args)
    (where / f"result{i}").write_bytes(pickle.dumps(value))


def be_strict() -> None:
    """As `conftest.py` and pytest's options are."""
    from jaxtyping import install_import_hook

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    with install_import_hook("eqshard", "beartype.beartype"):
        import eqshard  # noqa: F401
    warnings.simplefilter("error")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001  whatever it was, the others must not wait for this process at their exit
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
