"""Tiers that machines share, behind a network. Each file is one idea:

`identity` names and seals blocks, `hints` remembers what was learnt of them, `circuit` leaves a dead node
alone, `line` is a thread and its connection, `tier` is what the scheduler sees. `resp` speaks to one server,
and `batches` are what is said to it. Of a cluster each `node` is such a tier, with some of the `divisions`;
`cluster` has the map. `bucket` speaks to an object store, `objects` are what is said to it, `places` tells
which blocks an object has, and `packed` is what the scheduler sees. Byte by byte in docs/formats.md, for
people in docs/tiers.md.
"""
