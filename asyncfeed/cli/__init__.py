"""The command line: ``asyncfeed inspect | plan | index | stream | bench | demo``.

Needs the extra ``cli``. Nothing else in asyncfeed imports it.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

EXTRA = ("typer", "rich")

INTERRUPTED = 130
"""What shells call a program that Ctrl-C ended: 128 and the number of SIGINT."""


def main() -> int:
    """Run the command line with the arguments of the process; what it returns is the exit code."""
    try:
        # Here and not above: without the extra, the script is installed all the same and must say what is missing.
        from asyncfeed.cli.app import run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write('asyncfeed: the command line needs typer and rich: pip install "asyncfeed[cli]"\n')
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return run(sys.argv[1:])
