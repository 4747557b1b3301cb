"""What a replay found: the numbers, and a table that a person understands."""

from __future__ import annotations

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier did.

    Attributes:
        name: ``ram``, ``disk``, ``simulated``.
        hit_blocks: references that were served from here, not from a tier above.
        blocks_written, blocks_evicted: of RAM also what came up from below.
        bytes_written, bytes_read: 0 without data.
        mismatches_caught: blocks that were not what had been stored, and became misses.
    """

    name: str
    hit_blocks: int
    blocks_written: int
    blocks_evicted: int
    bytes_written: int
    bytes_read: int
    mismatches_caught: int


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one replay; the fields are the keys of its JSON object.

    A *block reference* is one block of one request. Hits are counted along the prefix: a request hits its
    leading run of blocks that the device, and then the tier, hold.

    Attributes:
        trace, policy, admission: what was replayed through what.
        capacity_blocks, device_blocks: sizes of the RAM tier, and of the device cache in front of it.
        store: when a block is offered to the tier.
        requests, block_refs, unique_blocks: size of the trace.
        skipped_lines: bad lines of the trace that were left out.
        prefix_hit_blocks: references served by device and tier together; prefix_hit_ratio: their share.
        device_hit_blocks, offload_hit_blocks: the same by place.
        block_hit_ratio: share of references whose block the tier held, at any depth; of a victim tier,
            device and tier together.
        infinite_hit_ratio: prefix-hit ratio of a cache that never evicts.
        optimum_hit_ratio: the most that any policy could reach from empty with the capacity of all tiers
            together, behind this device; what a disk holds from an earlier run may lift it above that.
        tokens, tokens_saved: prompt tokens in full blocks, and those that need not be computed.
        blocks_written, blocks_evicted, blocks_refused, blocks_dropped: what the tier did; refused by the
            admission rule or the policy, dropped for want of room.
        writes_per_ref: blocks written per block reference.
        block_bytes, bytes_stored, bytes_loaded: 0 without data.
        blocks_verified: blocks compared with their checksum when they were read.
        mismatches_caught: blocks found damaged by that, and turned into misses.
        mismatches_served: blocks handed out although their bytes were wrong. Anything but 0 is a bug.
        damage_injected: blocks damaged on purpose; those that were evicted first are never read.
        control_plane_s, data_plane_s: seconds spent deciding, and moving and checking bytes.
        decisions_sha256: digest of the decision log.
        version: of kvoffload.
        policy_state: what the policy says of itself at the end.
        tiers: RAM and what is behind it, top to bottom; their `hit_blocks` add up to `offload_hit_blocks`.
    """

    trace: str
    policy: str
    admission: str
    capacity_blocks: int
    device_blocks: int
    store: str
    requests: int
    block_refs: int
    unique_blocks: int
    skipped_lines: int
    prefix_hit_blocks: int
    prefix_hit_ratio: float
    device_hit_blocks: int
    offload_hit_blocks: int
    block_hit_ratio: float
    infinite_hit_ratio: float
    optimum_hit_ratio: float
    tokens: int
    tokens_saved: int
    blocks_written: int
    blocks_evicted: int
    blocks_refused: int
    blocks_dropped: int
    writes_per_ref: float
    block_bytes: int
    bytes_stored: int
    bytes_loaded: int
    blocks_verified: int
    mismatches_caught: int
    mismatches_served: int
    damage_injected: int
    control_plane_s: float
    data_plane_s: float
    decisions_sha256: str
    version: str
    policy_state: dict[str, float]
    tiers: list[TierReport]

    def to_json(self) -> bytes:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def to_table(self) -> RenderableType:
        """The report for a terminal."""
        return Group(self._hits(), self._work(), self._verdict())

    def _hits(self) -> Table:
        table = Table(
            title=f"{self.trace}: {self.requests:,} requests, {self.block_refs:,} block references, "
            f"{self.unique_blocks:,} unique blocks",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("Blocks came from")
        table.add_column("blocks", justify="right")
        table.add_column("share", justify="right")
        ram = f"({self.policy}, {self.admission}, {self.capacity_blocks:,} blocks)"
        rows = [("offload tier " + ram, self.offload_hit_blocks)]
        if len(self.tiers) > 1:
            rows = [(tier.name, tier.hit_blocks) for tier in self.tiers]
            rows[0] = ("ram " + ram, self.tiers[0].hit_blocks)
        rows.append(("computed anew", self.block_refs - self.prefix_hit_blocks))
        if self.device_blocks:
            rows.insert(0, (f"device cache (lru, {self.device_blocks:,} blocks)", self.device_hit_blocks))
        for place, blocks in rows:
            table.add_row(place, f"{blocks:,}", _percent(blocks, self.block_refs))
        return table

    def _work(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("The offload tier")
        table.add_column("blocks", justify="right")
        table.add_column("bytes", justify="right")
        with_data = self.block_bytes > 0
        stored, loaded = size(self.bytes_stored), size(self.bytes_loaded)
        table.add_row("stored", f"{self.blocks_written:,}", stored if with_data else "")
        table.add_row("evicted", f"{self.blocks_evicted:,}", "")
        table.add_row("refused", f"{self.blocks_refused:,}", "")
        if self.blocks_dropped:
            table.add_row("dropped: no room", f"{self.blocks_dropped:,}", "")
        if with_data:
            table.add_row("loaded and verified", f"{self.blocks_verified:,}", loaded)
            if self.damage_injected:
                table.add_row("damaged on purpose", f"{self.damage_injected:,}", "")
            table.add_row("mismatches caught, turned into misses", f"{self.mismatches_caught:,}", "")
            for tier in self.tiers[1:]:
                table.add_row(f"written to {tier.name}", f"{tier.blocks_written:,}", size(tier.bytes_written))
                table.add_row(f"mismatches caught by {tier.name}", f"{tier.mismatches_caught:,}", "")
            style = "bold red" if self.mismatches_served else "bold green"
            table.add_row("mismatches served", Text(f"{self.mismatches_served:,}", style), "")
        return table

    def _verdict(self) -> Text:
        per_ref_ns = self.control_plane_s * 1e9 / max(1, self.block_refs)
        saved = _percent(self.tokens_saved, self.tokens)
        text = Text()
        text.append(
            f"  {saved} of the prefill work is saved: {self.tokens_saved:,} of {self.tokens:,} tokens"
        )
        text.append(" need not be computed.\n")
        text.append(f"  A cache without limit would save {self.infinite_hit_ratio:.1%}")
        text.append(f", an optimal policy with this capacity {self.optimum_hit_ratio:.1%}.\n")
        if self.skipped_lines:
            text.append(f"  {self.skipped_lines:,} bad lines of the trace were left out.\n")
        text.append(f"  Deciding took {self.control_plane_s:.2f} s ({per_ref_ns:,.0f} ns a reference)")
        if self.block_bytes:
            text.append(f", moving and checking bytes {self.data_plane_s:.2f} s")
        text.append(f".\n  Decisions: sha256 {self.decisions_sha256[:16]}\n")
        return text


def size(num_bytes: int) -> str:
    """Bytes for people: ``3.2 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
