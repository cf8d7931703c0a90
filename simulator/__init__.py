"""A deterministic simulator of pipeline stages, rounds and scheduling policies."""
