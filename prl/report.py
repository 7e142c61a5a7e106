"""`python -m prl.report RUN`: write a run's report and summary anew, or audit its ledger."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prl.cli import exit_code
from prl.config.load import ConfigError
from prl.transport.run_dir import RunDir

HELP = """Write RUN/report.html and RUN/summary.json from what a run has recorded, finished or not, and print the closing table.

With --audit: check from the ledgers, checkpoints and versions that every rollout was trained at most once and that every task
up to the frontier has its one fate; exit code 1 if a rule is broken.

\b
Examples:
  python -m prl.report outputs/demo
  python -m prl.report outputs/demo --audit
  python -m prl.report outputs/demo --measurements bench/results/pipeline.json
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as outputs/demo.")],
    audit: Annotated[
        bool, typer.Option("--audit", help="Prove that every batch was trained once and nothing was skipped.")
    ] = False,
    measurements: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show this bench's result (`python -m prl.bench … --json FILE`) too.")
    ] = None,
) -> None:
    run = RunDir(folder)
    if not run.config_path.is_file():
        print(f"{folder}: not the folder of a run: no config.yaml in it", file=sys.stderr)
        raise typer.Exit(2)
    if audit:
        from prl.orchestrator.audit import audit as audit_run

        try:
            found = audit_run(run)
        except (ConfigError, OSError) as e:
            print(e, file=sys.stderr)
            raise typer.Exit(2) from None
        print(found)
        raise typer.Exit(0 if found.ok else 1)
    from prl.monitor.report import write_report
    from prl.monitor.summary import table, write_summary

    try:
        summary = write_summary(run)
        page = write_report(run, measurements)
    except (ConfigError, ValueError) as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as e:
        print(f"the report cannot be written: {e}", file=sys.stderr)
        raise typer.Exit(1) from None
    Console().print(table(summary))
    print(f"report: {page}")


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where the audit finds a broken rule, 2 for a wrong command line or folder."""
    return exit_code(app, args, "python -m prl.report")


if __name__ == "__main__":
    sys.exit(main())
