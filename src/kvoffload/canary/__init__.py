"""End-to-end check of a server: the answer to a prompt must be the same with cached KV as with computed KV.

The check uses only the OpenAI API, so it works with any server and any connector.
"""
