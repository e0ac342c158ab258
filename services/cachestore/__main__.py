"""Where the commands begin. Ctrl-C ends one without a traceback, also while its modules load."""

import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """`cachestore`; the exit code."""
    try:
        from cachestore import cli  # noqa: PLC0415

        return cli.main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def admin() -> int:
    """`cachestore-admin`; the exit code."""
    try:
        from cachestore import admin  # noqa: PLC0415

        return admin.main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
