"""Tiers that machines share, behind a network.

- `remote_tier` is the interface for the scheduler.
- `peer` owns epoch, health and handshakes of a server. `jobs` owns the exchanges in flight and their threads.
- `presence` caches which blocks the server has, and `write_log` lists written blocks. `groups` is for
  buckets.
- `server` describes a server. Its dialect performs `exchanges`: `valkey.protocol` for RESP, `s3.protocol`
  for S3.

docs/formats.md describes the formats, docs/tiers.md the usage.
"""
