"""Tiers that machines share, behind a network.

- `remote_tier` is the interface for the scheduler.
- `peer` owns epoch, health and handshakes of a server. `jobs` owns the exchanges in flight and their threads.
- `presence` caches which blocks the server has, and `write_log` lists written blocks. `groups` assigns
  consecutive blocks to the objects of a bucket.
- `server` describes a server. Its dialect performs `exchanges`: `valkey.protocol` for RESP, `s3.protocol`
  for S3.

docs/formats.md describes the formats, docs/tiers.md the usage.
"""
