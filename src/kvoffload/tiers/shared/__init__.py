"""Tiers that machines share, behind a network.

`tier` is the scheduler's interface. It consists of a `peer` (handshake, epoch, health), `jobs` (exchanges in
flight and the threads that perform them), a `presence` cache, a `write_log` and, for a bucket, `groups`. A
`protocol` performs the `exchanges` over a connection: `valkey.protocol` for RESP, `s3.protocol` for S3.
Formats are in docs/formats.md, usage in docs/tiers.md.
"""
