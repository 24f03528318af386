"""Jobs, their requests and shards: intake, leases, life cycle, progress."""
