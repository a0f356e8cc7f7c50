"""Reads an offline W&B run back: a LevelDB log of protobuf records in blocks of 32 KiB."""

import json
import struct
import zlib
from pathlib import Path

BLOCK, HEADER = 32768, 7
# Kinds of chunks in a LevelDB log: a record that does not fit into a block is split into several.
FULL, FIRST, _, LAST = 1, 2, 3, 4


def records(path: Path):
    """The records of a .wandb file, checksums verified."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert struct.unpack("<4sHB", data[:HEADER])[:2] == (b":W&B", 0xBEE1)
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        checksum, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) == checksum
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def items(entries) -> dict:
    return {
        "/".join(entry.nested_key) if entry.nested_key else entry.key: json.loads(entry.value_json) for entry in entries
    }


def read_identities(folder: Path) -> list[tuple[str, str, str]]:
    """W&B id, group and job type of every start of a run in the folder, in order of time."""
    runs = [
        next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
        for path in sorted(folder.glob("wandb/*run-*/run-*.wandb"))
    ]
    return [
        (run.run_id, run.run_group, run.job_type)
        for run in sorted(runs, key=lambda run: run.start_time.ToNanoseconds())
    ]


def read_offline_run(folder: Path) -> tuple[list[dict], dict, dict]:
    """History rows, summary and config of all runs that a folder holds."""
    history, summary, config = [], {}, {}
    for path in sorted(folder.glob("wandb/*run-*/run-*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                history.append(items(record.history.item))
            elif kind == "summary":
                summary |= items(record.summary.update)
            elif kind == "run":
                config |= items(record.run.config.update)
            elif kind == "config":
                config |= items(record.config.update)
    return history, summary, config
