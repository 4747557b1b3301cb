"""Tiers that machines share, behind a network. Each file is one idea:

`identity` names and seals blocks, `hints` remembers what was learnt of them, `circuit` leaves a dead node
alone, `resp` speaks to one server, `batches` are what is said, `line` is a thread and its connection, `tier`
is what the scheduler sees. Of a cluster each `node` is one, with some of the `divisions`; `cluster` has the
map. Byte by byte in docs/formats.md, for people in docs/tiers.md.
"""
