"""The dashboard: pages for operators at /admin, rendered here, read from Postgres alone."""
