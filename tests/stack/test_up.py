"""`tiller up` from outside: real Postgres, Redis, API, reconciler and worker; a stub engine."""

import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time

import httpx
import pytest

from app.__main__ import main
from tests.stack.waiting import wait_for


def test_the_stack_starts_serves_and_leaves_nothing(start_stack, data_dir):
    stack = start_stack()
    credentials = stack.wait_ready()
    assert set(credentials) == {"api_base", "api_key", "admin_key", "dashboard_url"}
    assert credentials["api_base"].endswith("/v1")
    for name in ("credentials.json", "keys.json", "pepper"):
        assert stat.S_IMODE((data_dir / name).stat().st_mode) == 0o600
    root = credentials["api_base"].removesuffix("/v1")
    assert httpx.get(f"{root}/readyz").status_code == 200
    assert [model["id"] for model in stack.api("/models").json()["data"]] == ["bare"]
    started = time.monotonic()
    printed = stack.stop(signal.SIGINT)
    assert time.monotonic() - started < 25
    assert stack.process.returncode == 0, printed
    assert stack.processes() == []
    assert not (data_dir / "credentials.json").exists()
    for step in ("model", "postgres", "redis", "schema", "account", "api", "worker", "ready"):
        assert any(line.startswith(step) for line in printed.splitlines()), printed


def test_a_second_start_on_a_copy_of_the_folder_finds_the_old_data_and_keys(start_stack, data_dir):
    first = start_stack()
    before = first.wait_ready()
    usage = first.api("/usage").json()
    first.stop()
    copy = data_dir.with_name("copy")
    subprocess.run(["cp", "--archive", data_dir, copy], check=True)
    second = start_stack(folder=copy)
    after = second.wait_ready()
    assert after["api_key"] == before["api_key"]
    assert after["admin_key"] == before["admin_key"]
    assert second.api("/usage").json() == usage


def test_a_second_start_at_the_same_time_is_refused_by_name(start_stack, data_dir):
    first = start_stack()
    before = first.wait_ready()
    second = start_stack()
    printed = second.stop(signal.SIGCONT)
    assert second.process.returncode == 1
    assert f"process {first.process.pid}" in printed
    assert "--data-dir" in printed
    assert json.loads((data_dir / "credentials.json").read_text()) == before
    assert first.api("/models").status_code == 200


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("worker", "celeryd: bare"),
        ("api", "-m app serve"),
        ("reconciler", "-m app reconcile"),
        ("postgres", "bin/postgres -D"),
        ("redis", "redis-server"),
    ],
)
def test_a_part_that_is_killed_comes_back(long_running_stack, part, words):
    stack = long_running_stack
    old = wait_for(lambda: stack.find(words), part)
    old.kill()
    wait_for(lambda: (new := stack.find(words)) and new.pid != old.pid, f"a new {part}")
    wait_for(lambda: _is_ready(stack), "a stack that is ready again")


def test_chores_find_the_service_by_its_folder(long_running_stack, capsys):
    stack = long_running_stack
    folder = ["--data-dir", str(stack.data_dir)]
    assert main(["create-account", "--name", "lab", "--grant", "1234", *folder]) == 0
    key = json.loads(capsys.readouterr().out)["api_key"]
    address = json.loads((stack.data_dir / "credentials.json").read_text())["api_base"]
    answer = httpx.get(f"{address}/usage", headers={"authorization": f"Bearer {key}"})
    assert answer.json()["balance"] == 1234
    assert main(["verify", *folder]) == 0
    assert "0 faults found" in capsys.readouterr().out


def test_killing_the_supervisor_ends_everything_and_the_data_survives(start_stack, data_dir):
    first = start_stack()
    before = first.wait_ready()
    assert len(first.processes()) >= 6
    first.process.kill()
    first.process.wait()
    wait_for(lambda: not first.processes(), "the guardian to end everything", 10)
    assert not (data_dir / "credentials.json").exists()
    second = start_stack()
    assert second.wait_ready()["api_key"] == before["api_key"]
    assert second.api("/usage").status_code == 200


def test_killing_supervisor_and_guardian_is_repaired_by_the_next_start(start_stack):
    first = start_stack()
    first.wait_ready()
    first.find("app.stack.guardian").kill()
    first.process.kill()
    first.process.wait()
    left = first.processes()
    assert left
    second = start_stack()
    second.wait_ready()
    wait_for(lambda: not any(process.is_running() for process in left), "the old processes to end")


def test_a_real_database_and_redis_replace_the_embedded_ones(
    start_stack, data_dir, database_url, redis_url
):
    stack = start_stack(TILLER_DATABASE_URL=database_url, TILLER_REDIS_URL=redis_url)
    stack.wait_ready()
    assert stack.api("/usage").status_code == 200
    assert not (data_dir / "postgres").exists()
    assert not (data_dir / "redis").exists()
    assert stack.find("redis-server", str(data_dir)) is None


def test_a_port_in_use_is_refused_before_anything_starts(start_stack, data_dir):
    first = start_stack()
    port = first.wait_ready()["api_base"].split(":")[2].removesuffix("/v1")
    second = start_stack("--port", port, folder=data_dir.parent / "other")
    printed = second.stop(signal.SIGCONT)
    assert second.process.returncode == 1
    assert f"port {port}" in printed
    assert "--port" in printed


def test_an_unknown_model_is_refused_with_the_known_ones(start_stack):
    stack = start_stack("--model", "nope")
    printed = stack.stop(signal.SIGCONT)
    assert stack.process.returncode == 1
    assert "'nope'" in printed
    assert "bare" in printed
    assert stack.processes() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests here ran as an ordinary user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is missing")
def test_an_ordinary_user_can_run_it(start_stack, data_dir):
    user = pwd.getpwnam("nobody")
    for path in (data_dir, *data_dir.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    # May look into folders of others, where interpreter, checkout and pytest's folder may lie;
    # everything else is as for any user.
    stack = start_stack(
        prefix=[
            *("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"),
            *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
        ],
        HOME=str(data_dir),
        PYTHONDONTWRITEBYTECODE="1",
    )
    stack.wait_ready()
    assert {process.uids().real for process in stack.processes()} == {user.pw_uid}
    assert len(stack.processes()) >= 6
    printed = stack.stop(signal.SIGINT)
    assert stack.process.returncode == 0, printed
    assert stack.processes() == []


def _is_ready(stack) -> bool:
    try:
        credentials = json.loads((stack.data_dir / "credentials.json").read_text())
        root = credentials["api_base"].removesuffix("/v1")
        return httpx.get(f"{root}/readyz", timeout=5).status_code == 200
    except (httpx.HTTPError, OSError):
        return False
