"""The report of a suite, as Markdown and as one HTML file that needs no other."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training.suite_plots import plot_cells, plot_maps, plot_regret, plot_time_line
from training.targets import (
    POLICY,
    THRESHOLD,
    Target,
    best_of,
    fixed_names,
    judge,
    mean_difference,
    mean_objective,
    share_of_bound,
    share_of_oracle,
)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
MARKS = {True: "hit", False: "MISS", None: "-"}
BANDS = ("light", "crossover", "saturated", "open 0.7", "open 0.9", "open 1.1")


def target_table(targets: Sequence[Target]) -> Table:
    """Return every target with its value."""
    rows = [(t.name, t.system, t.value, MARKS[t.hit], t.where) for t in targets]
    return ("target", "system", "value", "", "deciding cell"), rows


def controller_table(system: Mapping[str, Any]) -> Table:
    """Return each controller's means over the cells of a system."""
    cells = system["cells"]
    rows = []
    for name in cells[0]["controllers"]:
        mean, half = mean_difference(cells, name, THRESHOLD)
        items = [c["controllers"][name] for c in cells]
        opened = [c["controllers"][name] for c in cells if not c["closed"]]
        tuned = system["tuned"].get(name, {})
        goodput = float(np.mean([i["slo_goodput_rps"] for i in opened])) if opened else 0.0
        time_s = float(np.mean([i["time_in_system_mean_s"] for i in opened])) if opened else 0.0
        late_s = float(np.mean([i["time_in_system_p99_s"] for i in opened])) if opened else 0.0
        rows.append(
            (
                name,
                f"{100 * mean:+.2f}% ± {100 * half:.2f}",
                f"{np.mean([share_of_oracle(c, name) for c in cells]):.4f}",
                f"{min(share_of_oracle(c, name) for c in cells):.3f}",
                f"{np.mean([share_of_oracle(c, name, True) for c in cells]):.4f}",
                f"{share_of_bound(cells, name):.4f}",
                f"{goodput:.2f}",
                f"{time_s:.2f} / {late_s:.2f}",
                f"{np.mean([i['switches_per_min'] for i in items]):.0f}",
                str(tuned.get("trials", "-")),
            )
        )
    header = (
        "controller",
        "over the tuned threshold",
        "of oracle",
        "worst",
        "of oracle, governed",
        "of bound",
        "open: goodput req/s",
        "open: time mean / p99 s",
        "switches/min",
        "settings tried",
    )
    return header, rows


def band_table(system: Mapping[str, Any]) -> Table:
    """Return the policy's shares by band of load."""
    rows = []
    for band in BANDS:
        cells = [c for c in system["cells"] if c["band"] == band]
        if cells:
            fixed = [mean_objective(c, POLICY) / best_of(c, fixed_names(c, True)) for c in cells]
            rows.append(
                (
                    band,
                    str(len(cells)),
                    f"{np.mean([share_of_oracle(c) for c in cells]):.4f}",
                    f"{np.mean([share_of_oracle(c, governed=True) for c in cells]):.4f}",
                    f"{np.mean([share_of_oracle(c, 'tuned greedy') for c in cells]):.4f}",
                    f"{100 * (np.mean(fixed) - 1):+.2f}%",
                    f"{100 * mean_difference(cells, POLICY, THRESHOLD)[0]:+.2f}%",
                )
            )
    header = (
        "load",
        "cells",
        "policy of oracle",
        "governed only",
        "tuned greedy of oracle",
        "over the best fixed choice",
        "over the tuned threshold",
    )
    return header, rows


def setting_table(system: Mapping[str, Any]) -> Table:
    """Return what tuning chose."""
    rows = [
        (name, f"{item['score']:.4f}", str(item["trials"]), item["setting"])
        for name, item in system["tuned"].items()
    ]
    return ("baseline", "tuning score", "settings tried", "chosen"), rows


def shift_table(system: Mapping[str, Any]) -> Table:
    """Return how each controller followed phase shifts, medians."""
    rows = []
    for name, found in system["shifts"].items():
        if name == "curves":
            continue
        for rises in (False, True):
            chosen = [s for s in found if s["rises"] == rises]
            if chosen:
                rows.append(
                    (
                        name,
                        "rises" if rises else "falls",
                        str(len(chosen)),
                        f"{np.mean([s['speculating'] for s in chosen]):.0%}",
                        f"{np.median([s['rounds'] for s in chosen]):.0f}",
                        f"{np.median([s['excess'] for s in chosen]):.1f}",
                    )
                )
    header = (
        "controller",
        "acceptance",
        "shifts",
        "speculating",
        "rounds until within 2%",
        "excess regret, native rounds",
    )
    return header, rows


def cell_table(system: Mapping[str, Any]) -> Table:
    """Return the cells: what the policy reached against the references."""
    rows = []
    for c in system["cells"]:
        mine = c["controllers"][POLICY]
        unit = f"{mine['throughput_tok_s']:,.0f} tok/s"
        if not c["closed"]:
            unit = f"{mine['time_in_system_mean_s']:.2f} / {mine['time_in_system_p99_s']:.2f} s"
        fixed = fixed_names(c, True)
        best = max(fixed, key=lambda name: mean_objective(c, name))
        rows.append(
            (
                c["cell"],
                unit,
                f"{mine['ttft_mean_s']:.3f} / {mine['ttft_p99_s']:.3f}",
                f"{1e3 * mine['tpot_mean_s']:.1f} / {1e3 * mine['tpot_p99_s']:.1f}",
                f"{mine['slo_goodput_rps']:.2f}",
                f"{share_of_oracle(c):.3f}",
                f"{share_of_oracle(c, governed=True):.3f}",
                f"{100 * (mean_objective(c, POLICY) / mean_objective(c, best) - 1):+.1f}% ({best})",
                f"{100 * mean_difference([c], POLICY, THRESHOLD)[0]:+.1f}%"
                f" ± {100 * mean_difference([c], POLICY, THRESHOLD)[1]:.1f}",
            )
        )
    header = (
        "cell",
        "policy: throughput, or time mean / p99",
        "TTFT mean / p99 s",
        "TPOT mean / p99 ms",
        "goodput req/s",
        "of oracle",
        "governed only",
        "over the best fixed choice",
        "over the tuned threshold",
    )
    return header, rows


INTRODUCTION = (
    "Simulated servers; paired seeds. The policy is run zero-shot, every baseline is tuned on each "
    "system's own tuning part. The oracle counts as at least as good as the best controller in "
    "each cell; the server started without speculation has a cheaper prefill than any governed "
    "one, so it can beat the oracle: 'governed' leaves it out. Parts and targets: "
    "training/protocol.py, training/targets.py."
)


def _sections(report: Mapping[str, Any]) -> list[tuple[str, Table]]:
    sections = [("Targets", target_table(judge(report)))]
    for system in report["systems"]:
        name = system["system"] + (", held out" if system["held_out"] else ", trained on")
        sections += [
            (f"{name}: controllers", controller_table(system)),
            (f"{name}: by load", band_table(system)),
            (f"{name}: after phase shifts", shift_table(system)),
            (f"{name}: what tuning chose", setting_table(system)),
            (f"{name}: cells", cell_table(system)),
        ]
    return sections


def _title(report: Mapping[str, Any]) -> str:
    return (
        f"Suite {report['suite']}: policy {report['checkpoint'][:12]}, "
        f"{report['num_seeds']} seeds a cell"
    )


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown tables."""
    lines = [f"# {_title(report)}", "", INTRODUCTION]
    for title, (header, rows) in _sections(report):
        lines += ["", f"## {title}", "", "| " + " | ".join(header) + " |"]
        lines += ["|" + " --- |" * len(header)]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
        ]
    return "\n".join(lines) + "\n"


STYLE = """body{font:14px/1.45 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:.5em 0 1.5em;font-size:12px}
td,th{border-bottom:1px solid #ddd;padding:3px 8px;text-align:left;vertical-align:top}
th{background:#f5f5f5}.hit{color:#18794e}.MISS{color:#c0392b;font-weight:bold}
svg{max-width:100%;height:auto}summary{cursor:pointer;font-weight:bold;margin:.6em 0}"""


def _html_table(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = "".join(
            f'<td class="{cell}">{cell}</td>'
            if cell in ("hit", "MISS")
            else f"<td>{html.escape(cell)}</td>"
            for cell in row
        )
        body += f"<tr>{cells}</tr>\n"
    return f"<table><tr>{head}</tr>\n{body}</table>"


def html_report(report: Mapping[str, Any]) -> str:
    """Return the report as one HTML page with its plots inside."""
    systems = report["systems"]
    title = html.escape(_title(report))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style><h1>{title}</h1><p>{html.escape(INTRODUCTION)}</p>",
    ]
    sections = _sections(report)
    parts += ["<h2>Targets</h2>", _html_table(sections[0][1])]
    parts += ["<h2>Policy map</h2>", plot_maps(systems)]
    for system in systems:
        if "time_line" in system:
            parts += [
                f"<h2>Time line: {system['system']}</h2>",
                plot_time_line(system["time_line"]),
            ]
    parts += ["<h2>Regret after a phase shift</h2>", plot_regret(systems)]
    parts += ["<h2>Cells</h2>", *(plot_cells(system) for system in systems)]
    for heading, table in sections[1:]:
        opened = " open" if heading.endswith("controllers") else ""
        parts += [
            f"<details{opened}><summary>{html.escape(heading)}</summary>",
            _html_table(table),
            "</details>",
        ]
    return "\n".join(parts) + "</html>\n"
