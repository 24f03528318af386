"""The reconciler: repairs liveness in small idempotent steps, and audits the invariants."""
