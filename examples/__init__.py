"""Studies that use nothing but the service's REST API, through the client library."""
