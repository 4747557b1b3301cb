"""Rows as a file: CSV, JSON or Parquet, by suffix. Equal rows give equal bytes.

Does not know what the rows mean.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError


class RowsFile:
    """The file `path`, written at once when there is something to write.

    Raises: `ConfigError` that names the output, for a suffix that is none of ours, for a path that is no
    regular file, for Parquet without pyarrow.
    """

    def __init__(self, path: Path) -> None:
        writers = {".csv": _csv, ".json": as_json, ".parquet": _parquet}
        if path.suffix not in writers:
            raise ConfigError("output", str(path), f"a file that ends in {', '.join(writers)}")
        if path.exists() and not path.is_file():
            raise ConfigError("output", str(path), "a regular file, or one that does not exist yet")
        if path.suffix == ".parquet":
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise ConfigError(
                    "output", str(path), "Parquet needs pyarrow: pip install 'kvoffload[parquet]'"
                ) from None
        self.path, self._encode = path, writers[path.suffix]

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Replace the file by these rows, all of one class; until then the old one is whole.

        Raises `ConfigError` if it cannot be written.
        """
        content = self._encode(rows)
        # Its name ends in nothing that anybody would take for a result.
        unfinished = self.path.with_name(self.path.name + ".part")
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, self.path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise ConfigError(
                "output", str(self.path), f"a file that can be written ({error.strerror})"
            ) from None


def _csv(rows: Sequence[msgspec.Struct]) -> bytes:
    """A heading, then one line a row; null is empty, numbers stand in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row.__struct_fields__)
        writer.writerow([_in_csv(value) for value in msgspec.structs.astuple(row)])
    return text.getvalue().encode()


def _in_csv(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def as_json(rows: Sequence[msgspec.Struct]) -> bytes:
    """One array of objects, one line a row."""
    return b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n"


def _parquet(rows: Sequence[msgspec.Struct]) -> bytes:
    """One row group; the columns' types follow from the row's class, so that a column of nulls has one."""
    import pyarrow
    import pyarrow.parquet

    types: dict[Any, Any] = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
    }
    columns = []
    for field in msgspec.structs.fields(type(rows[0])):
        kinds = [kind for kind in getattr(field.type, "__args__", (field.type,)) if kind is not type(None)]
        columns.append(pyarrow.field(field.name, types[kinds[0]]))
    table = pyarrow.Table.from_pylist(
        [msgspec.structs.asdict(row) for row in rows], schema=pyarrow.schema(columns)
    )
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
