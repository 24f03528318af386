"""Files that were named before a record said what they were read from keep their meaning."""

import sqlalchemy
from alembic import command

from app.kit import migrate
from app.kit.db import Database
from app.results.manifest import ModelShape, listed_files, render_manifest
from tests.fixtures.builders import Builders


def test_files_of_the_first_schema_are_reads_of_resid_post(
    database: Database, builders: Builders, database_url: str
) -> None:
    job = builders.a_job()
    config = migrate._config()
    engine = sqlalchemy.create_engine(
        migrate._sqlalchemy_url(database_url), poolclass=sqlalchemy.NullPool
    )
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        for kind, layer in (("results", None), ("activations", 3), ("captures", 5)):
            connection.execute(
                sqlalchemy.text(
                    """
                    INSERT INTO result_files (job_id, path, kind, layer, rows, bytes, sha256)
                    VALUES (:job, :kind, :kind, :layer, 1, 1, :sha)
                    """
                ),
                {"job": job.id, "kind": kind, "layer": layer, "sha": "a" * 64},
            )
        connection.commit()
        command.upgrade(config, "head")
        connection.commit()
    engine.dispose()
    files = database.run(lambda conn: listed_files(conn, job.id))
    found = {file.kind: (file.site, file.before, file.reduce, file.width) for file in files}
    assert found == {
        "results": (None, None, None, None),
        "activations": ("resid_post", False, "none", None),
        "captures": ("resid_post", False, "none", None),
    }
    manifest = render_manifest(job, files, ModelShape())
    assert b'"when": "after"' in manifest
