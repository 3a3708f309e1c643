"""What a benchmark leaves behind: build/bench/NAME.json, and the table that a document quotes, from the same rows."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "transformers", "numpy", "pyzmq")


@dataclass(frozen=True)
class Row:
    """One figure. `against` names the row's yardstick and `ratio` is value / yardstick; both empty when there is
    none.
    """

    case: str
    metric: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None


def write_report(name: str, rows: Sequence[Row], command: str) -> Path:
    """Write build/bench/NAME.json: the rows, and the machine, versions and commit they were measured on."""
    path = Path("build/bench") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "name": name,
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "commit": commit(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def print_table(title: str, rows: Sequence[Row]) -> None:
    """The rows as a table on stdout."""
    table = Table(title=title)
    for column in ("case", "metric", "value", "unit", "against", "ratio"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.case, row.metric, f"{row.value:.4g}", row.unit, row.against, ratio)
    # Wide enough that a redirected table is not folded.
    Console(width=120).print(table)


def machine() -> dict[str, str | int]:
    """The processor's name and how many cores this process may use."""
    return {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def commit() -> str:
    """The checked-out commit, with a + when the tree differs from it; empty outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
