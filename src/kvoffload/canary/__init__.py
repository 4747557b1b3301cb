"""End-to-end check of a server: a prompt must get the same answer from the cache as from computation.

The check uses only the OpenAI API, so it works with any server and any connector.
"""
