"""One validator for Completions and Jobs, and the frozen request that it makes."""
