"""Reports about Valkey servers and the contents of a namespace, for `kvoffload tier`.

Writes only one test key to each server. It is deleted at once; if this fails, it expires after a minute.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.tiers.producer_text import MAX_BYTES, unpack
from kvoffload.tiers.shared.exchanges import Persistence
from kvoffload.tiers.shared.identity import FORMAT, HEADER_BYTES, is_rest, rest_names
from kvoffload.tiers.shared.remote_errors import ProtocolError, ServerError
from kvoffload.tiers.valkey.cluster_map import Address, MapQuestion
from kvoffload.tiers.valkey.divisions import tags
from kvoffload.tiers.valkey.persistence import facts_of, pairs_of, persistence_of
from kvoffload.tiers.valkey.resp import Answer, Connection, command

Connect = Callable[[Address, float], Connection]

_ROUNDS = 5
_FORGOTTEN_AFTER_S = b"60"
_ENOUGH_SAMPLES = 64
_NAMES_A_CALL, _LENGTHS = b"1000", 20
_REPLY_S = 5.0
"""Longest wait for replies, in seconds. A server that has not replied by then counts as hanging."""
MOST_NAMES = 20_000
"""Number of keys on each node after which a scan stops."""


@dataclass(kw_only=True)
class ServerReport:
    """Facts about one server. A fact is None if the connected user may not read it.

    Attributes:
        round_trip_s: shortest of five round trips.
        refused: necessary commands that the connected user may not run, each with the server's reply.
        warnings: sentences about unsuitable settings.
        persistence: ``yes``, ``no``, or ``not known``.
        num_names: number of all keys on the server.
        hits, misses, evicted: counts since the start of the server.
    """

    address: str
    round_trip_s: float
    refused: list[str]
    warnings: list[str] = field(default_factory=list)
    version: str | None = None
    role: str | None = None
    allocator: str | None = None
    uptime_s: int | None = None
    num_replicas: int | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    eviction_policy: str | None = None
    num_names: int | None = None
    hits: int | None = None
    misses: int | None = None
    evicted: int | None = None
    persistence: str = Persistence.UNKNOWN.value

    @property
    def is_fit(self) -> bool:
        """True if the server can be a tier."""
        return not self.refused and self.role != "slave"


@dataclass(kw_only=True)
class ProducerReport:
    """Counts of the blocks of one producer that a scan of a namespace has found.

    Attributes:
        producer: identity of the producer, 32 hexadecimal digits.
        block_bytes: bytes of a block; None if no block was sampled.
        in_epoch: number of blocks of the present epoch.
        older: number of blocks from before the last reset, which the server will evict.
        with_end: 1.0 if any sampled block has a time to live, otherwise 0.0; None if no block was sampled.
        about: text about the producer, untrusted; empty if the server has no text.
    """

    producer: str
    block_bytes: int | None = None
    in_epoch: int = 0
    older: int = 0
    with_end: float | None = None
    about: str = ""


@dataclass(kw_only=True)
class NamespaceReport:
    """Contents of a namespace, from a bounded scan of all keys on the servers.

    Attributes:
        looked_at: approximate number of scanned keys. Counts the keys of all namespaces.
        num_names: number of all keys on the servers.
        refused: error reply to the scan; empty if the scan succeeded.
    """

    namespace: str
    looked_at: int = 0
    num_names: int = 0
    refused: str = ""
    producers: list[ProducerReport] = field(default_factory=list)


def nodes_of(seeds: Sequence[Address], connect: Connect, deadline: float) -> dict[Address, list[int]]:
    """Return the masters of a cluster and their divisions, from the first seed that replies.

    Raises: the error of the last seed, if all seeds fail.
    """
    error: Exception | None = None
    for seed in seeds:
        try:
            connection = connect(seed, deadline)
            try:
                question = MapQuestion(deadline=deadline)
                question.run(connection)
            finally:
                connection.close()
        except (OSError, ServerError, ProtocolError) as problem:
            error = problem
        else:
            return {address: [*divisions] for address, divisions in question.divisions.items()}
    assert error is not None
    raise error


def check_single(connection: Connection, namespace: str, deadline: float) -> None:
    """Check that a server is no node of a cluster. Raises `ServerError`.

    Any other error reply, such as a missing permission, is ignored.
    """
    names = [f"{FORMAT}:{namespace}:{word}".encode() for word in ("ping", "pong")]  # of two hash slots
    connection.send([command(b"EXISTS", *names)], deadline)
    answer = connection.answer(deadline)
    if isinstance(answer, ServerError) and answer.is_of_cluster:
        raise answer


def inspect_server(
    connection: Connection,
    address: Address,
    namespace: str,
    division: int | None,
    ttl_s: int,
    deadline: float,
) -> ServerReport:
    """Report facts about a server and its suitability as a tier.

    Args:
        division: any division of the cluster node, so that the test key belongs to this node; None for a
            single server.
        ttl_s: configured time to live of written blocks in seconds; 0 if there is none.
    """

    def ask(*words: bytes) -> Answer:
        connection.send([command(*words)], deadline)
        return connection.answer(deadline)

    def round_trip() -> float:
        begun = time.monotonic()
        ask(b"EXISTS", test_key)
        return time.monotonic() - begun

    tag = "" if division is None else f"{{{tags()[division]}}}"
    test_key = f"{FORMAT}:{namespace}:ping:{tag}:{secrets.token_hex(8)}".encode()
    commands = [
        (b"SET", test_key, b"1", b"EX", _FORGOTTEN_AFTER_S),
        (b"GET", test_key),
        (b"EXISTS", test_key),
        (b"DEL", test_key),
    ]
    commands += [] if division is None else [(b"CLUSTER", b"SLOTS"), (b"WAIT", b"0", b"1")]
    answers = {words[0].decode(): ask(*words) for words in commands}
    refused = [f"{verb}: {answer}" for verb, answer in answers.items() if isinstance(answer, ServerError)]
    round_trip_s = min(round_trip() for _ in range(_ROUNDS))
    report = ServerReport(address=f"{address[0]}:{address[1]}", round_trip_s=round_trip_s, refused=refused)
    facts = facts_of(ask(b"INFO"))
    settings = pairs_of(ask(b"CONFIG", b"GET", b"*"))
    _fill(report, facts)
    report.persistence = persistence_of(facts, settings)[0].value
    count = ask(b"DBSIZE")
    report.num_names = count if isinstance(count, int) else None
    report.warnings = _warnings(report, facts, settings, ttl_s, in_cluster=division is not None)
    _make_printable(report, connection)
    return report


def inspect_namespace(connections: Sequence[Connection], namespace: str, deadline: float) -> NamespaceReport:
    """Report the contents of a namespace on these nodes. Scans about `MOST_NAMES` keys on each node."""
    report, producers = NamespaceReport(namespace=namespace), dict[str, ProducerReport]()
    for connection in connections:
        for names in _scanned(connection, report, deadline):
            _add(connection, producers, names, namespace, deadline)
    report.producers = sorted(producers.values(), key=lambda producer: -(producer.in_epoch + producer.older))
    return report


# ---- inside


def _scanned(connection: Connection, report: NamespaceReport, deadline: float) -> list[list[bytes]]:
    """Scan a node for names in the report's namespace; returns a list of names for each SCAN command."""

    def ask(*words: bytes) -> Answer:
        (answer,) = _answers(connection, [words], deadline)
        return answer

    size = ask(b"DBSIZE")
    report.num_names += size if isinstance(size, int) else 0
    pattern, cursor, looked_at = f"{FORMAT}:{report.namespace}:*".encode(), b"0", 0
    batches: list[list[bytes]] = []
    while looked_at < MOST_NAMES:
        answer = ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _NAMES_A_CALL)
        if isinstance(answer, ServerError):
            report.refused = str(answer)
            break
        if not (isinstance(answer, list) and len(answer) == 2 and isinstance(answer[1], list)):
            raise ProtocolError("the reply to SCAN is not a cursor and names")
        cursor = answer[0] if isinstance(answer[0], bytes) else b"0"
        batches.append(
            [name for name in answer[1] if isinstance(name, bytes) and name.startswith(pattern[:-1])]
        )
        looked_at += int(_NAMES_A_CALL)
        if cursor == b"0":
            looked_at = size if isinstance(size, int) else looked_at
            break
    report.looked_at += min(looked_at, size) if isinstance(size, int) else looked_at
    return batches


def _answers(connection: Connection, commands: Sequence[Sequence[bytes]], deadline: float) -> list[Answer]:
    """Send commands and return the replies. Raises `TimeoutError` after `_REPLY_S` or at the deadline."""
    until = min(deadline, time.monotonic() + _REPLY_S)
    connection.send([command(*words) for words in commands], until)
    return [connection.answer(until) for _ in commands]


def _add(
    connection: Connection,
    producers: dict[str, ProducerReport],
    names: list[bytes],
    namespace: str,
    deadline: float,
) -> None:
    """Count the blocks among `names` in the reports of their producers.

    Also adds to the reports the size and time to live of the first few blocks, and texts about producers.
    """
    # FORMAT:NAMESPACE:PRODUCER:KIND..., where the kind is `epoch`, `about`, or the number of an epoch.
    by_kind: dict[bytes, list[bytes]] = {b"epoch": [], b"about": [], b"": []}
    for name in names:
        kind = name.split(b":", 3)[-1].partition(b":")[0]
        by_kind[next((known for known in (b"epoch", b"about") if kind.startswith(known)), b"")].append(name)
    _add_abouts(connection, producers, by_kind[b"about"], deadline)
    epochs: dict[bytes, bytes] = {}
    blocks = [name for name in by_kind[b""] if name.count(b":") in (4, 5) and not is_rest(name)]
    places = {_epoch_name(name) for name in blocks} | {*by_kind[b"epoch"]}
    for place in places:
        (answer,) = _answers(connection, [(b"GET", place)], deadline)
        epochs[place] = answer if isinstance(answer, bytes) else b""
        producer = connection.shown(place.split(b":")[2])
        producers.setdefault(producer, ProducerReport(producer=producer))
    for name in blocks:
        report = producers[connection.shown(name.split(b":")[2])]
        if name.split(b":")[3] == epochs[_epoch_name(name)]:
            report.in_epoch += 1
        else:
            report.older += 1
    for name in blocks[:_LENGTHS]:
        report = producers[connection.shown(name.split(b":")[2])]
        commands = [(b"STRLEN", name), (b"STRLEN", *rest_names([name])), (b"TTL", name)]
        first, second, ttl = _answers(connection, commands, deadline)
        if isinstance(first, int) and isinstance(second, int) and first > HEADER_BYTES:
            report.block_bytes = first + second - HEADER_BYTES
        if isinstance(ttl, int):
            report.with_end = float(ttl >= 0) if report.with_end is None else max(report.with_end, ttl >= 0)


def _add_abouts(
    connection: Connection, producers: dict[str, ProducerReport], names: list[bytes], deadline: float
) -> None:
    """Read the texts stored under `names`, and add each to its producer's report, up to `MAX_BYTES`."""
    for name in names:
        producer = connection.shown(name.split(b":")[2])
        words = (b"GETRANGE", name, b"0", b"%d" % (MAX_BYTES - 1))
        (answer,) = _answers(connection, [words], deadline)
        if isinstance(answer, bytes):
            about = connection.masked(unpack(answer))
            producers.setdefault(producer, ProducerReport(producer=producer)).about = about


def _epoch_name(block: bytes) -> bytes:
    parts = block.split(b":")
    return b":".join([*parts[:3], b"epoch", *parts[4:-1]])


def _make_printable(report: ServerReport, connection: Connection) -> None:
    """Escape the server's text in a report, and mask the password."""
    for name, value in vars(report).items():
        if isinstance(value, str):
            setattr(report, name, connection.shown(value))
    report.refused, report.warnings = (
        [connection.shown(line) for line in lines] for lines in (report.refused, report.warnings)
    )


def _fill(report: ServerReport, facts: Mapping[str, str]) -> None:
    for name in ("valkey_version", "redis_version"):
        if report.version is None and name in facts:
            report.version = f"{name.partition('_')[0].capitalize()} {facts[name]}"
    report.role, report.allocator = facts.get("role"), facts.get("mem_allocator")
    report.eviction_policy = facts.get("maxmemory_policy")
    numbers = {
        "uptime_s": "uptime_in_seconds",
        "num_replicas": "connected_slaves",
        "used_bytes": "used_memory",
        "limit_bytes": "maxmemory",
        "hits": "keyspace_hits",
        "misses": "keyspace_misses",
        "evicted": "evicted_keys",
    }
    for attribute, fact in numbers.items():
        if facts.get(fact, "").isdigit():
            setattr(report, attribute, int(facts[fact]))


def _warnings(
    report: ServerReport, facts: Mapping[str, str], settings: Mapping[str, str], ttl_s: int, in_cluster: bool
) -> list[str]:
    warnings, policy = [], report.eviction_policy or ""
    samples = settings.get("maxmemory-samples", "")
    if not facts:
        warnings.append("this user may not read INFO: the settings were not checked")
    if report.role == "slave":
        warnings.append("it is a replica: it accepts no writes")
    if report.limit_bytes == 0:
        warnings.append("maxmemory is 0: the server grows until the machine has no memory; set a limit")
    if policy == "noeviction":
        warnings.append(
            "maxmemory-policy is noeviction: a full server keeps no new blocks; set allkeys-lru, or "
            "volatile-lru with ttl= in the URL"
        )
    if policy.startswith("volatile-") and not ttl_s:
        warnings.append(
            f"maxmemory-policy is {policy}, which evicts only keys with a time to live: add ttl= to the URL"
        )
    saves = "after a crash it restores blocks from before a reset, and it writes all blocks to its disk"
    warnings += [f'{reason}: {saves}; set save to "" and appendonly to no'
              for reason in persistence_of(facts, settings)[1]]  # fmt: skip
    if policy.endswith("-random"):
        warnings.append(
            f"maxmemory-policy is {policy}: it evicts halves of blocks; set allkeys-lru or volatile-lru"
        )
    elif policy != "noeviction" and samples.isdigit() and 0 < int(samples) < _ENOUGH_SAMPLES:
        warnings.append(
            f"maxmemory-samples is {samples}: up to a tenth of the memory will hold halves of blocks; "
            f"set it to {_ENOUGH_SAMPLES}"
        )
    if in_cluster and settings.get("cluster-require-full-coverage") == "yes":
        warnings.append(
            "cluster-require-full-coverage is yes: while one master is down all others refuse; set it to no"
        )
    if in_cluster and report.num_replicas == 0:
        warnings.append("it has no replica: its blocks are unavailable while it is down")
    return warnings
