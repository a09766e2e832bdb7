"""`fagen doctor`: what this machine has and lacks."""

from __future__ import annotations

import typer

from fagen.cli.options import AsJson, examples, new_app
from fagen.cli.output import print_json
from fagen.show import doctor as diagnosis

app = new_app()


@app.command(epilog=examples("fagen doctor"))
def doctor(as_json: AsJson = False) -> None:
    """Say what is here, what is missing, and the line that fixes it.

    Exit code 1 if kernels cannot be compiled; a missing GPU is only a warning.
    """
    findings = diagnosis.diagnose()
    if as_json:
        print_json([finding.model_dump() for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.status:<5} {finding.what:<10} {finding.found}")
            if finding.fix:
                print(f"{'':<16} -> {finding.fix}")
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)
