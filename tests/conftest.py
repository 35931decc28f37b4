"""Tests run on four virtual CPU devices, or on what JAX_PLATFORMS names."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A busy machine may keep a virtual device waiting for longer than the 40 s after which XLA aborts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    + " --xla_cpu_collective_timeout_seconds=300"
    # The workers fill the cores; code split over threads takes a sixth longer to compile on them.
    + " --xla_cpu_parallel_codegen_split_count=1"
)
# Compiled programs are kept between runs and shared by the workers.
cache = Path(__file__).parents[1] / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# A background job of a plain shell starts with Ctrl-C ignored, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 4)


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if item.config.getoption("no_skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"--no-skips: {report.longrepr[2]}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _shared_programs():
    from srpo_jax.engine import engine
    from srpo_jax.learner import learner
    from srpo_jax.run import build
    from tests.shared_programs import shared

    with pytest.MonkeyPatch.context() as patch:
        for module in (engine, learner):
            (name,) = (name for name in vars(module) if name.endswith("_programs"))
            patch.setattr(module, name, shared(getattr(module, name)))
        # An optimizer is a pair of functions: programs are equal only where it is the same pair.
        patch.setattr(build, "make_optimizer", shared(build.make_optimizer))
        yield


@pytest.fixture(scope="session")
def _tests_run():
    return itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs(_tests_run):
    """Looked at after every tenth test: a look takes some milliseconds."""
    yield
    if next(_tests_run) % 10 == 0:
        from tests.shared_programs import forget_many_programs

        forget_many_programs()


@pytest.fixture
def single_device(monkeypatch):
    """Runs in this process use one of its devices."""
    from srpo_jax.run import build
    from tests.learner_cases import one_device

    monkeypatch.setattr(build, "make_mesh", lambda **_: one_device())


@pytest.fixture
def one_device_here(single_device, monkeypatch, tmp_path):
    """What runs write by default goes to a temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pool():
    from envs.math.grading import GraderPool

    with GraderPool(workers=2) as pool:
        yield pool


@pytest.fixture
def h100():
    """Traces for a GPU that is not there: lowering to Triton asks which one, from jax 0.12 on."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


@pytest.fixture(scope="session")
def v5e():
    """The devices of a v5e:2x2 that libtpu compiles for, with no TPU attached."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu")
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by several test workers; no chip is used
        if not os.environ.get("TPU_LIBRARY_PATH"):
            patch.delenv("TPU_LIBRARY_PATH", raising=False)
        yield topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


@pytest.fixture(scope="session")
def v5e_4x4(v5e):
    """The devices of a v5e:4x4, four hosts of four chips."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
