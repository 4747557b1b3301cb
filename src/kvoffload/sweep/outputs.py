"""Output files with rows, in CSV, JSON or Parquet. Equal rows give files with equal bytes.

The suffix of the file determines the format. A row is a struct; the fields of a nested struct become columns,
too. This module does not know the meaning of rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.settings.output_files import check_regular, replaced
from kvoffload.settings.read import without_none


class RowsFile:
    """An output file with rows, which is written atomically.

    Raises: `ConfigError` if the suffix is unknown, if the path exists but is no regular file, or if the
    format is Parquet and pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        writers = {".csv": _csv, ".json": as_json, ".parquet": _parquet}
        if path.suffix not in writers:
            raise ConfigError("output", str(path), f"allowed: a file that ends in {', '.join(writers)}")
        check_regular("output", path)
        if path.suffix == ".parquet":
            try:
                import pyarrow  # noqa: F401
            except ImportError:
                raise ConfigError(
                    "output", str(path), "Parquet needs pyarrow: pip install 'kvoffload[parquet]'"
                ) from None
        self.path, self._encode = path, writers[path.suffix]

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write the file with these rows, which must be of one class. Replaces an existing file atomically.

        Raises `ConfigError` if the file cannot be written.
        """
        content = self._encode(rows)
        with replaced("output", self.path) as incomplete:
            incomplete.write_bytes(content)


def flat(row: msgspec.Struct) -> dict[str, Any]:
    """Return a dict of a row's columns and their values, in field order, with nested structs flattened."""
    columns: dict[str, Any] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        columns |= flat(value) if isinstance(value, msgspec.Struct) else {name: value}
    return columns


def _types(row: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a dict: name of a column -> its type. `row` is the class of the rows."""
    types: dict[str, Any] = {}
    for field in msgspec.structs.fields(row):
        is_struct = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        types |= _types(field.type) if is_struct else {field.name: field.type}
    return types


def _csv(rows: Sequence[msgspec.Struct]) -> bytes:
    """Encode rows as CSV with a heading. None becomes an empty field. Numbers keep their full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        columns = flat(row)
        if number == 0:
            writer.writerow(columns)
        writer.writerow([_in_csv(value) for value in columns.values()])
    return text.getvalue().encode()


def _in_csv(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def as_json(rows: Sequence[msgspec.Struct]) -> bytes:
    """Encode rows as one JSON array, with one line and one object for each row."""
    return b"[\n" + b",\n".join(msgspec.json.encode(flat(row)) for row in rows) + b"\n]\n"


def _parquet(rows: Sequence[msgspec.Struct]) -> bytes:
    """Encode rows as Parquet, in one row group.

    Column types come from the class of the rows, so that a column with only nulls also has a type.
    """
    import pyarrow
    import pyarrow.parquet

    types: dict[Any, Any] = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
    }
    columns = []
    for name, kind in _types(type(rows[0])).items():
        columns.append(pyarrow.field(name, types[without_none(kind)]))
    table = pyarrow.Table.from_pylist([flat(row) for row in rows], schema=pyarrow.schema(columns))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
