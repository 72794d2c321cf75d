"""Everything that is run on this project: `nox -l` lists it."""

import pathlib
import shutil
import tempfile

import nox


nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
MOST_BYTES = 1_000_000  # of the wheel


def _group(name: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)


def _install(session: nox.Session, *more: str) -> None:
    session.install("-e", ".[rich,checkpoint]", *_group("test"), *more)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Trains a small transformer over 8 simulated devices."""
    session.install("-e", ".[rich]", "optax")
    session.run("python", "examples/quickstart.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite, on this Python and the newest JAX that it can have."""
    _install(session)
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session(python="3.11")
def tests_oldest(session: nox.Session) -> None:
    """The suite on the oldest supported pair."""
    _install(session, "jax==0.10.*")
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session(python="3.13")
def tests_newest(session: nox.Session) -> None:
    """The suite on the newest supported pair."""
    _install(session)
    session.install("--upgrade", "jax")
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The laws with many more examples, and the tests that are too slow for every day."""
    _install(session)
    laws = ("laws", "auto", "fsdp", "memory", "rules", "logical", "convert", "check", "value")
    files = [f"tests/test_{n}.py" for n in laws] + sorted(map(str, pathlib.Path("tests").glob("test_checkpoint_*.py")))
    session.run("pytest", "--hypothesis-profile=nightly", *files, *session.posargs)
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def tpu(session: nox.Session) -> None:
    """Compiles for TPUs that are not there."""
    _install(session, "-e", ".[tpu]")
    session.run("pytest", "-m", "tpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, by ruff."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types, by pyright; and that all of the public interface has one."""
    _install(session, "nox", *_group("types"))
    session.run("pyright")
    session.run("pyright", "--verifytypes", "eqshard", "--ignoreexternal")


@nox.session
def docs(session: nox.Session) -> None:
    """The pages in `docs/`, into `site/`; a broken link is an error."""
    session.install("-e", ".", *_group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def screenshots(session: nox.Session) -> None:
    """Pictures of the reports, by Chromium (which must be there), into `docs/img/`."""
    session.install("-e", ".[rich]", "pillow")
    session.run("python", "docs/make_screenshots.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed as ratios against named peers, into `benchmarks.md`: `nox -s bench -- apply plan`, or all."""
    _install(session)
    session.run("python", "tests/benchmarks/_collect.py", *session.posargs)


@nox.session
def zoo(session: nox.Session) -> None:
    """Layouts by the TPU compiler: hours, but for what is in its record. `nox -s zoo -- --cases mlp --cache FOLDER`."""
    _install(session, "-e", ".[tpu]", "eformer")
    session.run("python", "tests/benchmarks/zoo.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Makes the wheel and the sdist, checks them, and runs the quickstart with the wheel alone, outside the tree."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    made = [str(path) for path in sorted(pathlib.Path("dist").iterdir())]
    session.run("twine", "check", "--strict", *made)
    wheel = next(pathlib.Path("dist").glob("*.whl")).resolve()
    if wheel.stat().st_size > MOST_BYTES:
        session.error(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}.")
    quickstart = pathlib.Path("examples/quickstart.py").resolve()
    outside = pathlib.Path(tempfile.mkdtemp(prefix="eqshard-build-"))
    session.run("python", "-m", "venv", str(outside / "empty"))
    python = str(outside / "empty" / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", f"{wheel}", external=True)
    with session.chdir(outside):
        here = f"import eqshard, pathlib; assert pathlib.Path(eqshard.__file__).is_relative_to({str(outside)!r})"
        session.run(python, "-c", f"{here}; print('eqshard', eqshard.__version__)", external=True)
        session.run(str(outside / "empty" / "bin" / "eqshard"), "demo", external=True)
        session.run(python, "-m", "pip", "install", "-q", f"{wheel}[rich]", "optax", external=True)
        session.run(python, str(quickstart), external=True)
    shutil.rmtree(outside)
