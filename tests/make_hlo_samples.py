"""What the TPU compiler makes of the programs with a known answer, as texts that tests can read without it.

python tests/make_hlo_samples.py
"""

import gzip
import pathlib
import re

import jax


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)

from compiler_programs import PROGRAMS  # noqa: E402

import eqshard  # noqa: E402


FOLDER = pathlib.Path(__file__).parent / "hlo_samples"
TARGET, MESH, DTYPE = "v5e:4x4", eqshard.MeshSpec(dp=4, tp=4), "bfloat16"


def main() -> None:
    """Writes one file for each program."""
    FOLDER.mkdir(exist_ok=True)
    for program in PROGRAMS:
        known = program(MESH, DTYPE)
        report = eqshard.compile_report(known.fn, *known.args, plans=known.plans, target=TARGET)
        text = re.sub(r'"/[^"]*/([^"/]*)"', r'"\1"', report.hlo)  # where files lie on this machine is nobody's affair
        file = FOLDER / f"{program.__name__}.txt.gz"
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{file.name}: {len(text)} characters, {len(report.collectives)} collectives")


if __name__ == "__main__":
    main()
