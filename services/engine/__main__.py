"""Where the command begins. Ctrl-C ends it without a traceback, also while its modules load."""

import sys


def main() -> int:
    """`engine`; the exit code."""
    try:
        from engine import cli  # noqa: PLC0415

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
