"""Writes the files beside it in which a few bytes stand for many: Parquet files that lie, with run-length encoded ids of one
row, and a chunk of LZMA2."""

import lzma
import struct
from pathlib import Path

here = Path(__file__).parent
INT, LONG, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
COLUMN = [b"input_ids", b"list", b"element"]


def unsigned(number):
    """Seven bits a byte, the lowest first."""
    text = b""
    while number > 0x7F:
        text += bytes([number & 0x7F | 0x80])
        number >>= 7
    return text + bytes([number])


def signed(number):
    return unsigned(number << 1)


def text(text):
    return unsigned(len(text)) + text


def struct_of(*fields):
    """A struct of Thrift's compact protocol: number, kind and bytes of each field."""
    written, before = b"", 0
    for number, kind, value in fields:
        written += bytes([number - before << 4 | kind]) + value
        before = number
    return written + b"\0"


def list_of(kind, values):
    return bytes([len(values) << 4 | kind]) + b"".join(values)


def element(*fields):
    return struct_of(*((number, INT, signed(value)) if isinstance(value, int) else (number, BINARY, text(value))
                       for number, value in fields))


SCHEMA = [
    element((4, b"root"), (5, 1)),
    element((3, 1), (4, b"input_ids"), (5, 1), (6, 3)),
    element((3, 2), (4, b"list"), (5, 1)),
    element((1, 1), (3, 1), (4, b"element")),
]


def run(count, value):
    return unsigned(count << 1) + bytes([value])


def page(values, is_first):
    """Values that are all the dictionary's only one; of one row, which the first page begins."""
    repetition = run(1, 0) + run(values - 1, 1) if is_first else run(values, 1)
    definition = run(values, 3)
    body = b"".join(struct.pack("<i", len(it)) + it for it in [repetition, definition]) + b"\0" + run(values, 0)[:-1]
    of_page = struct_of(*((number, INT, signed(it)) for number, it in [(1, values), (2, 8), (3, 3), (4, 3)]))
    size = (INT, signed(len(body)))
    return struct_of((1, INT, signed(0)), (2, *size), (3, *size), (5, STRUCT, of_page)) + body


def file(name, pages, rows=1, in_dictionary=1):
    of_dictionary = struct_of((1, INT, signed(in_dictionary)), (2, INT, signed(0)))
    four = (INT, signed(4))
    out = struct_of((1, INT, signed(2)), (2, *four), (3, *four), (7, STRUCT, of_dictionary)) + struct.pack("<i", 7)
    first = len(out) + 4
    out += b"".join(page(values, number == 0) for number, values in enumerate(pages))
    size = (LONG, signed(len(out)))
    column = struct_of(
        (1, INT, signed(1)), (2, LIST, list_of(INT, [signed(0), signed(3), signed(8)])),
        (3, LIST, list_of(BINARY, [text(it) for it in COLUMN])), (4, INT, signed(0)),
        (5, LONG, signed(sum(pages))), (6, *size), (7, *size), (9, LONG, signed(first)), (11, LONG, signed(4)),
    )
    chunk = struct_of((2, LONG, signed(4)), (3, STRUCT, column))
    group = struct_of((1, LIST, list_of(STRUCT, [chunk])), (2, *size), (3, LONG, signed(rows)))
    footer = struct_of(
        (1, INT, signed(1)), (2, LIST, list_of(STRUCT, SCHEMA)), (3, LONG, signed(rows)),
        (4, LIST, list_of(STRUCT, [group])),
    )
    (here / name).write_bytes(b"PAR1" + out + footer + struct.pack("<I", len(footer)) + b"PAR1")


file("one_page.parquet", [2**31 - 1])
file("two_pages.parquet", [1000, 2**27])
file("fewer_rows.parquet", [1000], rows=5)
file("large_dictionary.parquet", [1000], in_dictionary=2**31 - 1)

# Comments of a trace, nearly 2 MiB of them, as one chunk of LZMA2 and its end.
FILTERS = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 22, "lc": 3, "lp": 0, "pb": 2}]
(here / "comments.lzma2").write_bytes(lzma.compress((b"#" * 255 + b"\n") * 8191, lzma.FORMAT_RAW, filters=FILTERS))
