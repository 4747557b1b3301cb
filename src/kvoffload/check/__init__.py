"""Comparison of a running server's metrics with the replay of the server's own recording."""
