"""Writes the tables beside it with pyarrow 26: what the field's own writer makes of one batch."""

from pathlib import Path

import pyarrow as pa
from pyarrow import feather, ipc, parquet

here = Path(__file__).parent
table = pa.table(
    {
        "text": ["x", "y", "z"],
        "input_ids": pa.array([[5, 6, 7], [5, 6], [8]], pa.list_(pa.int64())),
        "weight": [0.5, -0.5, 0.25],
        "group": ["a", "a", "b"],
    }
)
for compression in ["snappy", "zstd", "gzip"]:
    parquet.write_table(table, here / f"{compression}.parquet", compression=compression)
feather.write_feather(table, here / "lz4.feather", compression="lz4")
with ipc.new_stream(here / "stream.arrows", table.schema) as stream:
    stream.write_table(table)
