"""Tiers that machines share, behind a network.

`tier` is the interface for the scheduler. A tier consists of a `peer` (handshake, epoch, health), `jobs`
(exchanges in flight and their threads), a `presence` cache, a `write_log` and, for a bucket, `groups`. A
`dialect` performs the `exchanges` over a connection: `valkey.protocol` for RESP, `s3.protocol` for S3.
docs/formats.md describes the formats, docs/tiers.md the usage.
"""
