"""Tools that know nothing of Jobs or tokens: database, ids, middleware, logs."""
