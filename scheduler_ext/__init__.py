"""The scheduler side: the manifest of a round, and the scheduler that writes it."""
