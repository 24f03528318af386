"""The embedded servers: any folder, any user, any end of their process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
import redis

from app.stack.postgres import EmbeddedPostgres, PostgresStartError
from app.stack.redis import EmbeddedRedis, RedisStartError
from tests.fixtures.servers import kill

# A path too long for a socket, that an unprivileged user cannot even enter.
LONG = "with spaces and ünïcode/" + "deep/" * 25


@pytest.fixture
def folder(tmp_path: Path):
    tmp_path.chmod(0o700)
    return tmp_path / LONG / "data"


def test_postgres_serves_from_a_folder_that_is_long_odd_and_closed(folder: Path) -> None:
    server = EmbeddedPostgres(folder)
    assert server.pid is None
    url = server.start()
    try:
        assert server.start() == url, "a second start finds it running"
        with psycopg.connect(url) as conn:
            row = conn.execute(
                "SELECT current_setting('fsync'), current_setting('server_encoding'), "
                "current_setting('listen_addresses')"
            ).fetchone()
            assert row == ("on", "UTF8", "")
            conn.execute("CREATE TABLE kept (n integer)")
    finally:
        server.stop()
    assert server.pid is None
    again = EmbeddedPostgres(folder)
    with psycopg.connect(again.start()) as conn:
        conn.execute("SELECT n FROM kept")
    again.stop()


def test_postgres_keeps_its_url_and_what_was_committed_when_killed(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres")
    url = server.start()
    try:
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CREATE TABLE kept (n integer)")
            kill(server)
            assert server.start() == url
        with psycopg.connect(url) as conn:
            assert conn.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    finally:
        server.stop()


def test_a_server_whose_supervisor_was_killed_is_ended_by_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "postgres"
    script = (
        "import sys, time; from pathlib import Path; from app.stack.postgres import *; "
        "s = EmbeddedPostgres(Path(sys.argv[1])); s.start(); print(s.pid, flush=True); "
        "time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as supervisor:
        assert supervisor.stdout is not None
        orphan = int(supervisor.stdout.readline())
        supervisor.kill()
    server = EmbeddedPostgres(folder)
    server.start()
    try:
        assert server.pid not in (None, orphan)
        wait_until_gone(orphan)
    finally:
        server.stop()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


def test_an_unfinished_initdb_is_made_anew(tmp_path: Path) -> None:
    half = tmp_path / "postgres" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path / "postgres")
    server.start()
    server.stop()


def test_a_broken_cluster_is_reported_with_the_end_of_its_log(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("app.stack.postgres.REFUSED_SECONDS_MAX", 0.5)
    folder = tmp_path / "postgres"
    server = EmbeddedPostgres(folder)
    server.start()
    server.stop()
    (folder / "data" / "global" / "pg_control").write_bytes(b"")
    with pytest.raises(PostgresStartError, match="pg_control"):
        server.start()
    server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_postgres_runs_for_an_ordinary_user_too(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"tiller-user-test-{os.getpid()}"
    script = (
        "import os, sys; from pathlib import Path; from app.stack.postgres import *; "
        "import psycopg; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "s = EmbeddedPostgres(Path(sys.argv[1]) / 'postgres'); "
        "print(psycopg.connect(s.start()).execute('SELECT 1').fetchone(), os.geteuid()); s.stop()"
    )
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    try:
        result = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert result.stdout == "(1,) 65534\n", result.stderr


def test_redis_serves_by_socket_only_and_evicts_nothing(folder: Path) -> None:
    server = EmbeddedRedis(folder)
    assert server.pid is None
    url = server.start()
    try:
        assert server.start() == url
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("save") == {"save": ""}
            client.set("lost", "1")
            kill(server)
            assert server.start() == url
            assert client.get("lost") is None
    finally:
        server.stop()
    assert server.pid is None


def test_a_redis_that_cannot_start_says_why(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("app.stack.redis.MEMORY_MAX", "not a size")
    with pytest.raises(RedisStartError, match="maxmemory"):
        EmbeddedRedis(tmp_path / "redis").start()
