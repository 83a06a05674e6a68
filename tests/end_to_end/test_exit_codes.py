"""Exit codes, also where the system has libibverbs and NIXL's wheel crashes in a destructor at interpreter exit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.programs import run
from tests.end_to_end.serving import call_for, prompt_of, serving

PACKAGES = ("libibverbs1", "ibverbs-providers", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
APT_SECONDS = 60.0
MODEL = "tiny-gpt-oss"
MAKE_AGENT = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("exit", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
"""
pytestmark = pytest.mark.xdist_group("exit-codes")


def apt_get(*arguments: str, folder: Path) -> bool:
    command = ("apt-get", "-q", *arguments)
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=APT_SECONDS, check=False).returncode == 0


@pytest.fixture(scope="module")
def with_ibverbs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Environment in which libibverbs is found, as on an InfiniBand host. Nothing is installed."""
    folder = tmp_path_factory.mktemp("ibverbs")
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("libibverbs is taken from a Debian package, and this machine has no apt-get")
    downloaded = apt_get("download", *PACKAGES, folder=folder) or (
        apt_get("update", folder=folder) and apt_get("download", *PACKAGES, folder=folder)
    )
    if not downloaded:
        pytest.skip("libibverbs is taken from a Debian package, and it cannot be downloaded here")
    for package in folder.glob("*.deb"):
        subprocess.run(("dpkg", "-x", str(package), str(folder / "root")), check=True, timeout=APT_SECONDS)
    libraries = sorted({str(path.parent) for path in (folder / "root").rglob("lib*.so.*")})
    return {"LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])}


def test_bare_interpreter_crashes_at_exit_with_ibverbs(with_ibverbs: Mapping[str, str]) -> None:
    """Without this crash the tests below would prove nothing; when it is gone, the care can go too."""
    ended = subprocess.run(
        (sys.executable, "-c", MAKE_AGENT), env={**os.environ, **with_ibverbs}, timeout=60.0, check=False
    )
    assert ended.returncode == -signal.SIGSEGV


def test_demo_and_its_workers_exit_well_with_ibverbs(with_ibverbs: Mapping[str, str]) -> None:
    ended = run("demo", "--model", MODEL, "--max-new-tokens", "4", "--json", environ=with_ibverbs)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["identical"] is True


def test_worker_exit_codes_are_right_with_ibverbs(
    with_ibverbs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_ibverbs.items():
        monkeypatch.setenv(name, value)
    check_worker_exit_codes()


def test_worker_exit_codes_are_right() -> None:
    check_worker_exit_codes()


def check_worker_exit_codes() -> None:
    """Stopped by SIGTERM: 0. Interrupted: 130."""
    with serving(model=MODEL) as service:
        service.ask(call_for(prompt_of(40), 4))
        for name, number, code in (("decode-0", signal.SIGTERM, 0), ("prefill-0", signal.SIGINT, 130)):
            child = service.worker(name)
            child.process.send_signal(number)
            assert child.process.wait(20.0) == code, child.last_words()
            service.cluster.children.remove(child)
        frontend = service.cluster.children[0]
        frontend.process.send_signal(signal.SIGTERM)
        assert frontend.process.wait(20.0) == 0, frontend.last_words()
        service.cluster.children.clear()
