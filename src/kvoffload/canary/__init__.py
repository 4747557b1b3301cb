"""End-to-end check of a server: a prompt must get the same answer from the cache as from computation.

Knows only the OpenAI API, so that it checks any server with any connector.
"""
