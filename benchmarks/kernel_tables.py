"""The tables and the picture of docs/performance.md, from several runs of `kvpager bench kernel --json`."""

import argparse
import json
from pathlib import Path

from kvpager.bench.plots import draw_kernels


def heads(row):
    return f"{row['query_heads']}/{row['kv_heads']}, {row['head_dim']}"


def case(row):
    return heads(row), row["tokens"], row["batch"], row["queries"]


def cell(row, *names):
    """Times faster than each of these kernels."""
    return " | ".join(f"{row['times_faster'][name]:.1f}" if name in row["times_faster"] else "" for name in names)


def table(rows):
    print("| heads | tokens | batch | pages | ms | GB/s | of stream | x fp32 | x bf16 | x reference | mass costs |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        faster = cell(row, "sdpa-fp32", "sdpa-bf16", "reference")
        massless = row["times_faster"].get("native-massless")
        cost = f"{1 / massless - 1:+.1%}" if massless else ""
        share = f"{row['stream_beside_fraction']:.0%}"
        where = f"{heads(row)} | {row['tokens']:,} | {row['batch']} | {row['dtype']}"
        print(f"| {where} | {row['ms']:.3f} | {row['gb_per_s']:.1f} | {share} | {faster} | {cost} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python benchmarks/kernel_tables.py docs/images/kernels.png RUN.json..."
    )
    parser.add_argument("target", help="the picture")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="outputs of --json")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.runs]
    rows = [row for run in runs for row in run["rows"]]
    for kernel in ("native-layer", "native"):
        for queries in sorted({row["queries"] for row in rows if row["kernel"] == kernel}):
            print(f"\n{kernel}, {queries} queries\n")
            table(row for row in rows if row["kernel"] == kernel and row["queries"] == queries)
    print()
    for run in runs:
        for one in run["select"]:
            print(f"select: {one['select_ms']:.2f} ms, {one['share']:.1%} of {one['attend_ms']:.2f} ms", one["dtype"])
        others = run["others_share"]
        print(f"stream {run['stream_gb_per_s']:.1f} GB/s, others {others:.1%}", *run["skipped"], sep="; ")
    machine = f"{runs[0]['machine']['processor']}, {runs[0]['threads']} threads, {runs[0]['isa']}"
    draw_kernels([row for row in rows if row["kernel"] != "native-massless"], machine, args.target)


if __name__ == "__main__":
    main()
