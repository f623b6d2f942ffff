"""`python -m benchmarks [--quick] [TOPIC ...]`: measure, write JSON, and write the page from all JSON files."""

from __future__ import annotations

import argparse
import datetime
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import machine, summary
from benchmarks.page import PAGE, markdown, page
from benchmarks.results import FOLDER, Results, read, read_all, write
from benchmarks.suite import Settings, set_threads
from benchmarks.topics import TOPICS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested topics; return the number of topics that failed."""
    options = parse(arguments)
    names = options.topics or list(TOPICS)
    failed: list[str] = []
    if len(names) == 1 and not options.page:
        measure(names[0], options)
    elif not options.page:
        failed = [name for name in names if not measured_apart(name, options)]
    if options.out == FOLDER and not options.quick:
        write_pages()
    for name in failed:
        print(f"topic {name} failed; its message is above", file=sys.stderr)
    return len(failed)


def write_pages() -> None:
    """Write the page of benchmarks, the numbers of two other pages, the README's table and picture, from the files."""
    results = read_all(TOPICS)
    PAGE.write_text(page(results), encoding="utf-8")
    for path, written in ((summary.PAGE, summary.with_numbers), (summary.ENCODERS, summary.with_encoders)):
        path.write_text(written(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    for each in results:
        if each.topic == "efficiency":
            summary.PICTURE.write_text(summary.chart(each), encoding="utf-8")
            readme = summary.README.read_text(encoding="utf-8")
            summary.README.write_text(summary.with_chart(readme, each), encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("benchmarks", description="What fxopt costs and brings, beside its peers.")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"all, or some of: {', '.join(TOPICS)}")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds; writes no page")
    parser.add_argument("--rounds", type=int, help="how often each candidate is measured: 30, or 3 if quick")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU (default: 2)")
    parser.add_argument(
        "--busy", action="store_true", help="one thread and its processor seconds, where others work too"
    )
    only = "efficiency: tables with such titles; encoders, plans, never-slower, architectures: such models"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=only)
    parser.add_argument("--seconds", type=float, help="efficiency: of one pass of a row: 1, or 0.1 if quick")
    parser.add_argument(
        "--resume", action="store_true", help="efficiency, plans: measure the tables that the file lacks"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of JSON files (default: docs/benchmarks)")
    parser.add_argument("--page", action="store_true", help="write the page from the files, and measure nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.topics if name not in TOPICS]
    if unknown:
        parser.error(f"no topic {', '.join(unknown)}; there are {', '.join(TOPICS)}")
    return options


def measure(name: str, options: argparse.Namespace) -> Results | None:
    """Run one topic, print its tables as they come, and write them; quick ones only into a folder that was named."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers warn of deprecations of their own
    threads = 1 if options.busy else options.threads
    set_threads(threads)
    rounds = options.rounds or (3 if options.quick else 30)
    path = options.out / f"{name}.json"
    former = read(path) if path.exists() and (options.resume or options.only) else None
    there, facts = former.tables if former else (), machine.facts(threads)
    processor = f"{facts['processor']}, {facts['instructions']}"
    here = f" Measured at {facts['commit']} on another processor than the rest: {processor}."
    if former is None or former.machine["processor"] == facts["processor"]:
        here = ""
    else:
        facts = former.machine
    known = {table.title: table for table in there} if options.resume else {}
    seconds = options.seconds or (0.1 if options.quick else 1.0)
    settings = Settings(
        options.quick,
        rounds,
        threads,
        busy=options.busy,
        only=tuple(options.only),
        seconds=seconds,
        known=known,
    )
    started, before = time.perf_counter(), machine.load()
    tables, results = {table.title: table for table in there}, None
    for table in TOPICS[name](settings):
        table = table if table.title in known else replace(table, text=table.text + here)
        print(markdown(table), flush=True)
        tables[table.title] = table.beside(tables.get(table.title)) if options.only else table
        run = {
            "on": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "rounds": str(settings.rounds),
            "in": f"{time.perf_counter() - started:.0f} s",
            "load before": before,
            "load after": machine.load(),
            **({"quick": "yes"} if settings.quick else {}),
        }
        results = Results(name, tuple(tables.values()), facts, run)
        if options.out != FOLDER or not settings.quick:  # after each table, so that a run can be resumed
            write(results, options.out)
    print(f"{len(tables)} tables of {name}", file=sys.stderr)
    return results


def measured_apart(name: str, options: argparse.Namespace) -> bool:
    """Run one of several topics in a process of its own; return whether it went well."""
    flags = ["--threads", str(options.threads), "--out", str(options.out)]
    flags += ["--quick"] if options.quick else []
    flags += ["--busy"] if options.busy else []
    flags += ["--resume"] if options.resume else []
    flags += ["--rounds", str(options.rounds)] if options.rounds else []
    return subprocess.run([sys.executable, "-m", "benchmarks", *flags, name], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
