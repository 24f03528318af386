"""Everything that Postgres holds, as one value: equal before and after means nothing changed."""

from psycopg import sql

from app.kit.db import Database

# A key's row says when it was last used; that alone a refusal may write.
COUNTED = frozenset({"api_keys"})


def everything(database: Database) -> dict[str, tuple[int, str | None]]:
    """Give, for each table, how many rows it has and a digest of all they say."""
    with database.transaction() as conn:
        tables = [
            row["tablename"]
            for row in conn.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
            )
        ]
        found = {}
        for table in tables:
            row = conn.execute(
                sql.SQL(
                    "SELECT count(*) AS rows, md5(string_agg(t::text, '|' ORDER BY t::text)) AS md5"
                    " FROM {} AS t"
                ).format(sql.Identifier(table))
            ).fetchone()
            assert row is not None
            found[table] = (row["rows"], None if table in COUNTED else row["md5"])
    assert {"accounts", "holds", "entries", "completions", "vectors"} <= found.keys()
    return found
